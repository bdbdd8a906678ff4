"""The Grafana dashboard, generated from `panels.py`.

python -m hack.docs.dashboard              write charts/kvoffload/dashboards/kvoffload.json
python -m hack.docs.dashboard --check      fail where the file differs
python -m hack.docs.dashboard --queries    print every query as Prometheus can run it
"""

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hack.docs.panels import ROWS, Panel, dashboard_queries

PATH = Path(__file__).resolve().parents[2] / "charts" / "kvoffload" / "dashboards" / "kvoffload.json"
COLUMNS = 24
VARIABLES = ("pool", "node")
VARIABLES_OF = "kvoffload_pool_capacity_bytes"
"""Labels that the dashboard's variables choose by, and the metric whose values of them they offer."""
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def build_dashboard() -> dict[str, Any]:
    """The dashboard's model: under each heading its figures beside each other, then two graphs beside each other."""
    return {
        "uid": "kvoffload",
        "title": "kvoffload",
        "tags": ["kvoffload", "vllm"],
        "editable": True,
        "schemaVersion": 39,
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "30s",
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
                *(_variable(name) for name in VARIABLES),
            ]
        },
        "panels": list(_panels()),
    }


def _variable(name: str) -> dict[str, Any]:
    query = f"label_values({VARIABLES_OF}, {name})"
    return {
        "name": name,
        "type": "query",
        "label": name.capitalize(),
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }


def _panels() -> Iterator[dict[str, Any]]:
    numbers, y = itertools.count(1), 0
    for row in ROWS:
        place = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
        yield {
            "id": next(numbers),
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "gridPos": place,
            "panels": [],
        }
        y += 1
        figures = [panel for panel in row.panels if panel.is_figure]
        graphs = [panel for panel in row.panels if not panel.is_figure]
        for panels, num_beside, height in ((figures, len(figures), 4), (graphs, 2, 8)):
            for number, panel in enumerate(panels):
                width = COLUMNS // num_beside
                x, below = number % num_beside * width, number // num_beside * height
                yield _panel(panel, next(numbers), x=x, y=y + below, width=width, height=height)
            y += -(-len(panels) // max(1, num_beside)) * height


def _panel(panel: Panel, number: int, *, x: int, y: int, width: int, height: int) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit.value}
    if not panel.is_figure:
        stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
        defaults |= {"min": 0, "custom": {"stacking": stacking, "fillOpacity": 20 if panel.stacked else 5}}
    return {
        "id": number,
        "title": panel.title,
        "description": panel.description,
        "type": "stat" if panel.is_figure else "timeseries",
        "datasource": DATASOURCE,
        "gridPos": {"x": x, "y": y, "w": width, "h": height},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": DATASOURCE,
                "expr": query.expression,
                "legendFormat": query.legend,
                "instant": panel.is_figure,
                "range": not panel.is_figure,
            }
            for index, query in enumerate(panel.queries)
        ],
    }


def render() -> str:
    """The file's text."""
    return json.dumps(build_dashboard(), indent=1) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Write, check, or list the queries."""
    parser = argparse.ArgumentParser(prog="python -m hack.docs.dashboard", description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--queries", action="store_true")
    options = parser.parse_args(arguments)
    if options.queries:
        for title, query in dashboard_queries():
            sys.stdout.write(f"{title}\t{query}\n")
        return 0
    if PATH.exists() and PATH.read_text() == render():
        return 0
    if options.check:
        sys.stdout.write(f"{PATH} differs from hack/docs/panels.py; run python -m hack.docs.dashboard\n")
        return 1
    PATH.parent.mkdir(parents=True, exist_ok=True)
    PATH.write_text(render())
    return 0


if __name__ == "__main__":
    sys.exit(main())
