"""Random sequences of events on the real daemon: engines of three kinds store, load, reset, end and begin, while their
sessions end, the pool is paused, resized and laid out anew, and the daemon is stopped, killed and started. Run by
`check_runner.py`.

After every step: a load that succeeded has the bytes its keys stand for, in every rank; each job is reported once;
nothing is raised. At the end: every engine hits what it stores, nothing stays leased, writing or orphaned, and the
daemon has ended no connection for what our own code sent.

`SEQUENCE_SEEDS=3,4 SEQUENCE_STEPS=60 python tests/engine/replay_sequences.py` runs these; with `SEQUENCE_ONLY=0,5,7`
only these steps of them, each with what it drew, so that a sequence that fails can be made short.
"""

import contextlib
import logging
import os
import random
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from check_runner import Control, check, run_checks
from sequence_engine import STORED, Job, SequenceEngine, draw
from toy_engine import keys_of, wait_until

from kvoffload.protocol import client

SEEDS = (6, 7, 8)
STEPS = 50
NUM_KEYS = 160
MAX_KEYS_OF_JOB = 14
MAX_KNOWN = 60
"""So many of the keys that were stored first last are asked for most of the time."""
SETTLE_SECONDS = 15.0
SERVICE_SECONDS = 1.5
STUCK_SECONDS = 75
KINDS = {
    "copy": ("all", "all"),
    "copy-too": ("all", "all"),
    "per-rank": ("rank-0", "rank-1"),
}
"""Names of the engines, and their ranks' parts. The first two are of one identity."""
SPEC_CHANGES = (
    "pause",
    "resume",
    "resume",
    "resume",
    "observe",
    "never replicate",
    "never replicate",
    "replicate",
    "replicate",
    "quota",
    "guarantee",
    "no quota",
    "few engines",
    "many engines",
)
Step = Callable[["Sequence", random.Random], None]
STEP_WEIGHTS: dict[Step, int] = {}


def step(weight: int) -> Callable[[Step], Step]:
    def add(function: Step) -> Step:
        STEP_WEIGHTS[function] = weight
        return function

    return add


