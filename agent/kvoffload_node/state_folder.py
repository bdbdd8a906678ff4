"""The daemon's folder on the node's disk: the lock that makes it one daemon's, and the spec that was served last.

Runs in the node daemon, owned by `daemon.py`. Catalog and journals (`index/`) and attachments (`session/locks.py`)
stand in the same folder and are theirs; what cannot be written there while the daemon serves is noted here.
"""

import errno
import fcntl
import json
import logging
import os
from pathlib import Path

from pydantic import ValidationError

from kvoffload.api.region import KVOffloadRegionSpec
from kvoffload.errors import RegionUnusable
from kvoffload_node.index.journal import OUT_OF_DISK

log = logging.getLogger(__name__)


class StateFolder:
    """One pool's folder; `lock` it before anything else."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last_region = path / "region.json"
        self._lock = -1
        self._problems: dict[str, str] = {}

    @property
    def problem(self) -> str:
        """What could not be written while the daemon serves, and why; empty if nothing."""
        return "; ".join(self._problems.values())

    def lock(self) -> None:
        """One daemon for one folder. Raises RegionUnusable."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path / "daemon.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise RegionUnusable(self.explain(error)) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise RegionUnusable(f"another daemon runs on {self.path}; one daemon serves a pool on a node") from error
        self._lock = descriptor

    def unlock(self) -> None:
        """Another daemon may have it."""
        os.close(self._lock)

    def read_last(self) -> tuple[str, KVOffloadRegionSpec] | None:
        """The uid and the spec that were served last; None if there is nothing readable."""
        try:
            manifest = json.loads(self._last_region.read_text())
            return manifest["metadata"]["uid"], KVOffloadRegionSpec.model_validate(manifest["spec"])
        except FileNotFoundError:
            return None
        except (ValidationError, ValueError, KeyError, TypeError, OSError) as error:
            log.warning("%s cannot be read, waiting for the API server: %s", self._last_region, error)
            return None

    def write_last(self, uid: str, spec: KVOffloadRegionSpec) -> bool:
        """Write the spec down for the next start; False, and noted, where the folder does not take it."""
        manifest = {"metadata": {"uid": uid}, "spec": spec.model_dump(mode="json", by_alias=True)}
        new = self._last_region.with_suffix(".new")
        try:
            new.write_text(json.dumps(manifest))
            new.replace(self._last_region)
        except OSError as error:
            self.note("the last spec", error)
            return False
        self.note("the last spec", None)
        return True

    def forget_last(self) -> None:
        """Else the next start would serve a region that is no more."""
        self._last_region.unlink(missing_ok=True)

    def note(self, what: str, error: OSError | None) -> None:
        """Say once what the folder does not take, and once that it does again."""
        message = f"{what} cannot be written: {self.explain(error)}" if error else ""
        if message == self._problems.get(what, ""):
            return
        if message:
            self._problems[what] = message
            log.warning("%s", message)
        else:
            del self._problems[what]
            log.info("%s is written again", what)

    def explain(self, error: OSError) -> str:
        """Path, cause and remedy; the path is this folder where the kernel does not name one (writes)."""
        path = error.filename2 or error.filename or self.path
        if error.errno in OUT_OF_DISK:
            remedy = "make room on that disk"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            remedy = "let the daemon write there"
        elif error.errno in (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP):
            remedy = "it is not the daemon's: remove it on the node, the daemon makes its own"
        else:
            remedy = "see the node's disk and its kernel log"
        return f"{path}: {os.strerror(error.errno) if error.errno else error}; {remedy}"
