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
from sequence_engine import STORED, SequenceEngine
from sequence_steps import STEP_WEIGHTS, start_the_daemon
from toy_engine import wait_until

from kvoffload.protocol import client

SEEDS = (6, 7, 8)
STEPS = 50
SETTLE_SECONDS = 15.0
SERVICE_SECONDS = 1.5
STUCK_SECONDS = 75
KINDS = {
    "copy": ("all", "all"),
    "copy-too": ("all", "all"),
    "per-rank": ("rank-0", "rank-1"),
}
"""Names of the engines, and their ranks' parts. The first two are of one identity."""


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
