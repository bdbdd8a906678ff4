"""Finds the config.json that `kubectl kvoffload plan --model` names. No network.

A name is, in this order: a file, a folder with a config.json, a model in the local Hugging Face cache, or one of the
packaged models (`models/*.json` holds the fields of the published config.json that decide KV bytes, nothing else).
"""

import json
import os
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from kvoffload.errors import InvalidSpec

PACKAGED = resources.files("kvoffload_cli") / "models"


def packaged_models() -> list[str]:
    """Names of the models whose configuration is packaged."""
    return sorted(entry.name.removesuffix(".json").replace("--", "/") for entry in PACKAGED.iterdir())


def read_config(name: str, *, hub_cache: Path | None = None) -> tuple[Mapping[str, Any], str]:
    """The parsed config.json that `name` stands for, and where it came from.

    Raises:
        InvalidSpec: nothing of that name is here, or it is no JSON object.
    """
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return _parse(path.read_bytes(), str(path)), str(path)
    cached = _in_hub_cache(name, hub_cache or _default_hub_cache())
    if cached is not None:
        return _parse(cached.read_bytes(), str(cached)), str(cached)
    packaged = PACKAGED / f"{name.replace('/', '--')}.json"
    if packaged.is_file():
        return _parse(packaged.read_bytes(), name), "packaged with kvoffload"
    if Path(name).is_dir():
        raise InvalidSpec(f"{name} has no config.json; give the folder of a model, or the path of its config.json")
    raise InvalidSpec(
        f"model {name!r}: no such file or folder, not in the local Hugging Face cache, and not packaged "
        f"({', '.join(packaged_models())}); give the path of its config.json"
    )


def _parse(text: bytes, source: str) -> Mapping[str, Any]:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidSpec(f"{source} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise InvalidSpec(f"{source} holds a {type(config).__name__}, needed an object with the model's configuration")
    return config


def _default_hub_cache() -> Path:
    home = os.environ.get("HF_HOME")
    return (Path(home) if home else Path.home() / ".cache" / "huggingface") / "hub"


def _in_hub_cache(name: str, hub_cache: Path) -> Path | None:
    """The newest snapshot's config.json of `org/name` in Hugging Face's cache."""
    found = list((hub_cache / f"models--{name.replace('/', '--')}" / "snapshots").glob("*/config.json"))
    return max(found, key=lambda path: path.stat().st_mtime, default=None)
