"""What `up` changed on this machine, written down before the change so that `down` can give all of it back.

`/run/kvoffload-cluster/<name>/state.json`. It names the boot it belongs to: after a reboot everything in it is gone by
itself, and the record starts empty.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(slots=True)
class MachineRecord:
    """What this boot's `up` made (pages, mounts, folders), and what was there before it (namespaces, regions)."""

    boot_id: str
    hugepages_added: int = 0
    mounts: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    namespaces_before: list[str] = field(default_factory=list)
    regions_before: list[str] = field(default_factory=list)
    is_new: bool = False

    @classmethod
    def read(cls, folder: Path) -> "MachineRecord":
        """Read the record of this boot, or an empty one."""
        boot_id = BOOT_ID.read_text().strip()
        path = folder / "state.json"
        if path.exists():
            stored = json.loads(path.read_text())
            if stored["boot_id"] == boot_id:
                return cls(**stored)
        return cls(
            boot_id=boot_id,
            namespaces_before=[entry.name for entry in Path("/run/netns").glob("*")],
            regions_before=[entry.name for entry in Path("/dev/hugepages").glob("kvoffload-*")],
            is_new=True,
        )

    def write(self, folder: Path) -> None:
        """Replace the stored record in one step."""
        folder.mkdir(parents=True, exist_ok=True)
        self.is_new = False
        unfinished = folder / ".state.json"
        unfinished.write_text(json.dumps(asdict(self), indent=1))
        unfinished.rename(folder / "state.json")
