"""A picture of the dashboard, drawn from a real Prometheus with the dashboard's own queries.

    python -m hack.docs.screenshot http://127.0.0.1:9090 [--minutes 15] [--out docs/images/dashboard.png]

Writes the page beside the picture's name as .html into build/, and photographs it with headless Chromium (Debian's
`chromium`). Grafana is not needed, and not here. Beside the picture it writes a .json, which says of what panels and
queries this very picture is.
"""

import argparse
import hashlib
import html
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from hack.cache import cache_root
from hack.cluster.packages import CHROMIUM, ensure_packages
from hack.docs.panels import ROWS, Panel, Query, Unit
from hack.docs.prometheus import Series, query_range

ROOT = Path(__file__).resolve().parents[2]
WIDTH, PANEL_HEIGHT, ROW_HEIGHT, MARGIN = 1280, 190, 34, 16
PLOT = {"left": 84, "right": 10, "top": 8, "bottom": 22}
COLOURS = ("#3274d9", "#56a64b", "#f2cc0c", "#e02f44", "#a352cc", "#ff780a", "#37872d", "#8ab8ff")
MANY = len(COLOURS)
"""More series than this: those that never happened are only counted."""
POINTS = 120

STYLE = """
body { margin: 0; background: #f4f5f5; font: 12px 'DejaVu Sans', sans-serif; color: #24292e; }
h1 { font-size: 16px; margin: 14px 16px 4px; } p { margin: 0 16px 10px; color: #6e7781; }
.grid { display: grid; grid-template-columns: repeat(12, 1fr); gap: 10px; padding: 0 16px 16px; }
.panel { background: #fff; border: 1px solid #d8dbe0; border-radius: 3px; padding: 6px 8px; grid-column: span 6;
  min-width: 0; }
.figure { grid-column: span 3; } .figure b { font-size: 30px; color: #37872d; display: block; padding: 8px 0; }
.row { grid-column: span 12; font-size: 14px; font-weight: bold; padding-top: 6px; }
.title { font-weight: bold; } .legend span { margin-right: 12px; white-space: nowrap; }
.legend span::before { content: '\\25a0  '; color: var(--of); }
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Query, draw, photograph."""
    parser = argparse.ArgumentParser(prog="python -m hack.docs.screenshot", description=__doc__)
    parser.add_argument("prometheus")
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "dashboard.png")
    options = parser.parse_args(arguments)
    end = time.time()
    page = build_page(options.prometheus, start=end - options.minutes * 60, end=end)
    source = page_of(options.out)
    source.parent.mkdir(exist_ok=True)
    source.write_text(page)
    photograph(source, options.out)
    label_of(options.out).write_text(json.dumps(build_label(options.out), indent=1) + "\n")
    sys.stdout.write(f"{options.out} written\n")
    return 0


def page_of(picture: Path) -> Path:
    """The page that a picture is of."""
    return ROOT / "build" / f"{picture.stem}.html"


def label_of(picture: Path) -> Path:
    """The file that says what a picture shows."""
    return picture.with_suffix(".json")


def build_label(picture: Path) -> dict[str, str]:
    """Digests of the picture, and of what of the panels it shows: where one differs the picture is to be drawn anew."""
    shown = [
        (row.title, panel.title, panel.unit.value, panel.is_figure, panel.stacked, query.expression, query.legend)
        for row in ROWS
        for panel in row.panels
        for query in panel.queries
    ]
    return {
        "panels": hashlib.sha256(json.dumps(shown).encode()).hexdigest(),
        "picture": hashlib.sha256(picture.read_bytes()).hexdigest(),
    }


def build_page(url: str, *, start: float, end: float) -> str:
    """The page with every panel, from the queries' results."""
    panels = []
    for row in ROWS:
        panels.append(f"<div class='row'>{html.escape(row.title)}</div>")
        for panel in row.panels:
            drawn = [
                (query, series)
                for query in panel.queries
                for series in query_range(url, query.resolved(), start=start, end=end, step=(end - start) / POINTS)
                if series.points
            ]
            panels.append(draw_panel(panel, drawn, start=start, end=end))
    when = f"{datetime.fromtimestamp(end, UTC):%Y-%m-%d %H:%M} UTC, the last {(end - start) / 60:.0f} minutes"
    return (
        f"<!doctype html><meta charset='utf-8'><title>kvoffload</title><style>{STYLE}</style>"
        f"<h1>kvoffload</h1><p>{when}</p><div class='grid'>{''.join(panels)}</div>"
    )


def draw_panel(panel: Panel, drawn: list[tuple[Query, Series]], *, start: float, end: float) -> str:
    """One panel: a figure, or a graph with its legend."""
    title = f"<div class='title'>{html.escape(panel.title)}</div>"
    if panel.is_figure:
        value = drawn[0][1].points[-1][1] if drawn else None
        return f"<div class='panel figure'>{title}<b>{'-' if value is None else show(value, panel.unit)}</b></div>"
    rest = ""
    if len(drawn) > MANY:  # every reason that there is: those that never happened have no colour and no line
        happened = [(query, series) for query, series in drawn if any(value for _, value in series.points)]
        if len(happened) < len(drawn):
            rest = f" {len(drawn) - len(happened)} others are 0" if happened else f"all {len(drawn)} are 0"
            drawn = happened
    legends = " ".join(
        f"<span style='--of: {colour(number)}'>{html.escape(legend(query, series))}</span>"
        for number, (query, series) in enumerate(drawn)
    )
    graph = draw_graph([series for _, series in drawn], panel, start=start, end=end)
    return f"<div class='panel'>{title}{graph}<div class='legend'>{legends}{rest}</div></div>"


