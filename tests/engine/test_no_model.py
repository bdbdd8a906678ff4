"""Manager, workers and connector against the real classes of vLLM, without a model: `no_model_checks.py`, one test a
check.

The newest version that runs here always; all versions with `-m long` (`test_versions.py`).
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from engine_process import ROOT
from pool_daemon import PoolDaemon

from hack.vllm.environment import DEFAULT_VERSION, ensure_vllm_environment

pytestmark = pytest.mark.engine
HERE = Path(__file__).parent
SOURCE = (HERE / "no_model_checks.py").read_text()
DECLARED = re.findall(r"@check\ndef (\w+)\(([^)]*)\)", SOURCE)
WITH_DAEMON = [name for name, parameters in DECLARED if "control" not in parameters]
WITH_FAULTS = [name for name, parameters in DECLARED if "control" in parameters]


def run_checks(python: Path, socket: Path, overlay: Path | None, control: str = "") -> dict[str, str]:
    """All checks of one kind in one process; importing vLLM is what takes the time."""
    path = [str(ROOT / "agent"), *([str(overlay)] if overlay else [])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "VLLM_PLUGINS": "",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    done = subprocess.run(
        [str(python), str(HERE / "no_model_checks.py"), str(socket), control],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULTS ")]
    if not lines:
        pytest.fail(f"the checks ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return json.loads(lines[0].removeprefix("RESULTS "))


def run_with_daemon(python: Path, folder: Path, overlay: Path | None = None) -> dict[str, str]:
    with PoolDaemon(folder, capacity_bytes=64 << 20) as daemon:
        return run_checks(python, daemon.attach("pod-toy"), overlay)


def run_with_faults(python: Path, folder: Path, overlay: Path | None = None) -> dict[str, str]:
    folder.mkdir(exist_ok=True)
    for name in ("commands", "answers"):
        os.mkfifo(folder / name)
    socket = folder / "d.sock"
    # Opened for reading and writing, so that no side waits for the other.
    with (folder / "commands").open("r+b", 0) as commands, (folder / "answers").open("r+b", 0) as answers:
        daemon = subprocess.Popen(
            [sys.executable, str(HERE.parent / "scripted_daemon.py"), str(socket), str(16 << 20)],
            stdin=commands,
            stdout=answers,
        )
        try:
            assert answers.readline() == b"ready\n"
            return run_checks(python, socket, overlay, str(folder))
        finally:
            daemon.kill()
            daemon.wait()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    python = ensure_vllm_environment(DEFAULT_VERSION) / "bin" / "python"
    found = run_with_daemon(python, tmp_path_factory.mktemp("daemon"))
    return {**found, **run_with_faults(python, tmp_path_factory.mktemp("faults"))}


@pytest.mark.parametrize("name", WITH_DAEMON + WITH_FAULTS)
def test_with_the_newest_vllm(results: dict[str, str], name: str) -> None:
    assert results[name] == "ok", results[name]
