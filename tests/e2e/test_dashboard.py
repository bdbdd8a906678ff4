"""The dashboard's queries, variables and picture while both servers run, and the alerts, in a real Prometheus."""

import html
import math
import re
import struct
import zlib
from pathlib import Path

import pytest

from e2e.control_plane import render_rules
from e2e.user_tools import ToolOutputs
from hack.console import wait_until
from hack.demo.kubernetes import Kubernetes
from hack.demo.prometheus import running_prometheus
from hack.demo.run import POOL, Stage
from hack.docs import screenshot
from hack.docs.panels import PANELS

pytestmark = [pytest.mark.e2e, pytest.mark.cluster]


def test_every_query_of_the_dashboard_returns_a_number(tools: ToolOutputs) -> None:
    """A share of nothing is NaN, which a panel does not draw."""
    empty = {
        f"{title}: {query}": samples
        for title, query, samples in tools.queries
        if not any(math.isfinite(value) for _, value in samples)
    }
    assert not empty


def test_the_dashboard_s_variables_offer_the_pool_and_the_node(tools: ToolOutputs, release: Stage) -> None:
    assert tools.variables == {"pool": [POOL], "node": [release.kubernetes.settings.node_name]}


def test_the_dashboard_was_drawn_with_a_figure_or_a_line_in_every_panel(tools: ToolOutputs) -> None:
    panels = re.findall(r"<div class='title'>(.*?)</div>(.*?)</div>", tools.page)
    assert [html.unescape(title) for title, _ in panels] == [panel.title for panel in PANELS]
    assert not [title for title, drawn in panels if not re.search(r"<polyline points='\d|<b>\d|all \d+ are 0", drawn)]


def test_its_picture_is_of_the_whole_page_and_not_empty(tools: ToolOutputs) -> None:
    width, height, rows = read_picture(tools.picture)
    assert (width, height) == (screenshot.WIDTH, screenshot.page_height())
    # a row of one colour, whichever of PNG's filters it went through, has at most its first pixel left
    assert sum(sum(byte != 0 for byte in row[1:]) > 3 for row in rows) > height / 3


def read_picture(path: Path) -> tuple[int, int, list[bytes]]:
    """Width, height and filtered rows of a PNG of three bytes a pixel."""
    data, at, pixels = path.read_bytes(), 8, b""
    width, height, depth, colours = struct.unpack(">IIBB", data[16:26])
    assert (data[:8], depth, colours) == (b"\x89PNG\r\n\x1a\n", 8, 2)
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        pixels += data[at + 8 : at + 8 + length] if data[at + 4 : at + 8] == b"IDAT" else b""
        at += length + 12
    pixels, row = zlib.decompress(pixels), width * 3 + 1
    return width, height, [pixels[start : start + row] for start in range(0, len(pixels), row)]


def test_alerts_on_short_nodes_and_unready_pools_fire(troubled: Kubernetes, tmp_path) -> None:
    """The chart's rules in a real Prometheus, with a short `for:`; its length is promtool's to test."""
    with running_prometheus(troubled, tmp_path, rules=render_rules(wait="1s")) as prometheus:
        for alert in ("KVOffloadNodesShortOfPages", "KVOffloadPoolNotReady"):
            wait_until(
                f"{alert} to fire",
                lambda alert=alert: "too-large" in {labels["pool"] for labels in prometheus.firing(alert)},  # type: ignore[misc]
                timeout_seconds=90,
                explain=lambda: (
                    f"alerts: {prometheus.query('ALERTS')}, "
                    f"node counts: {prometheus.query('kvoffload_operator_pool_nodes')}"
                ),
                log=prometheus.log,
            )
        for alert in ("KVOffloadOperatorDown", "KVOffloadWebhookDown"):
            wait_until(
                f"{alert} to be silent",
                lambda alert=alert: not prometheus.firing(alert),  # type: ignore[misc]
                timeout_seconds=30,
                log=prometheus.log,
            )