class Sequence:
    """One sequence, and all that it has done so far."""

    def __init__(self, socket_path: str, control: Control, seed: int) -> None:
        self.sockets = [socket_path, str(Path(socket_path).with_name("pod-other.sock"))]
        self.control = control
        self.seed = seed
        self.daemon = "running"
        self.is_observing = False
        self.is_active = True
        self.engines: dict[str, SequenceEngine] = {}
        self.log: list[str] = []
        self.num_checked = 0
        self.is_over = False
        self.by_namespace = seed % 3 == 0
        STORED.clear()
        control.say("anew by namespace" if self.by_namespace else "anew")

    def run(self, num_steps: int, only: set[int] | None = None) -> None:
        for name in KINDS:
            self.begin(name)
        try:
            for number in range(num_steps):
                rng = random.Random(f"{self.seed}-{number}")
                chosen = rng.choices(list(STEP_WEIGHTS), list(STEP_WEIGHTS.values()))[0]
                if only is not None and number not in only:
                    continue
                self.log.append(f"{number} {chosen.__name__}")
                chosen(self, rng)
                self.end_trouble(rng)
                for engine in self.engines.values():
                    engine.collect()
                    if rng.random() < 0.8:
                        engine.step()
            self.log.append("settle")
            self.settle()
            self.is_over = True
        except BaseException as error:
            error.add_note(f"seed {self.seed}: {'; '.join(self.log)}")
            for engine in self.engines.values():
                engine.die()
            self.engines = {}
            raise

    def begin(self, name: str, engine_id: str = "") -> None:
        pod = int(name != "copy")
        self.engines[name] = SequenceEngine(
            self.sockets[pod],
            kind=name.removesuffix("-too"),
            tenant=f"pod {pod}" if self.by_namespace else "pool",
            parts=KINDS[name],
            engine_id=engine_id or f"{name}-{time.monotonic_ns()}",
        )

    def end_trouble(self, rng: random.Random) -> None:
        """What keeps the pool from serving lasts for a few steps only: most of a sequence must be served."""
        if self.daemon != "running" and rng.random() < 0.3:
            start_the_daemon(self, rng)
            self.note("(started)")
        if not self.is_active and rng.random() < 0.3:
            self.control.say("resume")
            self.is_observing, self.is_active = False, True
            self.note("(resumed)")

    def wait_for_service(self, engine: SequenceEngine) -> None:
        """Where the pool may serve it, as an engine between two prompts would: else nothing of a sequence is served."""
        if self.daemon == "running" and self.is_active:
            with contextlib.suppress(AssertionError):
                wait_until(lambda: _is_served(engine), SERVICE_SECONDS)

    def note(self, what: object) -> None:
        self.log[-1] += f" {what}"

    def engine(self, rng: random.Random) -> SequenceEngine:
        name = rng.choice(list(KINDS))
        self.note(name)
        return self.engines[name]

    def choose(self, rng: random.Random) -> tuple[SequenceEngine, bool]:
        """An engine, most often one that is served, and whether its next request is private."""
        engine = self.engine(rng)
        if rng.random() < 0.85:
            self.wait_for_service(engine)
        return engine, rng.random() < 0.2

    # --- the end ------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        self.control.say("default spec")
        self.is_observing, self.is_active = False, True
        start_the_daemon(self, random.Random())
        for engine in self.engines.values():
            engine.settle()
        for index, engine in enumerate(self.engines.values()):
            self.wait_until(lambda e=engine: _is_served(e), f"{engine} is served again")
            for is_private in (False, True):
                numbers = [10_000 + 20 * index + number for number in range(4)]
                self.wait_until(lambda e=engine, n=numbers, p=is_private: _offloads(e, n, p), f"{engine} offloads")
        self.wait_until(self._has_let_go, "engines hold nothing but unused slots")
        for engine in self.engines.values():
            engine.__exit__()
            self.num_checked += engine.num_checked
        self.engines = {}
        held = ("leased", "writing", "orphaned")
        self.wait_until(lambda: not any(map(self._slots, held)), "engines that ended hold nothing")
        found = self.control.say("complaints").strip()
        assert found == "[]", f"the daemon has said: {found}"

    def _has_let_go(self) -> bool:
        for engine in self.engines.values():
            engine.step()
            engine.manager.link.poll()
        unused = sum(len(engine.manager.link._credits) for engine in self.engines.values())
        return (self._slots("writing"), self._slots("leased"), self._slots("orphaned")) == (unused, 0, 0)

    def _slots(self, state: str) -> float:
        return self.control.dump()[f'kvoffload_slots{{state="{state}"}}']

    def wait_until(self, is_true: Callable[[], bool], claim: str) -> None:
        try:
            wait_until(is_true, SETTLE_SECONDS)
        except AssertionError as error:
            slots = {name: value for name, value in self.control.dump().items() if name.startswith("kvoffload_slots")}
            engines = [engine.describe() for engine in self.engines.values()]
            raise AssertionError(f"not true: {claim}; {slots}; {engines}") from error


def _is_served(engine: SequenceEngine) -> bool:
    return engine.manager.link.poll() is not None and engine.manager.link.row is not None


def _offloads(engine: SequenceEngine, numbers: list[int], is_private: bool) -> bool:
    """Whether what is stored now is hit and loaded."""
    store = engine.begin_store(numbers, is_private=is_private)
    if store is not None:
        engine.complete(store)
    engine.step()
    load = engine.begin_load(numbers, is_private=is_private)
    engine.step()
    is_whole = load is not None and load.numbers == numbers
    if load is not None:
        engine.complete(load)
        is_whole = is_whole and not load.failed
    for name in list(engine.waiting):
        engine.end_request(name)
    return is_whole


# --- what engines do -------------------------------------------------------------------------------------------------


@step(45)
def store(self: Sequence, rng: random.Random) -> None:
    """Often of keys that are new."""
    engine, is_private = self.choose(rng)
    numbers = draw(rng, NUM_KEYS, rng.randint(1, MAX_KEYS_OF_JOB))
    go_on(self, rng, engine, engine.begin_store(numbers, is_private=is_private))


@step(60)
def load(self: Sequence, rng: random.Random) -> None:
    """Often of keys that were stored lately."""
    engine, is_private = self.choose(rng)
    known = [number for number in STORED.get(engine.world(is_private=is_private), ()) if number < 2 * NUM_KEYS]
    known = known[-MAX_KNOWN:]
    numbers = draw(rng, NUM_KEYS, rng.randint(1, MAX_KEYS_OF_JOB), known)
    go_on(self, rng, engine, engine.begin_load(numbers, is_private=is_private))


