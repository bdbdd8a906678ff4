"""docs/reference/conditions.md has every condition, reason, event and skip reason of the code, and none besides."""

import re
from pathlib import Path

import pytest

from kvoffload.api.conditions import PoolCondition, PoolReason, RegionCondition, RegionReason
from kvoffload.api.keys import SkipReason
from kvoffload.layout.gate import LayoutReason
from kvoffload_operator.events import PodEvent
from kvoffload_operator.status import AS_TOLD

PAGE = (Path(__file__).parents[3] / "docs/reference/conditions.md").read_text()
SECTIONS = {
    "KVOffloadPool": {*PoolCondition, *PoolReason},
    "KVOffloadRegion": {*RegionCondition, *RegionReason},
    "Events on pods": set(PodEvent),
    "Events on pools": AS_TOLD,
    "Skip reasons": set(SkipReason),
    "Why a layout is not replicated": set(LayoutReason),
}


def rows_of(section: str) -> dict[str, list[str]]:
    """First cell of each row to its other cells."""
    (text,) = re.findall(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| `"):
            found[cells[0].strip("`| ")] = cells[1:]
    return found


@pytest.mark.parametrize("section", SECTIONS)
def test_the_table_has_what_the_code_has(section: str) -> None:
    assert set(rows_of(section)) == {str(member.value) for member in SECTIONS[section]}


@pytest.mark.parametrize("section", SECTIONS)
def test_every_row_says_what_it_means_and_what_to_do(section: str) -> None:
    for reason, cells in rows_of(section).items():
        assert cells, reason
        assert all(cells), f"{reason} has an empty cell"
