"""Attachments: who may touch the region, told by a file lock that the kernel drops with the last process that holds it.

Runs in the node daemon. For each session a file is made, locked by `flock`, and its open description passed to the
client; the daemon closes its own copy. Whether the client lives is then a fact that any daemon can test, also a
restarted one.

    <state>/attachments/<number>.lock     empty; locked as long as the client lives
    <state>/attachments/<number>.json     which engine and rank it is, for a restarted daemon
"""

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvoffload.errors import RegionUnusable
from kvoffload_node.whole_file import write_whole

log = logging.getLogger(__name__)


class AttachmentEntry(msgspec.Struct, frozen=True):
    """Who holds the lock of one attachment, as journaled."""

    number: int
    engine: int
    pod_uid: str
    pod_namespace: str
    pod_name: str
    predicted_layout: str
    tenant: str
    engine_id: str
    identity: bytes
    world_size: int
    rank: int
    process: bytes


class Attachments:
    """The folder of attachments."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700, exist_ok=True)
        self._left: set[int] = set()
        """Numbers of attachments that are forgotten and have files."""

    def create(self, entry: AttachmentEntry) -> int:
        """Journal an attachment and return its locked descriptor, to be passed to the client and then closed.

        Raises OSError; then nothing is left of it.
        """
        lock = self._lock_path(entry.number)
        descriptor = os.open(lock, os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            write_whole(self.folder / f"{entry.number}.json", msgspec.json.encode(entry))
        except BaseException:
            os.close(descriptor)
            with contextlib.suppress(OSError):
                lock.unlink()
            raise
        return descriptor

    def is_held(self, number: int) -> bool:
        """Whether any process still has the descriptor."""
        try:
            descriptor = os.open(self._lock_path(number), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def remove(self, number: int) -> None:
        """Forget an attachment whose client is gone; files that the disk keeps are for `remove_left`."""
        self._left.add(number)
        with contextlib.suppress(OSError):
            self._remove_files(number)

    def remove_left(self) -> None:
        """Remove what could not be. Raises OSError at the first that still cannot."""
        for number in list(self._left):
            self._remove_files(number)

    def _remove_files(self, number: int) -> None:
        (self.folder / f"{number}.json").unlink(missing_ok=True)
        self._lock_path(number).unlink(missing_ok=True)
        self._left.discard(number)

    def read_all(self) -> Iterator[AttachmentEntry]:
        """Every journaled attachment, the oldest first; leftovers of a kill in the middle of `create` are removed.

        A damaged one whose client is gone (a power failure leaves empty files) is removed too. Raises RegionUnusable
        where the client lives: what it may touch is not known.
        """
        for path in list(self.folder.iterdir()):
            if path.suffix == ".new" or (path.suffix == ".lock" and not path.with_suffix(".json").exists()):
                path.unlink()
        numbered = {int(path.stem): path for path in self.folder.glob("*.json") if path.stem.isdecimal()}
        for number, path in sorted(numbered.items()):
            try:
                yield msgspec.json.decode(path.read_bytes(), type=AttachmentEntry)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                if self.is_held(number):
                    raise RegionUnusable(
                        f"{path} is damaged ({error}) and its process lives, which may read and write the region; "
                        "recreate the pods that use the pool on this node"
                    ) from error
                log.warning("%s is damaged and nobody holds it: removed (%s)", path, error)
                self.remove(number)

    def _lock_path(self, number: int) -> Path:
        return self.folder / f"{number}.lock"
