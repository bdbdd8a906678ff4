"""Figures of the node daemon, measured beside vLLM's own manager in the same run: `make bench`."""

import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
# The daemon and engines that the rows run are those of the tests, whose modules name each other as pytest has them.
sys.path[:0] = [str(_ROOT / "tests"), str(_ROOT / "tests" / "engine")]
