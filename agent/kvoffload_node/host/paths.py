"""Where the host's facts are read. Passed in everywhere, so that a test reads a fixture tree instead.

Runs in the node daemon.
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class HostPaths:
    """Roots of the pseudo file systems."""

    sys: Path
    proc: Path
    cgroup: Path

    @classmethod
    def below(cls, root: Path) -> "HostPaths":
        """The usual places below `root`; `/` on a real node."""
        return cls(sys=root / "sys", proc=root / "proc", cgroup=root / "sys/fs/cgroup")
