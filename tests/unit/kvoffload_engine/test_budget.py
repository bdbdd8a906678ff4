"""The step's budget: waits end with it, two misses in a row open the circuit, and an answered debt closes it."""

import logging

import pytest

from kvoffload_engine.budget import DEFAULT_STEP_SECONDS, MAX_STEP_SECONDS, StepBudget, step_seconds_from
from kvoffload_engine.environment import DEADLINE_VARIABLE


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (None, DEFAULT_STEP_SECONDS),
        ("0.05", 0.05),
        ("-1", 0.0),
        ("60", MAX_STEP_SECONDS),
        ("soon", DEFAULT_STEP_SECONDS),
        ("nan", DEFAULT_STEP_SECONDS),
        ("inf", MAX_STEP_SECONDS),
    ],
)
def test_the_users_deadline_is_taken_within_bounds_and_another_is_said(
    text: str | None, seconds: float, caplog: pytest.LogCaptureFixture
) -> None:
    assert step_seconds_from({} if text is None else {DEADLINE_VARIABLE: text}) == seconds
    is_said = f"needed a number from 0 to 1: {seconds:g} s are used" in caplog.text
    assert is_said == (text not in (None, "0.05"))


class Daemon:
    """Answers after so many seconds of the test's own clock."""

    def __init__(self, *, answers_after: float) -> None:
        self.now = 100.0
        self.answers_at = self.now + answers_after
        self.looks: list[float] = []
        self.budget = StepBudget(0.5, clock=lambda: self.now)

    def look(self, seconds: float) -> bool:
        self.looks.append(seconds)
        self.now += min(seconds, 0.2)
        return True

    def wait(self) -> bool:
        """Wait in this step; whether the answer came."""
        self.budget.wait_until(self.is_done, self.look)
        return self.is_done()

    def is_done(self) -> bool:
        return self.now >= self.answers_at


def test_all_waits_of_a_step_share_one_budget_and_the_next_step_has_its_own() -> None:
    daemon = Daemon(answers_after=0.7)
    assert not daemon.wait()
    assert daemon.looks == pytest.approx([0.5, 0.3, 0.1])
    assert not daemon.wait()
    assert len(daemon.looks) == 3, "nothing is left for a second wait"
    daemon.budget.end_step()
    assert daemon.wait()
    assert daemon.looks[3:] == pytest.approx([0.5])


def test_a_wait_ends_at_once_where_there_is_nobody_to_wait_for() -> None:
    budget = StepBudget(0.5)
    budget.wait_until(lambda: False, lambda seconds: False)
    budget.end_step()
    assert (budget.num_steps, budget.num_missed) == (1, 0)


def missed(daemon: Daemon, steps: int) -> StepBudget:
    for _ in range(steps):
        daemon.wait()
        daemon.budget.end_step()
    return daemon.budget


def test_two_misses_in_a_row_open_the_circuit_until_nothing_is_owed(caplog: pytest.LogCaptureFixture) -> None:
    daemon = Daemon(answers_after=100.0)
    assert not missed(daemon, 1).circuit_is_open(is_owed=True)
    with caplog.at_level(logging.WARNING, "vllm.kvoffload"):
        assert missed(daemon, 1).circuit_is_open(is_owed=True)
        missed(daemon, 3)
    assert [record.getMessage() for record in caplog.records if "did not answer within 500 ms" in record.getMessage()]
    assert len(caplog.records) == 1, "the log keeps quiet about the steps that follow"
    assert daemon.budget.circuit_is_open(is_owed=True)
    assert not daemon.budget.circuit_is_open(is_owed=False)
    assert not daemon.budget.circuit_is_open(is_owed=True), "it closed, and opens only after two more"
    assert (daemon.budget.num_steps, daemon.budget.num_missed) == (5, 5)
    daemon.budget.forget_counts()
    assert (daemon.budget.num_steps, daemon.budget.num_missed) == (0, 0)


def test_an_answer_between_two_misses_keeps_the_circuit_closed_and_a_step_without_a_wait_does_not_count() -> None:
    daemon = Daemon(answers_after=100.0)
    missed(daemon, 1)
    daemon.budget.end_step()  # nothing was asked in this step
    assert missed(daemon, 1).circuit_is_open(is_owed=True)
    daemon.budget.close_circuit()
    missed(daemon, 1)
    daemon.answers_at = daemon.now + 0.1
    assert daemon.wait()
    daemon.budget.end_step()
    daemon.answers_at = daemon.now + 100.0
    assert not missed(daemon, 1).circuit_is_open(is_owed=True)
