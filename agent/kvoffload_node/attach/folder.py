"""A pod's emptyDir as the attacher sees it: opened by descriptor, never following a link, written in a fixed order.

Runs in the attacher. The folders down to the emptyDir belong to the kubelet; what is inside may be written by the pod
too (another of its containers may mount it), so nothing inside is trusted: every name is made new, relative to a
descriptor, and no mode is changed by path.

    <kubelet root>/pods/<uid>/volumes/kubernetes.io~empty-dir/kvoffload/
        daemon.sock                 1. bound and handed to the daemon
        .lib-<random>/              2. the library, written file by file
        kvoffload/ kvoffload_engine/   3. its packages, renamed
        kvoffload_engine-*.dist-info/  4. renamed last: Python sees a plugin that is whole and has its socket beside it

The packages stand in the emptyDir itself and not in a folder of it, because this is what PYTHONPATH names: a Python
that starts before the attacher has come finds the folder, empty, and looks again when it has changed. Of a folder that
is not there at its start it believes for ever that nothing can be imported from it.
"""

import contextlib
import os
import re
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from kvoffload.api.keys import VOLUME_NAME
from kvoffload.errors import RegionUnusable

SOCKET_NAME = "daemon.sock"
INFORMATION_NAME = re.compile(r"kvoffload_engine-.*\.dist-info")
LISTEN_BACKLOG = 1024
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_BELOW_POD = ("volumes", "kubernetes.io~empty-dir", VOLUME_NAME)


@contextlib.contextmanager
def open_pod_folder(kubelet_pods: Path, pod_uid: str) -> Iterator[int | None]:
    """Descriptor of the pod's emptyDir, None where it is not there (yet, or any more). Raises OSError on a link."""
    descriptor = os.open(kubelet_pods, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in (pod_uid, *_BELOW_POD):
            try:
                below = os.open(name, _FOLDER_FLAGS, dir_fd=descriptor)
            except FileNotFoundError:
                yield None
                return
            os.close(descriptor)
            descriptor = below
        yield descriptor
    finally:
        os.close(descriptor)


def bind_socket(folder: int) -> socket.socket:
    """A listening socket in the folder, mode 0666; whatever had its name is removed. Raises OSError, RegionUnusable."""
    _remove(folder, SOCKET_NAME)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        # The mode is set on the socket before it has a name, so that no path is followed; bind then masks it.
        os.fchmod(listening.fileno(), 0o666)
        before = os.umask(0)
        try:
            listening.bind(f"/proc/self/fd/{folder}/{SOCKET_NAME}")
        finally:
            os.umask(before)
        listening.listen(LISTEN_BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening


def write_library(folder: int, library: Path) -> bool:
    """Copy the library's packages into the folder; False if they are there already. Raises OSError."""
    if any(INFORMATION_NAME.fullmatch(name) and _is_folder(folder, name) for name in os.listdir(folder)):
        return False
    new = f".lib-{secrets.token_hex(8)}"
    try:
        _copy_tree(library, folder, new)
        source = os.open(new, _FOLDER_FLAGS, dir_fd=folder)  # never a link, which the pod may have put there since
        try:
            _move_packages(source, folder, [entry.name for entry in library.iterdir()])
        finally:
            os.close(source)
        now = time.time_ns()  # before Linux 6.13 a change is dated by the tick, and a look within it seen as newest
        os.utime(folder, ns=(now, now))
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(new, dir_fd=folder)
    return True


def _move_packages(source: int, folder: int, names: Iterable[str]) -> None:
    """From one folder to the other, what makes the plugin visible last. A name is never a path: a folder on its way
    could be a link."""
    for name in sorted(names, key=lambda name: bool(INFORMATION_NAME.fullmatch(name))):
        with contextlib.suppress(FileNotFoundError):  # what a killed attacher, or the pod, has left in its place
            os.rename(name, f".old-{secrets.token_hex(8)}", src_dir_fd=folder, dst_dir_fd=folder)
        os.rename(name, name, src_dir_fd=source, dst_dir_fd=folder)


def _is_folder(parent: int, name: str) -> bool:
    return stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)


def _copy_tree(source: Path, parent: int, name: str) -> None:
    os.mkdir(name, 0o755, dir_fd=parent)
    folder = os.open(name, _FOLDER_FLAGS, dir_fd=parent)
    try:
        os.fchmod(folder, 0o755)
        for entry in sorted(source.iterdir()):
            if entry.name == "__pycache__":
                continue
            if entry.is_dir():
                _copy_tree(entry, folder, entry.name)
            else:
                _copy_file(entry, folder)
    finally:
        os.close(folder)


def _copy_file(source: Path, parent: int) -> None:
    descriptor = os.open(source.name, _NEW_FILE_FLAGS, 0o644, dir_fd=parent)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, 0o644)
        file.write(source.read_bytes())


def _remove(folder: int, name: str) -> None:
    try:
        mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode):
        raise RegionUnusable(f"the pod has made a folder named {name} in its kvoffload volume; it must remove it")
    os.unlink(name, dir_fd=folder)
