"""Whatever a pod's script repeats, doubles and nests: what is made of it stays below the budget of its pod."""

from hypothesis import given
from hypothesis import strategies as st

from kvoffload_operator.webhook.command_line import Launch, parse_command_line
from kvoffload_operator.webhook.shell import simple_commands
from kvoffload_operator.webhook.text_budget import TextBudget, TextTooLong

LIMIT = 300
PIECES = st.sampled_from(["$A", "${A}", '"$A$B"', "${B:-x}", "$1", "$@", '"$@"', "$* ", "x", "'y'", "\\$"])
TEXTS = st.lists(PIECES, min_size=1, max_size=8).map("".join)
STATEMENTS = st.builds("".join, st.tuples(st.sampled_from(["A=", "B=", "export A=", "echo ", "sh -c "]), TEXTS))
SCRIPTS = st.lists(STATEMENTS, min_size=1, max_size=60).map(";".join)


def num_characters(words: list[str]) -> int:
    return sum(len(word) + 1 for word in words)


@given(SCRIPTS, st.lists(st.text("ab ", max_size=40), max_size=40), st.text("ab ", max_size=100))
def test_the_words_of_a_script_never_come_to_more_than_the_budget(script: str, positional: list[str], a: str) -> None:
    made = 0
    try:
        for command in simple_commands(script, {"A": a, "B": "b"}, positional, TextBudget(LIMIT)):
            made += num_characters(command)
    except TextTooLong:
        pass
    assert made <= LIMIT


@given(st.integers(1, 200), st.integers(0, 64))
def test_what_is_asked_for_is_never_made_beyond_the_budget(num_doublings: int, length: int) -> None:
    """A variable that doubles: the budget is overdrawn by one ask at most, so nothing longer was ever there."""
    budget = TextBudget(LIMIT)
    script = f"A={'a' * length};" + "A=$A$A;" * num_doublings + "vllm serve x -tp 8"
    line = parse_command_line(["sh", "-c", script], [], {}, budget=budget)
    assert budget.spent <= 2 * LIMIT + len(script)
    assert (line.launch is Launch.VLLM) == (line.unread == "")


@given(
    st.lists(st.sampled_from(["$(A)", "$(B)", "$$", "x"]), min_size=9, max_size=99).map("".join),
    st.text("ab", min_size=30),
)
def test_the_kubelet_s_variables_are_bounded_alike(word: str, a: str) -> None:
    budget = TextBudget(LIMIT)
    line = parse_command_line(["vllm", "serve", word], [], {"A": a, "B": "b"}, budget=budget)
    assert line.unread or len(line.text("model") or "") <= LIMIT
    assert budget.spent <= LIMIT + max(len(word), len(a)) + 1
