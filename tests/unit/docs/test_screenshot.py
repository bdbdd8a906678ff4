"""The picture of the dashboard: what a panel shows of its series; the committed one is of the panels of now."""

import json
import re
from pathlib import Path

from hack.docs.panels import Panel, Query, Unit
from hack.docs.prometheus import Series
from hack.docs.screenshot import MANY, build_label, draw_panel, label_of

PICTURE = Path(__file__).resolve().parents[3] / "docs" / "images" / "dashboard.png"
QUERY = Query("x", "{{reason}}")
PANEL = Panel("Refusals", "", Unit.PER_SECOND, (QUERY,))


def drawn(num_series: int, *, num_happened: int = 1) -> str:
    """All are 0 but the first."""
    series = [
        Series({"reason": f"Reason{number}"}, ((0.0, float(number < num_happened)),)) for number in range(num_series)
    ]
    return draw_panel(PANEL, [(QUERY, one) for one in series], start=0.0, end=1.0)


def test_where_there_are_many_series_those_that_are_0_are_only_counted() -> None:
    few, many = drawn(MANY), drawn(MANY + 1)
    assert few.count("Reason") == MANY
    assert "others" not in few
    assert many.count("Reason") == 1
    assert f"{MANY} others are 0" in many
    assert f">all {MANY + 1} are 0<" in drawn(MANY + 1, num_happened=0)


def test_where_many_series_happened_each_has_its_own_colour_and_no_others_are_counted() -> None:
    many = drawn(40, num_happened=40)
    assert "others" not in many
    of_legends, of_lines = re.findall(r"--of: ([^']+)'", many), re.findall(r"stroke='([^']+)' stroke-width='1.6'", many)
    assert len(set(of_legends)) == 40
    assert of_legends == of_lines[::-1], "the first one is drawn last, above the others"


def test_the_committed_picture_is_of_the_panels_and_queries_of_now() -> None:
    remedy = "run tests/e2e/test_dashboard.py, and copy build/demo/dashboard.png and .json to docs/images"
    assert json.loads(label_of(PICTURE).read_text()) == build_label(PICTURE), remedy
