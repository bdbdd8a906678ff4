"""What pods may have written (models, messages, names) is printed as it is: neither markup nor a terminal's command."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kvoffload_cli.output import labelled, make_printable, make_table

HOSTILE = [
    r"\[/x]",
    r"\\[bold]",
    "[/]",
    "[red]all is well[/red]",
    "[link=file:///etc/passwd]here[/link]",
    "\x1b]0;title\x07\x1b[2J",
    "\x9b31m",
    "good\rbad",
    "two\nlines",
    "\u202egnp.exe",
]


def printed(text: str) -> list[str]:
    """The same text in a table's cell and behind a label, on a terminal."""
    found = []
    for is_table in (True, False):
        console = Console(file=io.StringIO(), width=1000, force_terminal=True, color_system=None)
        if is_table:
            console.print(make_table("MODEL", rows=[[text]]))
        else:
            labelled(console, "model", [text])
        assert isinstance(console.file, io.StringIO)
        found.append(console.file.getvalue())
    return found


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_a_pods_text_is_shown_and_obeyed_by_nobody(text: str) -> None:
    for output in printed(text):
        assert make_printable(text) in output
        assert not set("\x07\x1b\x9b\r\u202e") & set(output)


@given(st.text(max_size=60))
def test_any_text_can_be_printed_and_is_one_line(text: str) -> None:
    table, line = printed(text)
    assert (table.count("\n"), line.count("\n")) == (2, 1)
