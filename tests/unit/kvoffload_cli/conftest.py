"""Golden files of the command line; `UPDATE_GOLDEN=1 pytest tests/unit/kvoffload_cli` writes them anew."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parents[2] / "golden" / "cli"


@pytest.fixture
def golden() -> Callable[[str, str], None]:
    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        lines = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
        if os.environ.get("UPDATE_GOLDEN"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(lines)
        assert lines == path.read_text(), f"{path} differs; UPDATE_GOLDEN=1 writes it anew"

    return compare
