"""Reading a cluster part by part, where what cannot be read is unknown and does not end the rest. For `observe`; its
paths are also for who lists pools itself."""

from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, TypeVar

from pydantic import ValidationError

from kvoffload.api import keys
from kvoffload.api.pool import KVOffloadPool
from kvoffload.api.region import KVOffloadRegion
from kvoffload_cli.facts import Part
from kvoffload_cli.kube import Denied, Reader, ReadFailed
from kvoffload_cli.observe_pods import timestamp
from kvoffload_cli.observe_release import Manifest
from kvoffload_cli.observe_rights import find_viewer_role

_T = TypeVar("_T", KVOffloadPool, KVOffloadRegion)

API = f"/apis/{keys.GROUP}/{keys.VERSION}"
POOLS, REGIONS = f"{API}/{keys.POOL_PLURAL}", f"{API}/{keys.REGION_PLURAL}"


class Observation:
    """Reads one thing after the other, and keeps what could not be read instead of stopping there: it is unknown."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.unreadable: list[str] = []
        self.unread: set[Part] = set()
        self.invalid: list[str] = []
        self.reported_at: dict[str, datetime] = {}

    def note(self, part: Part, error: Exception) -> None:
        """Keep what could not be read."""
        self.unread.add(part)
        self.unreadable.append(str(error))

    def collection(self, path: str, part: Part, *, labels: str = "", fields: str = "") -> list[dict[str, Any]]:
        """A collection; empty, and noted, where it could not be read."""
        try:
            return self.reader.list_objects(path, labels=labels, fields=fields)
        except (Denied, ReadFailed) as error:
            self.note(part, error)
            return []

    def get(self, path: str, part: Part) -> dict[str, Any] | None:
        """One object; None, and noted, where it could not be read."""
        try:
            return self.reader.get(path)
        except (Denied, ReadFailed) as error:
            self.note(part, error)
            return None

    def text(self, path: str, part: Part) -> str:
        """What is proxied; empty, and noted, where it could not be read."""
        try:
            return self.reader.text(path)
        except (Denied, ReadFailed) as error:
            self.note(part, error)
            return ""

    def pools(self) -> tuple[KVOffloadPool, ...]:
        """All pools that this version can read."""
        return self.parse(self.collection(POOLS, Part.POOLS), KVOffloadPool.from_manifest)

    def regions(self) -> tuple[KVOffloadRegion, ...]:
        """All regions that this version can read."""
        return self.parse(self.collection(REGIONS, Part.REGIONS), KVOffloadRegion.from_manifest)

    def viewer_role(self) -> str:
        """The ClusterRole that would let this user read pools and regions; empty where everything was read."""
        return find_viewer_role(self.reader) if self.unread else ""

    def parse(self, manifests: Iterable[dict[str, Any]], make: Callable[[dict[str, Any]], _T]) -> tuple[_T, ...]:
        """Our objects; one that this version cannot read is noted and left out."""
        parsed = []
        for manifest in manifests:
            try:
                parsed.append(make(manifest))
                self.reported_at.update(status_time(manifest))
            except ValidationError as error:
                first = error.errors()[0]
                where = ".".join(str(part) for part in first["loc"])
                name = manifest.get("metadata", {}).get("name", "?")
                self.invalid.append(f"{manifest.get('kind', 'object')} {name}: {where}: {first['msg']}")
        return tuple(sorted(parsed, key=lambda one: one.name))


def status_time(manifest: Manifest) -> dict[str, datetime]:
    """When the figures in the status of one of our objects were written last, by its name; empty where unknown.

    A region's figures are the node daemon's; the operator writes a condition of its own there.
    """
    metadata = manifest["metadata"]
    times = [
        timestamp(entry["time"])
        for entry in metadata.get("managedFields", [])
        if entry.get("time") and "f:usedBytes" in entry.get("fieldsV1", {}).get("f:status", {})
    ]
    return {metadata["name"]: max(times)} if times else {}
