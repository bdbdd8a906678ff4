"""The JSON patch that answers for one pod: its operations, in the order in which they apply. Pure.

Called by `injection.py` and `container.py`, which say what is added where, and by `server.py`, which sends it. It
changes with how a patch is written; what a pod is given stands in the other two.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Manifest = Mapping[str, Any]
Operation = dict[str, Any]


@dataclass(slots=True)
class Patch:
    """Collects JSON patch operations on one pod."""

    operations: list[Operation] = field(default_factory=list)

    def add(self, path: str, value: Any) -> None:
        """Set a member, or insert into a list before that index (`-`: at its end)."""
        self.operations.append({"op": "add", "path": path, "value": value})

    def replace(self, path: str, value: Any) -> None:
        """Set what is there already."""
        self.operations.append({"op": "replace", "path": path, "value": value})


def annotation_path(key: str) -> str:
    """JSON pointer to an annotation."""
    return f"/metadata/annotations/{key.replace('~', '~0').replace('/', '~1')}"
