"""Manager, workers and connector against the real classes of vLLM, without a model: `compat_checks.py`,
`plain_checks.py`, `device_checks.py`, `lookup_checks.py`, `layout_checks.py`, `restart_checks.py`, `fault_checks.py`,
`inert_checks.py` and `sequence_checks.py`, one test a check.

The newest version that runs here always; all versions with `-m long` (`test_versions.py`).
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import pytest
from engine_process import ROOT
from region_daemon import RegionDaemon
from sequence_daemon import SequenceDaemon

from daemon_process import DaemonProcess
from hack.vllm.environment import DEFAULT_VERSION, ensure_vllm_environment

pytestmark = pytest.mark.engine
HERE = Path(__file__).parent
PLAIN_KINDS = ("compat", "plain", "device", "lookup", "layout")
"""Checks that need no daemon, or one and nothing done to it."""
CHECKS = [
    name
    for kind in (*PLAIN_KINDS, "restart", "fault", "inert", "sequence")
    for name in re.findall(r"@check\ndef (\w+)\(", (HERE / f"{kind}_checks.py").read_text())
]
CAPACITY_BYTES = 16 << 20
LONG_SEEDS = range(100, 200)


def run_checks(
    python: Path,
    kind: str,
    socket: Path,
    folder: Path,
    overlay: Path | None,
    variables: Mapping[str, str] | None = None,
    timeout_seconds: float = 300,
) -> dict[str, str]:
    """All checks of one kind in one process; importing vLLM is what takes the time."""
    path = [str(ROOT / "agent"), *([str(overlay)] if overlay else [])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "VLLM_PLUGINS": "",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_TARGET_DEVICE": "cpu",  # 0.33 has no CPU build, and finds no device here
        **(variables or {}),
    }
    done = subprocess.run(
        [str(python), str(HERE / f"{kind}_checks.py"), str(socket), str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULTS ")]
    if not lines:
        pytest.fail(f"the checks ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return dict(json.loads(lines[0].removeprefix("RESULTS ")))


@contextlib.contextmanager
def pipes(folder: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Commands and answers. Opened for reading and writing, so that no side waits for the other."""
    for name in ("commands", "answers"):
        os.mkfifo(folder / name)
    with (folder / "commands").open("r+b", 0) as commands, (folder / "answers").open("r+b", 0) as answers:
        yield commands, answers


@contextlib.contextmanager
def keep(deeds: dict[str, Callable[[], str | None]], commands: BinaryIO, answers: BinaryIO) -> Iterator[None]:
    """Meanwhile do what the checks say."""

    def obey() -> None:
        while (command := commands.readline().decode().strip()) != "end":
            answers.write(f"{deeds[command]() or 'done'}\n".encode())

    keeper = threading.Thread(target=obey)
    keeper.start()
    try:
        yield
    finally:
        commands.write(b"end\n")
        keeper.join()


def run_with_daemon(python: Path, folder: Path, overlay: Path | None = None) -> dict[str, str]:
    """The checks that need none or a daemon, and those that need it killed, with the real one."""
    with DaemonProcess(folder, capacity_bytes=CAPACITY_BYTES) as daemon, pipes(folder) as (commands, answers):
        socket = daemon.attach("pod-toy")
        results: dict[str, str] = {}
        for kind in PLAIN_KINDS:
            results |= run_checks(python, kind, socket, folder, overlay)
        deeds: dict[str, Callable[[], str | None]] = {
            "kill": daemon.kill,
            "start": daemon.start,
            "stop": lambda: daemon.process.send_signal(signal.SIGSTOP),
            "continue": lambda: daemon.process.send_signal(signal.SIGCONT),
            "dump": lambda: json.dumps(daemon.metrics()),
            "pause": lambda: daemon.write_spec(mode="Paused"),
            "resume": lambda: daemon.write_spec(mode="Active"),
            "never replicate": lambda: daemon.write_spec(replicatedLayout="Never"),
            "replicate": lambda: daemon.write_spec(replicatedLayout="Auto"),
        }
        with keep(deeds, commands, answers):
            return results | run_checks(python, "restart", socket, folder, overlay)


def run_with_region(python: Path, folder: Path, overlay: Path | None = None) -> dict[str, str]:
    """The checks that ask what the daemon says in the region's status."""
    with RegionDaemon(folder, capacity_bytes=CAPACITY_BYTES) as daemon, pipes(folder) as (commands, answers):
        deeds = {"engines": lambda: json.dumps(daemon.engines())}
        with keep(deeds, commands, answers):
            return run_checks(python, "inert", daemon.attach("pod-inert"), folder, overlay)


def run_with_sequences(python: Path, folder: Path, seeds: Iterable[int] = (), num_steps: int = 0) -> dict[str, str]:
    """Random sequences, those of the check itself or these, on a daemon that is begun anew for each of them."""
    variables = {"SEQUENCE_SEEDS": ",".join(map(str, seeds))} | (
        {"SEQUENCE_STEPS": str(num_steps)} if num_steps else {}
    )
    with (
        SequenceDaemon(folder) as daemon,
        pipes(folder) as (commands, answers),
        keep(daemon.deeds(), commands, answers),
    ):
        return run_checks(python, "sequence", daemon.socket, folder, None, variables, timeout_seconds=3600)


def run_with_faults(python: Path, folder: Path, overlay: Path | None = None) -> dict[str, str]:
    """The checks that need a daemon which misbehaves."""
    folder.mkdir(exist_ok=True)
    socket = folder / "d.sock"
    with pipes(folder) as (commands, answers):
        daemon = subprocess.Popen(
            [sys.executable, str(HERE.parent / "scripted_daemon.py"), str(socket), str(16 << 20)],
            stdin=commands,
            stdout=answers,
        )
        try:
            assert answers.readline() == b"ready\n"
            return run_checks(python, "fault", socket, folder, overlay)
        finally:
            daemon.kill()
            daemon.wait()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    python = ensure_vllm_environment(DEFAULT_VERSION) / "bin" / "python"
    found = run_with_daemon(python, tmp_path_factory.mktemp("daemon"))
    found |= run_with_region(python, tmp_path_factory.mktemp("region"))
    found |= run_with_sequences(python, tmp_path_factory.mktemp("sequences"))
    return {**found, **run_with_faults(python, tmp_path_factory.mktemp("faults"))}


@pytest.mark.parametrize("name", CHECKS)
def test_with_the_newest_vllm(results: dict[str, str], name: str) -> None:
    assert results[name] == "ok", results[name]


@pytest.mark.long
def test_a_hundred_random_sequences_of_events_serve_no_wrong_byte_and_leave_nothing_held(tmp_path: Path) -> None:
    """The long form of `sequence_checks.py`: longer sequences, of other seeds. One that fails is told with its seed."""
    python = ensure_vllm_environment(DEFAULT_VERSION) / "bin" / "python"
    for name, result in run_with_sequences(python, tmp_path, LONG_SEEDS, num_steps=80).items():
        assert result == "ok", (name, result)
