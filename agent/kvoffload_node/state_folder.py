"""The daemon's folder on the node's disk: the lock that makes it one daemon's, and the spec that was served last.

Runs in the node daemon, owned by `daemon.py`. Catalog and journals (`index/`) and attachments (`session/locks.py`)
stand in the same folder and are theirs.
"""

import fcntl
import json
import logging
import os
from pathlib import Path

from pydantic import ValidationError

from kvoffload.api.region import KVOffloadRegionSpec
from kvoffload.errors import RegionUnusable
from kvoffload_node.failures import Failures, Part, explain
from kvoffload_node.whole_file import write_whole

log = logging.getLogger(__name__)


class StateFolder:
    """One pool's folder; `lock` it before anything else."""

    def __init__(self, path: Path, failures: Failures) -> None:
        self.path = path
        self._failures = failures
        self._last_region = path / "region.json"
        self._lock = -1

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
        try:
            write_whole(self._last_region, json.dumps(manifest).encode())
        except OSError as error:
            self._failures.note(Part.LAST_SPEC, f"the last spec cannot be written: {self.explain(error)}")
            return False
        self._failures.clear(Part.LAST_SPEC)
        return True

    def forget_last(self) -> None:
        """Else the next start would serve a region that is no more."""
        self._last_region.unlink(missing_ok=True)

    def explain(self, error: OSError) -> str:
        """Path, cause and remedy, as `failures.explain`."""
        return explain(error, self.path)
