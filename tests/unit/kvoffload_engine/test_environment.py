"""Settings that the agent reads: a value that it does not know is said in one line."""

import pytest

from kvoffload.api.keys import PredictedLayout
from kvoffload_engine.environment import PREDICTED_LAYOUTS, REPLICATED_LAYOUT_VARIABLE, is_replication_allowed


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [(None, True), ("", True), ("auto", True), ("replicated", True), ("per-rank", False)],
)
def test_a_layout_that_the_webhook_writes_is_taken_without_a_word(
    text: str | None, is_allowed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert is_replication_allowed({} if text is None else {REPLICATED_LAYOUT_VARIABLE: text}) is is_allowed
    assert caplog.text == ""


@pytest.mark.parametrize("text", ["per_rank", "Per-Rank", "never", "x" * 9999])
def test_an_unknown_layout_is_auto_and_said(text: str, caplog: pytest.LogCaptureFixture) -> None:
    assert is_replication_allowed({REPLICATED_LAYOUT_VARIABLE: text})
    (line,) = caplog.messages
    assert f"{REPLICATED_LAYOUT_VARIABLE} is '{text[:90]}" in line
    assert line.endswith("needed auto, replicated, per-rank: auto is used")
    assert len(line) < 300


def test_the_layouts_are_the_webhooks() -> None:
    assert set(PREDICTED_LAYOUTS) == {layout.value for layout in PredictedLayout}
