"""Asks a Prometheus over HTTP for series over time. Used by the screenshot; the demo has its own for values now."""

import json
import math
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from typing import Any

TIMEOUT_SECONDS = 30


@dataclass(frozen=True, slots=True)
class Series:
    """One series: its labels, and (seconds, value) points; NaN is left out."""

    labels: dict[str, str]
    points: tuple[tuple[float, float], ...]


class PrometheusError(Exception):
    """The query was refused, with Prometheus' own words."""


def query_range(url: str, expression: str, *, start: float, end: float, step: float) -> list[Series]:
    """A range query."""
    parameters = {"query": expression, "start": f"{start:.3f}", "end": f"{end:.3f}", "step": f"{step:.3f}"}
    return [Series(one["metric"], _points(one["values"])) for one in _ask(url, "query_range", parameters)]


def _points(pairs: list[list[float | str]]) -> tuple[tuple[float, float], ...]:
    points = [(float(at), float(value)) for at, value in pairs]
    return tuple(point for point in points if math.isfinite(point[1]))


def _ask(url: str, what: str, parameters: dict[str, str]) -> list[dict[str, Any]]:
    address = f"{url.rstrip('/')}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
    try:
        with urllib.request.urlopen(address, timeout=TIMEOUT_SECONDS) as answer:
            result: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    except urllib.error.HTTPError as error:
        raise PrometheusError(f"{parameters['query']}: {error.read().decode()[:500]}") from error
    return result
