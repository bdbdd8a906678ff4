"""The chart as helm renders it, for tests."""

import subprocess
from typing import Any

import yaml

from hack.cache import REPOSITORY

CHART = REPOSITORY / "charts" / "kvoffload"


def render(helm: str, *values: str) -> dict[str, list[dict[str, Any]]]:
    """Objects of a release `rel` in namespace `ns`, by kind."""
    sets = [argument for value in values for argument in ("--set", value)]
    command = [helm, "template", "rel", str(CHART), "--namespace", "ns", "--kube-version", "1.37.0", *sets]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    objects: dict[str, list[dict[str, Any]]] = {}
    for one in yaml.safe_load_all(text):
        if one:
            objects.setdefault(one["kind"], []).append(one)
    return objects
