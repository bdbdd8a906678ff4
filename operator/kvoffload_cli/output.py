"""How the commands print: one console, labelled lines, tables, JSON. Called by every command of the plugin."""

import json
import os
import sys
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any

import rich.markup
from rich.console import Console
from rich.table import Table

from kvoffload.errors import InvalidSpec

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


class OutputFormat(StrEnum):
    """Value of `--output`."""

    TEXT = "text"
    JSON = "json"


PIPE_WIDTH = 240
"""Columns where standard output is no terminal: tables must not be folded for grep."""


def make_console() -> Console:
    """A console on standard output; colours only on a terminal, and no colour at all where NO_COLOR is set."""
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(highlight=False, width=PIPE_WIDTH if piped else None)


def show_bytes(num_bytes: int) -> str:
    """Bytes for people, three digits: `4.29 MiB`. Exact figures are printed with commas beside it where they matter."""
    value, unit = float(num_bytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return (
        f"{num_bytes} bytes"
        if unit == 0
        else f"{value:.3g} {_UNITS[unit]}"
        if value < 1000
        else f"{value:.0f} {_UNITS[unit]}"
    )


def labelled(console: Console, label: str, lines: Iterable[str]) -> None:
    """Print a label once and its lines beside it."""
    for number, line in enumerate(lines):
        console.print(f"[bold]{label if number == 0 else '':<10}[/bold] {escape(line)}", soft_wrap=True)


def escape(text: str) -> str:
    """Text as it is: what comes from a cluster (a pod may have written it) is neither markup nor a command to the
    terminal."""
    return rich.markup.escape(make_printable(text))


def make_printable(text: str) -> str:
    """Control and format characters, line ends among them, as their escape sequences."""
    return "".join(
        one.encode("unicode_escape").decode() if unicodedata.category(one) in ("Cc", "Cf", "Cs") else one
        for one in text
    )


def make_table(*columns: str, rows: Iterable[Sequence[str]]) -> Table:
    """A table as kubectl prints them: no lines, two spaces between the columns."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=True, min_width=len(column))
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    return table


def print_json(console: Console, document: Mapping[str, Any]) -> None:
    """Print a command's document as JSON on standard output."""
    console.print(json.dumps(document, indent=2, default=str), markup=False, soft_wrap=True)


def require_one_of(name: str, value: str, allowed: Iterable[str]) -> str:
    """`value` if it is allowed, otherwise InvalidSpec with what is."""
    known = list(allowed)
    if value not in known:
        raise InvalidSpec(f"--{name} {value!r} is not one of {', '.join(known)}")
    return value
