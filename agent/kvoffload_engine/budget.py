"""How long the scheduler may wait for the node daemon, and when it does not wait at all.

Runs in vLLM's engine core, in the scheduler's thread; owned by `kvoffload_engine.link`, which does the waiting.

    step      one budget for all waits of a step, refilled when the step ends
    circuit   two steps in a row that used it up open it: nothing is asked and everything is a miss, until the daemon
              has answered what it owes
"""

import math
import time
from collections.abc import Callable, Mapping

from kvoffload_engine.environment import DEADLINE_VARIABLE
from kvoffload_engine.log import logger

DEFAULT_STEP_SECONDS = 0.002
MAX_STEP_SECONDS = 1.0
MAX_MISSED_STEPS = 2
QUIET_SECONDS = 10.0
"""How long the log keeps quiet about a circuit that opens again and again."""


def step_seconds_from(environment: Mapping[str, str]) -> float:
    """The deadline of a step that the user set, bounded, or the default."""
    text = environment.get(DEADLINE_VARIABLE)
    if text is None:
        return DEFAULT_STEP_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    used = DEFAULT_STEP_SECONDS if math.isnan(seconds) else min(MAX_STEP_SECONDS, max(0.0, seconds))
    if used != seconds:
        needed = f"a number from 0 to {MAX_STEP_SECONDS:g}"
        logger.warning("kvoffload: %s is %.100r, needed %s: %g s are used", DEADLINE_VARIABLE, text, needed, used)
    return used


class StepBudget:
    """See the module's docstring."""

    def __init__(self, step_seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._step_seconds = step_seconds
        self._left_seconds = step_seconds
        self._missed_in_step = False
        self._missed_in_a_row = 0
        self._quiet_until = 0.0
        self.num_steps = 0
        """Steps since the last report."""
        self.num_missed = 0
        """Steps of them whose budget was not enough."""

    def wait_until(self, is_done: Callable[[], bool], look: Callable[[float], bool]) -> None:
        """Look, for at most so many seconds at a time, until it is done, `look` says that there is nothing to wait for,
        or the step has no time left."""
        while not is_done():
            if self._left_seconds <= 0:
                self._missed_in_step = True
                return
            begin = self._clock()
            goes_on = look(self._left_seconds)
            self._left_seconds -= self._clock() - begin
            if not goes_on:
                return

    def end_step(self) -> None:
        """The scheduler's step is over: the next one may wait again."""
        self.num_steps += 1
        if self._missed_in_step:
            self._missed_in_a_row += 1
            self.num_missed += 1
            self._say_late()
        elif self._left_seconds < self._step_seconds:
            self._missed_in_a_row = 0  # waited, and was answered
        self._missed_in_step = False
        self._left_seconds = self._step_seconds

    def circuit_is_open(self, *, is_owed: bool) -> bool:
        """Whether to ask nothing now; `is_owed`: the daemon has not answered everything."""
        if self._missed_in_a_row >= MAX_MISSED_STEPS and not is_owed:
            self._missed_in_a_row = 0
        return self._missed_in_a_row >= MAX_MISSED_STEPS

    def close_circuit(self) -> None:
        """Another session: the last one's lateness is not its own."""
        self._missed_in_a_row = 0

    def forget_counts(self) -> None:
        """The counts were reported."""
        self.num_steps = self.num_missed = 0

    def _say_late(self) -> None:
        now = self._clock()
        if self._missed_in_a_row >= MAX_MISSED_STEPS and now >= self._quiet_until:
            self._quiet_until = now + QUIET_SECONDS
            logger.warning(
                "kvoffload scheduler: the node daemon did not answer within %g ms in %d steps in a row: everything is "
                "a miss until it has answered",
                1000 * self._step_seconds,
                self._missed_in_a_row,
            )
