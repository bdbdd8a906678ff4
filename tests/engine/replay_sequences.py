"""Runs the sequences of `sequence_checks.py` that the environment names (see there), without pytest: to replay one that
failed, and to make it short. From the root of the repository, with its `.venv`."""

import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATHS = [str(ROOT / name) for name in ("agent", "operator", "tests", "tests/engine", "")]


def main() -> None:
    sys.path[:0] = PATHS
    os.environ["PYTHONPATH"] = os.pathsep.join(PATHS[:2])  # of the daemon, too
    from test_no_model import run_with_sequences

    from hack.vllm.environment import DEFAULT_VERSION, ensure_vllm_environment

    python = ensure_vllm_environment(DEFAULT_VERSION) / "bin" / "python"
    seeds = [int(seed) for seed in os.environ.get("SEQUENCE_SEEDS", "").split(",") if seed]
    with tempfile.TemporaryDirectory() as folder:
        for name, result in run_with_sequences(python, Path(folder), seeds).items():
            print(name, result)


if __name__ == "__main__":
    main()
