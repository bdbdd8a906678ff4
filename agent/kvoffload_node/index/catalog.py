"""What the journals' numbers mean: tenants, namespaces and accounts, and whether the journals are true at all.

Runs in the node daemon: read once at start, written whole (to a new file, then renamed) whenever a number is given
out. That happens when a pod or an engine is first seen, never per request.
"""

from pathlib import Path

import msgspec

from kvoffload_node.whole_file import write_whole


class TenantEntry(msgspec.Struct):
    """One tenant and its region file."""

    name: str
    number: int
    inode: int


class NamespaceEntry(msgspec.Struct):
    """One namespace of keys."""

    tenant: int
    number: int
    digest: bytes
    key_bytes: int
    saved_per_slot: int


class Catalog(msgspec.Struct):
    """All that a restarted daemon needs beside the journals. Another boot or geometry makes it worthless."""

    boot_id: str
    extent_bytes: int
    span_bytes: int
    epoch: int = 0
    tenants: list[TenantEntry] = []
    namespaces: list[NamespaceEntry] = []
    accounts: list[str] = []
    """Kubernetes namespaces; the account's number is its place."""
    next_number: int = 1
    region_uid: str = ""
    """uid of the KVOffloadRegion whose files these are; empty: of whichever comes next (retained ones, too)."""


def catalog_path(state_folder: Path) -> Path:
    """Where a pool's catalog is."""
    return state_folder / "catalog"


def read_catalog(path: Path) -> Catalog | None:
    """The catalog at `path`, None if there is none or it is damaged (then the journals are empty too)."""
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=Catalog)
    except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def write_catalog(path: Path, catalog: Catalog) -> None:
    """Replace the catalog as a whole."""
    write_whole(path, msgspec.msgpack.encode(catalog))
