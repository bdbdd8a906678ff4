"""The programs of our images as a container's first process, told to stop while they are still importing."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from daemon_process import wait_until

PROGRAMS = [
    ("kvoffload_node", "daemon"),
    ("kvoffload_node", "attacher"),
    ("kvoffload_operator", "run"),
    ("kvoffload_operator", "webhook"),
]


def first_process(unshare: "subprocess.Popen[bytes]") -> Path:
    """Folder in /proc of the process that is number 1 in the namespace."""
    children = Path(f"/proc/{unshare.pid}/task/{unshare.pid}/children")
    wait_until(lambda: children.read_text() != "", pause_seconds=0.001)
    return Path("/proc") / children.read_text().split()[0]


def catches(process: Path, number: int) -> bool:
    caught = next(line for line in (process / "status").read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


@pytest.mark.parametrize(("module", "command"), PROGRAMS)
def test_a_program_that_is_told_to_stop_while_it_imports_ends_at_once(module: str, command: str) -> None:
    unshare = subprocess.Popen(
        ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-m", module, command],
        env={"KVOFFLOAD_POOL": "p", "KVOFFLOAD_NODE_NAME": "n"},
        stderr=subprocess.DEVNULL,
    )
    try:
        process = first_process(unshare)
        wait_until(lambda: catches(process, signal.SIGTERM), pause_seconds=0.001)
        assert "pydantic" not in (process / "maps").read_text(), "it listens only after its imports"
        subprocess.run(["kill", "-TERM", process.name], check=True)
        assert unshare.wait(30) == 0
    finally:
        unshare.kill()
        unshare.wait()
