"""The tables of docs/reference/speed-*.md, from the rows that the bench has measured; the prose around them stays.

Called by `python -m bench`, which `make bench` runs. `<!-- bench: PART -->` to `<!-- /bench -->` becomes that part's
rows, with when and on what they were measured.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hack.cache import BUILD, REPOSITORY

RESULTS = BUILD / "bench" / "results.json"
FOLDER = REPOSITORY / "docs" / "reference"
HEADER = ("what", "unit", "ours (p10 to p90)", "reference", "ratio", "target", "met")
Row = Mapping[str, Any]
"""As it stands in results.json."""


def write_pages(rows: Sequence[Row]) -> list[Path]:
    """Put the rows into the pages; a part of which there are none keeps those that it has. Returns what was written."""
    written = []
    for path in sorted(FOLDER.glob("speed-*.md")):
        before = path.read_text()
        after = fill_in(before, rows)
        if after != before:
            path.write_text(after)
            written.append(path)
    return written


def fill_in(text: str, rows: Sequence[Row]) -> str:
    """The page with the rows of every part that was measured."""

    def replace(found: re.Match[str]) -> str:
        measured = [row for row in rows if row["part"] == found[1]]
        if not measured:
            return found[0]
        return f"<!-- bench: {found[1]} -->\nMeasured {measured[0]['measured']}.\n\n{table(measured)}<!-- /bench -->"

    return re.sub(r"<!-- bench: (\w+) -->\n.*?<!-- /bench -->", replace, text, flags=re.DOTALL)


def table(rows: Sequence[Row]) -> str:
    """In Markdown, with a line's end behind each row."""
    head, *body = (f"| {' | '.join(cells)} |\n" for cells in (HEADER, *map(_cells, rows)))
    return "".join([head, f"{'|---' * len(HEADER)}|\n", *body])


def _cells(row: Row) -> tuple[str, ...]:
    reference = "not here" if row["reference"] is None else f"{_number(row['reference'])} ({row['reference_name']})"
    return (
        row["name"],
        row["unit"],
        f"{_number(row['ours'])} ({_number(row['ours_p10'])} to {_number(row['ours_p90'])})",
        reference,
        "" if row["ratio"] is None else f"{row['ratio']:.2f}",
        row["target"],
        "yes" if row["met"] else "no",
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
