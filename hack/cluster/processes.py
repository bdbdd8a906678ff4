"""The cluster's long-running programs: started in the node's network namespace, known by id and start time.

`ip netns exec` would remount /sys and hide the cgroup mounts from the kubelet, so the namespace is entered by nsenter,
which executes the program: the id written down is the program's own.
"""

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from hack.cluster.settings import ClusterSettings


def read_start_time(pid: int) -> str | None:
    """Return the kernel's start time of a living process; None if there is none, or only its zombie."""
    try:
        after_name = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if after_name[0] == "Z" else after_name[19]


def find_running(name: str, settings: ClusterSettings) -> int | None:
    """Return the process id of one of the cluster's programs, if that very process still lives."""
    path = settings.run / f"{name}.pid"
    if not path.exists():
        return None
    pid, started = path.read_text().split()
    return int(pid) if read_start_time(int(pid)) == started else None


def start(name: str, command: Sequence[str | Path], settings: ClusterSettings) -> None:
    """Start a program in the node's namespace, detached from this terminal, its output appended to its log."""
    settings.logs.mkdir(parents=True, exist_ok=True)
    log = settings.logs / f"{name}.log"
    # spawned rather than held by a Popen: nobody here waits for it
    pid = os.posix_spawnp(
        "nsenter",
        ["nsenter", f"--net={settings.namespace_path}", *(str(part) for part in command)],
        {**os.environ, "PATH": f"{settings.binaries}:{os.environ['PATH']}"},
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
            *((os.POSIX_SPAWN_CLOSE, descriptor) for descriptor in find_inherited()),
        ],
        setsid=True,
    )
    (settings.run / f"{name}.pid").write_text(f"{pid} {read_start_time(pid)}")


def find_inherited() -> list[int]:
    """Return what this process would hand on beside its standard streams: a lock around `make`, held by the cluster as
    well, would be held until the cluster goes."""
    found = []
    for one in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the listing's own is closed by now
            if int(one.name) > 2 and os.get_inheritable(int(one.name)):
                found.append(int(one.name))
    return found


def stop(name: str, settings: ClusterSettings, *, patience_seconds: float = 8) -> None:
    """End a program by its id: SIGTERM, then SIGKILL past the patience."""
    pid = find_running(name, settings)
    if pid is not None:
        end_process(pid, patience_seconds=patience_seconds)
    (settings.run / f"{name}.pid").unlink(missing_ok=True)


def end_process(pid: int, *, patience_seconds: float) -> None:
    """End one process and wait until it is gone; with no patience at once by SIGKILL."""
    started = read_start_time(pid)
    deadline = time.monotonic() + patience_seconds
    is_killed = False
    while started is not None and read_start_time(pid) == started:
        try:
            if time.monotonic() >= deadline and not is_killed:
                os.kill(pid, signal.SIGKILL)
                is_killed = True
            elif not is_killed:
                os.kill(pid, signal.SIGTERM)
        except ProcessLookupError:
            return
        time.sleep(0.1)
        if is_killed and time.monotonic() > deadline + 10:
            raise TimeoutError(f"process {pid} does not die")


def find_shims(settings: ClusterSettings) -> list[int]:
    """Return the container shims that serve this cluster's runtime, by the socket in their arguments."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                arguments = (folder / "cmdline").read_bytes().split(b"\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if b"containerd-shim-runc-v2" in arguments[0] and str(settings.containerd_socket).encode() in arguments:
                found.append(int(folder.name))
    return found