def go_on(self: Sequence, rng: random.Random, engine: SequenceEngine, job: Job | None) -> None:
    """Take the job some way; its request may end at once."""
    self.note(len(job.numbers) if job else "nothing")
    if job is None:
        if rng.random() < 0.5:
            engine.end_request(engine.waiting[-1])
        return
    if rng.random() < 0.5:
        engine.step()
    if rng.random() < 0.15:
        engine.end_request(job.name)
    how = rng.random()
    if how < 0.65:
        engine.complete(job)
        self.note("done")
        return
    for rank in range(len(engine.workers)):
        if rng.random() < 0.6:
            engine.submit(job, rank, is_held=rng.random() < 0.7)


@step(3)
def fill_the_pool(self: Sequence, rng: random.Random) -> None:
    """Store far more than it holds: all that is not leased is evicted."""
    engine = self.engine(rng)
    taken = 0
    for _ in range(20):
        begin = rng.randrange(1 << 20, 1 << 30)
        count = min(30, len(engine.free_blocks))
        job = engine.begin_store(list(range(begin, begin + count)))
        if job is not None:
            taken += len(job.numbers)
            engine.complete(job)
        engine.step()
        if self.daemon == "running":
            time.sleep(0.002)
    for name in list(engine.waiting):
        if not any(job.name == name for job in engine.jobs_under_way):
            engine.end_request(name)
    self.note(taken)


@step(6)
def look_up_only(self: Sequence, rng: random.Random) -> None:
    engine = self.engine(rng)
    name = engine.new_name("p")
    engine.look_up(name, keys_of(*draw(rng, NUM_KEYS, 12)))
    engine.waiting.append(name)
    if rng.random() < 0.5:
        engine.end_request(engine.waiting[-1])


@step(4)
def end_a_request(self: Sequence, rng: random.Random) -> None:
    engine = self.engine(rng)
    if engine.waiting:
        engine.end_request(rng.choice(engine.waiting))


@step(20)
def go_on_with_jobs(self: Sequence, rng: random.Random) -> None:
    engine = self.engine(rng)
    for job in list(engine.jobs_under_way):
        for rank in range(len(engine.workers)):
            if rank not in job.submitted and rng.random() < 0.7:
                engine.submit(job, rank, is_held=rng.random() < 0.3)
            elif rng.random() < 0.7:
                engine.workers[rank].wait({job.number})


@step(25)
def end_jobs(self: Sequence, rng: random.Random) -> None:
    engine = self.engine(rng)
    for job in list(engine.jobs_under_way):
        engine.complete(job)


@step(3)
def a_load_has_wrong_bytes(self: Sequence, rng: random.Random) -> None:
    engine = self.engine(rng)
    loads = [job for job in engine.jobs_under_way if not job.is_store and job.submitted]
    if loads:
        job = rng.choice(loads)
        job.failed[0] = True
        engine.complete(job)


@step(4)
def reset_the_cache(self: Sequence, rng: random.Random) -> None:
    self.engine(rng).reset()


@step(2)
def update_the_weights(self: Sequence, rng: random.Random) -> None:
    self.engine(rng).update_weights()


@step(5)
def steps(self: Sequence, rng: random.Random) -> None:
    for engine in self.engines.values():
        for _ in range(rng.randint(1, 4)):
            engine.step()
            engine.manager.link.poll()
    time.sleep(rng.choice((0.0, 0.05, 0.3)))


# --- sessions and engines --------------------------------------------------------------------------------------------


@step(5)
def end_a_worker_s_session(self: Sequence, rng: random.Random) -> None:
    engine = self.engine(rng)
    worker = rng.choice(engine.workers)
    if (session := worker.link._connector.current()) is not None:
        session.close("ended by the check")
    time.sleep(rng.choice((0.0, 0.0, 0.3)))


@step(5)
def end_the_scheduler_s_session(self: Sequence, rng: random.Random) -> None:
    engine = self.engine(rng)
    if (session := engine.manager.link._connector.current()) is not None:
        session.close("ended by the check")
    time.sleep(rng.choice((0.0, 0.0, 0.3)))


