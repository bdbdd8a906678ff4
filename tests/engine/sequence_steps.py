"""What may happen in a step of a sequence, and how often: each takes the sequence, and draws the rest. For
`sequence_checks.py`, which runs them.
"""

import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from sequence_engine import STORED, Job, SequenceEngine, draw
from toy_engine import keys_of

if TYPE_CHECKING:
    from sequence_checks import Sequence

NUM_KEYS = 160
MAX_KEYS_OF_JOB = 14
MAX_KNOWN = 60
"""So many of the keys that were stored first last are asked for most of the time."""
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
    """A step that is drawn in proportion to its weight."""

    def add(function: Step) -> Step:
        STEP_WEIGHTS[function] = weight
        return function

    return add


# --- what engines do -------------------------------------------------------------------------------------------------


@step(45)
def store(self: "Sequence", rng: random.Random) -> None:
    """Often of keys that are new."""
    engine, is_private = self.choose(rng)
    numbers = draw(rng, NUM_KEYS, rng.randint(1, MAX_KEYS_OF_JOB))
    go_on(self, rng, engine, engine.begin_store(numbers, is_private=is_private))


@step(60)
def load(self: "Sequence", rng: random.Random) -> None:
    """Often of keys that were stored lately."""
    engine, is_private = self.choose(rng)
    known = [number for number in STORED.get(engine.world(is_private=is_private), ()) if number < 2 * NUM_KEYS]
    known = known[-MAX_KNOWN:]
    numbers = draw(rng, NUM_KEYS, rng.randint(1, MAX_KEYS_OF_JOB), known)
    go_on(self, rng, engine, engine.begin_load(numbers, is_private=is_private))


def go_on(self: "Sequence", rng: random.Random, engine: SequenceEngine, job: Job | None) -> None:
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
def fill_the_pool(self: "Sequence", rng: random.Random) -> None:
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
def look_up_only(self: "Sequence", rng: random.Random) -> None:
    engine = self.engine(rng)
    name = engine.new_name("p")
    engine.look_up(name, keys_of(*draw(rng, NUM_KEYS, 12)))
    engine.waiting.append(name)
    if rng.random() < 0.5:
        engine.end_request(engine.waiting[-1])


@step(4)
def end_a_request(self: "Sequence", rng: random.Random) -> None:
    engine = self.engine(rng)
    if engine.waiting:
        engine.end_request(rng.choice(engine.waiting))


@step(20)
def go_on_with_jobs(self: "Sequence", rng: random.Random) -> None:
    engine = self.engine(rng)
    for job in list(engine.jobs_under_way):
        for rank in range(len(engine.workers)):
            if rank not in job.submitted and rng.random() < 0.7:
                engine.submit(job, rank, is_held=rng.random() < 0.3)
            elif rng.random() < 0.7:
                engine.workers[rank].wait({job.number})


@step(25)
def end_jobs(self: "Sequence", rng: random.Random) -> None:
    engine = self.engine(rng)
    for job in list(engine.jobs_under_way):
        engine.complete(job)


@step(3)
def a_load_has_wrong_bytes(self: "Sequence", rng: random.Random) -> None:
    engine = self.engine(rng)
    loads = [job for job in engine.jobs_under_way if not job.is_store and job.submitted]
    if loads:
        job = rng.choice(loads)
        job.failed[0] = True
        engine.complete(job)


@step(4)
def reset_the_cache(self: "Sequence", rng: random.Random) -> None:
    self.engine(rng).reset()


@step(2)
def update_the_weights(self: "Sequence", rng: random.Random) -> None:
    self.engine(rng).update_weights()


@step(5)
def steps(self: "Sequence", rng: random.Random) -> None:
    for engine in self.engines.values():
        for _ in range(rng.randint(1, 4)):
            engine.step()
            engine.manager.link.poll()
    time.sleep(rng.choice((0.0, 0.05, 0.3)))


# --- sessions and engines --------------------------------------------------------------------------------------------


@step(5)
def end_a_worker_s_session(self: "Sequence", rng: random.Random) -> None:
    engine = self.engine(rng)
    worker = rng.choice(engine.workers)
    if (session := worker.link._connector.current()) is not None:
        session.close("ended by the check")
    time.sleep(rng.choice((0.0, 0.0, 0.3)))


@step(5)
def end_the_scheduler_s_session(self: "Sequence", rng: random.Random) -> None:
    engine = self.engine(rng)
    if (session := engine.manager.link._connector.current()) is not None:
        session.close("ended by the check")
    time.sleep(rng.choice((0.0, 0.0, 0.3)))


@step(3)
def an_engine_ends_and_another_begins(self: "Sequence", rng: random.Random) -> None:
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
def change_the_spec(self: "Sequence", rng: random.Random) -> None:
    change = rng.choice(SPEC_CHANGES)
    self.note(change)
    self.control.say(change)
    self.is_active = change == "resume" or (self.is_active and change not in ("pause", "observe"))
    self.is_observing = change == "observe" or (self.is_observing and change not in ("pause", "resume"))
    time.sleep(rng.choice((0.0, 0.15, 0.3)))


@step(3)
def restart_the_daemon(self: "Sequence", rng: random.Random) -> None:
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
def start_the_daemon(self: "Sequence", rng: random.Random) -> None:
    if self.daemon == "killed":
        if self.is_observing:  # it would take no pods until the mode is another one
            self.control.say("pause")
            self.is_observing = False
        self.control.say("start")
    elif self.daemon == "stopped":
        self.control.say("continue")
    self.daemon = "running"


@step(2)
def stop_the_daemon(self: "Sequence", rng: random.Random) -> None:
    if self.daemon == "running":
        self.control.say("stop")
        self.daemon = "stopped"
