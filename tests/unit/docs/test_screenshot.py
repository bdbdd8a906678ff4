"""The picture of the dashboard: what a panel shows of its series."""

from hack.docs.panels import Panel, Query, Unit
from hack.docs.prometheus import Series
from hack.docs.screenshot import COLOURS, draw_panel

QUERY = Query("x", "{{reason}}")
PANEL = Panel("Refusals", "", Unit.PER_SECOND, (QUERY,))


def drawn(num_series: int) -> str:
    """All are 0 but the first."""
    series = [Series({"reason": f"Reason{number}"}, ((0.0, float(number == 0)),)) for number in range(num_series)]
    return draw_panel(PANEL, [(QUERY, one) for one in series], start=0.0, end=1.0)


def test_where_there_are_more_series_than_colours_those_that_are_0_are_only_counted() -> None:
    few, many = drawn(len(COLOURS)), drawn(len(COLOURS) + 1)
    assert few.count("Reason") == len(COLOURS)
    assert "others" not in few
    assert many.count("Reason") == 1
    assert f"{len(COLOURS)} others are 0" in many