@step(3)
def an_engine_ends_and_another_begins(self: Sequence, rng: random.Random) -> None:
    engine = self.engine(rng)
    name = next(name for name, one in self.engines.items() if one is engine)
    if rng.random() < 0.5:
        engine.__exit__()
        self.note("cleanly")
    else:
        engine.die()
        self.note("killed")
    keeps_id = rng.random() < 0.5
    time.sleep(rng.choice((0.0, 0.3)))
    if self.daemon == "stopped":  # its workers would wait for an answer
        self.control.say("continue")
        self.daemon = "running"
    self.begin(name, engine.engine_id if keeps_id else "")


# --- the pool and the daemon -----------------------------------------------------------------------------------------


@step(10)
def change_the_spec(self: Sequence, rng: random.Random) -> None:
    change = rng.choice(SPEC_CHANGES)
    self.note(change)
    self.control.say(change)
    self.is_active = change == "resume" or (self.is_active and change not in ("pause", "observe"))
    self.is_observing = change == "observe" or (self.is_observing and change not in ("pause", "resume"))
    time.sleep(rng.choice((0.0, 0.15, 0.3)))


@step(3)
def restart_the_daemon(self: Sequence, rng: random.Random) -> None:
    how = rng.choice(("kill", "kill", "terminate"))
    if how == "terminate" and self.daemon == "stopped":
        how = "kill"
    self.note(how)
    if self.daemon != "killed":
        self.control.say(how)
    if rng.random() < 0.5:
        capacity = rng.choice(("small pool", "middle pool", "large pool"))
        self.note(capacity)
        self.control.say(capacity)
    self.daemon = "killed"
    for engine in self.engines.values():
        engine.is_forgiven = True
    if rng.random() < 0.7:
        self.note("start")
        start_the_daemon(self, rng)


@step(10)
def start_the_daemon(self: Sequence, rng: random.Random) -> None:
    if self.daemon == "killed":
        if self.is_observing:  # it would take no pods until the mode is another one
            self.control.say("pause")
            self.is_observing = False
        self.control.say("start")
    elif self.daemon == "stopped":
        self.control.say("continue")
    self.daemon = "running"


@step(2)
def stop_the_daemon(self: Sequence, rng: random.Random) -> None:
    if self.daemon == "running":
        self.control.say("stop")
        self.daemon = "stopped"


# --- the check -------------------------------------------------------------------------------------------------------


@check
def random_sequences_of_events_serve_no_wrong_byte_and_leave_nothing_held(socket_path: str, control: Control) -> None:
    client.MAX_PAUSE_SECONDS = 0.4  # a refused engine tries again every five seconds: too long to wait for so often
    seeds = [int(seed) for seed in os.environ.get("SEQUENCE_SEEDS", "").split(",") if seed] or SEEDS
    only = os.environ.get("SEQUENCE_ONLY")
    failed, num_checked = [], 0
    with _errors_of_threads() as errors:
        for seed in seeds:
            signal.signal(signal.SIGALRM, _is_stuck)
            signal.alarm(STUCK_SECONDS)
            sequence = Sequence(socket_path, control, seed)
            try:
                sequence.run(int(os.environ.get("SEQUENCE_STEPS", STEPS)), only and {int(n) for n in only.split(",")})
                assert not errors, errors
            except Exception as error:  # noqa: BLE001 - the other sequences are told, too
                failed.append("".join(traceback.format_exception(error)))
                errors.clear()
                print(failed[-1], file=sys.stderr, flush=True)
            num_checked += sequence.num_checked
            print(
                f"seed {seed}: {sequence.num_checked} blocks checked, {len(failed)} sequences have failed",
                file=sys.stderr,
                flush=True,
            )
    assert not failed, "\n".join(failed)
    assert num_checked > 8 * len(KINDS) * len(seeds), "more than what is stored and loaded at the end of each"


def _is_stuck(*_: object) -> None:
    raise AssertionError(f"the sequence has not ended within {STUCK_SECONDS} s")


@contextlib.contextmanager
def _errors_of_threads() -> Iterator[list[str]]:
    """What a connector's thread met that it did not expect; it logs that and goes on."""
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if re.search(r"\b(?!Daemon)\w+Error: ", record.getMessage()):
                found.append(record.getMessage())

    handler = Keep()
    log = logging.getLogger("vllm.kvoffload")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield found
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = True


if __name__ == "__main__":
    run_checks(with_control=True)