def draw_graph(series: list[Series], panel: Panel, *, start: float, end: float) -> str:
    """An SVG with lines, or areas on each other, four grid lines and the time below."""
    width = (WIDTH - 3 * MARGIN) // 2 - 30
    inner_width = width - PLOT["left"] - PLOT["right"]
    inner_height = PANEL_HEIGHT - PLOT["top"] - PLOT["bottom"]
    stacked = stack(series) if panel.stacked else [one.points for one in series]
    top = max((value for points in stacked for _, value in points), default=0.0) * 1.1 or 1.0

    def place(at: float, value: float) -> str:
        x = PLOT["left"] + (at - start) / (end - start) * inner_width
        return f"{x:.1f},{PLOT['top'] + inner_height * (1 - value / top):.1f}"

    parts = [f"<svg width='{width}' height='{PANEL_HEIGHT}'>"]
    for quarter in range(5):
        y = PLOT["top"] + inner_height * (1 - quarter / 4)
        parts.append(f"<line x1='{PLOT['left']}' x2='{width - PLOT['right']}' y1='{y}' y2='{y}' stroke='#e4e7eb'/>")
        text = show(top * quarter / 4, panel.unit)
        parts.append(f"<text x='{PLOT['left'] - 6}' y='{y + 4}' text-anchor='end' fill='#6e7781'>{text}</text>")
    for part in range(4):
        at = start + (end - start) * part / 4
        x = PLOT["left"] + inner_width * part / 4
        text = f"{datetime.fromtimestamp(at, UTC):%H:%M}"
        parts.append(f"<text x='{x}' y='{PANEL_HEIGHT - 6}' fill='#6e7781'>{text}</text>")
    for number, points in reversed(list(enumerate(stacked))):
        drawn_in, line = colour(number), " ".join(place(*point) for point in points)
        if panel.stacked and points:
            base = f"{place(points[-1][0], 0)} {place(points[0][0], 0)}"
            parts.append(f"<polygon points='{line} {base}' fill='{drawn_in}' fill-opacity='0.35'/>")
        parts.append(f"<polyline points='{line}' fill='none' stroke='{drawn_in}' stroke-width='1.6'/>")
    return "".join(parts) + "</svg>"


def colour(number: int) -> str:
    """A colour for each series of a graph, no two alike: past the chosen ones a hue between those before it."""
    return COLOURS[number] if number < len(COLOURS) else f"hsl({number * 137.508 % 360:.0f} 45% 40%)"


def stack(series: list[Series]) -> list[tuple[tuple[float, float], ...]]:
    """Each series on top of those before it, at every time that any has."""
    below: dict[float, float] = {}
    stacked = []
    for one in series:
        points = []
        for at, value in one.points:
            below[at] = below.get(at, 0.0) + value
            points.append((at, below[at]))
        stacked.append(tuple(points))
    return stacked


def legend(query: Query, series: Series) -> str:
    """The legend with its labels filled in."""
    text = query.legend
    for name, value in series.labels.items():
        text = text.replace("{{" + name + "}}", value)
    return " ".join(part for part in text.split() if not part.startswith("{{")) or "all"


def show(value: float, unit: Unit) -> str:
    """A value with its unit, three digits."""
    if unit in (Unit.BYTES, Unit.BYTES_PER_SECOND):
        for suffix in ("B", "KiB", "MiB", "GiB", "TiB"):
            if abs(value) < 1000 or suffix == "TiB":
                break
            value /= 1024
        return f"{value:.3g} {suffix}" + ("/s" if unit is Unit.BYTES_PER_SECOND else "")
    if unit is Unit.RATIO:
        return f"{value:.0%}"
    if unit is Unit.SECONDS:
        return f"{value * 1e6:.3g} us" if value < 1e-3 else f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"
    return f"{value:.3g}" + ("/s" if unit is Unit.PER_SECOND else "")


def page_height() -> int:
    """Pixels that the page needs."""
    graphs = [sum(not panel.is_figure for panel in row.panels) for row in ROWS]
    return 150 + sum(ROW_HEIGHT + -(-number // 2) * (PANEL_HEIGHT + 62) for number in graphs)


def photograph(source: Path, out: Path) -> None:
    """Render a page to a PNG as high as it is; installs Chromium where there is none."""
    ensure_packages(cache_root() / "logs" / "chromium.log", CHROMIUM)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as profile:
        command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [f"--user-data-dir={profile}", f"--window-size={WIDTH},{page_height()}", f"--screenshot={out}"]
        subprocess.run([*command, source.as_uri()], check=True, capture_output=True, timeout=120)


if __name__ == "__main__":
    sys.exit(main())
