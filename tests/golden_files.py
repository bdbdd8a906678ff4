"""Golden files: what is built is compared with a file; `KVOFFLOAD_UPDATE_GOLDEN=1` writes the file instead."""

import os
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden"


def assert_golden(text: str, name: str) -> None:
    """Compare with `tests/golden/<name>`."""
    path = GOLDEN / name
    if os.environ.get("KVOFFLOAD_UPDATE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert path.exists(), f"{path} is missing; run with KVOFFLOAD_UPDATE_GOLDEN=1 and look at what it wrote"
    assert text == path.read_text(), f"differs from {path}; run with KVOFFLOAD_UPDATE_GOLDEN=1 if that is meant"
