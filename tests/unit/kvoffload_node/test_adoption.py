"""What a daemon takes over of the one before it: all that its files say truly, and nothing of any other file."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvoffload.api.pool import Sharing
from kvoffload_node.index.catalog import catalog_path, read_catalog
from kvoffload_node.index.slots import WriteOwner
from kvoffload_node.index.tenant import Supply
from kvoffload_node.region.leftovers import JOURNALS, REGION_FILES
from kvoffload_node.region.region import Region
from kvoffload_node.session.locks import Attachments
from kvoffload_node.session.registry import Registry
from region_on_disk import give_extents, open_region

EXTENT_BYTES, NUM_EXTENTS = 65536, 8
KEYS = [bytes([number]) * 32 for number in range(8)]


def start(folder: Path, num_extents: int = NUM_EXTENTS) -> Region:
    """A daemon's region, with what it has restored."""
    region = open_region(folder, extent_bytes=EXTENT_BYTES, num_extents=num_extents, sharing=Sharing.POOL)
    Registry(region=region, attachments=Attachments(folder / "attachments"), quarantine_seconds=0.0)
    return region


def store(region: Region) -> None:
    """The keys, of one namespace of Kubernetes and one of keys."""
    tenant, owner = region.tenant_for("team", "uid"), WriteOwner(number=1, storer=1, world_size=1)
    if not tenant.positions:
        give_extents(tenant, 2, with_pages=True)
    namespace = region.namespace(tenant, b"d" * 32, key_bytes=32, saved_per_slot=7)
    offsets, reason = tenant.index.reserve(
        tenant.index.slab(16384),
        len(KEYS),
        owner=owner,
        account=region.account("team"),
        find_extent=lambda _: Supply.NONE,
    )
    assert reason == ""
    tenant.index.assign(owner, namespace, zip(offsets, KEYS, strict=True))
    tenant.index.seal(owner, 0, offsets)


def kept(region: Region) -> list[bytes]:
    """Keys that are hit."""
    return [key for t in region.extents.tenants.values() for n in t.index.namespaces.values() for key in n.ready]


def region_file(folder: Path) -> Path:
    (path,) = (folder / "kvoffload-pool").glob(REGION_FILES)
    return path


def journal_file(folder: Path) -> Path:
    (path,) = folder.glob(JOURNALS)
    return path


def nothing(folder: Path) -> None:
    """The daemon was killed, and started again."""


def file_is_gone(folder: Path) -> None:
    region_file(folder).unlink()


def file_is_another(folder: Path) -> None:
    """Of the same name and length, with pages, as a mount made again and a backup put back would leave it."""
    path = region_file(folder)
    away = path.with_name("away")
    path.rename(away)
    path.write_bytes(bytes(NUM_EXTENTS * EXTENT_BYTES))
    away.unlink()


def file_was_cut(folder: Path) -> None:
    os.truncate(region_file(folder), EXTENT_BYTES)


def journal_is_gone(folder: Path) -> None:
    journal_file(folder).unlink()


def another_boot(folder: Path) -> None:
    """Pages did not outlive it, whatever the files say."""
    path = catalog_path(folder)
    path.write_bytes(path.read_bytes().replace(Path("/proc/sys/kernel/random/boot_id").read_bytes().strip(), b"b" * 36))


@pytest.mark.parametrize(
    ("what_happened", "num_kept"),
    [
        (nothing, len(KEYS)),
        (file_is_gone, 0),
        (file_is_another, 0),
        (file_was_cut, 0),
        (journal_is_gone, 0),
        (another_boot, 0),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_was_stored_is_believed_only_where_its_very_file_is_whole(
    tmp_path: Path, what_happened: Callable[[Path], None], num_kept: int
) -> None:
    before = start(tmp_path)
    store(before)
    before.abandon()
    what_happened(tmp_path)
    region = start(tmp_path)
    assert len(kept(region)) == num_kept
    assert region.epoch == before.epoch + 1
    tenant = region.tenant_for("team", "uid")
    assert tenant.file.allocated_bytes == len(tenant.positions) * EXTENT_BYTES, "what it does not know of is given back"
    assert region.account("team").used_bytes == num_kept * 16384
    if not num_kept:
        store(region)
    region.abandon()
    again = start(tmp_path)
    assert len(kept(again)) == len(KEYS)
    again.abandon()


def test_files_that_nobody_owns_go_and_those_of_a_tenant_and_of_others_stay(tmp_path: Path) -> None:
    before = start(tmp_path)
    store(before)
    before.abandon()
    owned = {region_file(tmp_path), journal_file(tmp_path)}
    for path in ("kvoffload-pool/tenant-0.region", "tenant-0.journal", "tenant-0.order"):
        (tmp_path / path).touch()
    others = [tmp_path / "kvoffload-pool/notes.region", tmp_path / "notes.journal"]
    for path in others:
        path.touch()
    region = start(tmp_path)
    assert {path for path in owned if path.exists()} == owned
    assert not list(tmp_path.rglob("tenant-0.*"))
    assert all(path.exists() for path in others)
    region.abandon()


def test_a_region_that_becomes_smaller_and_larger_keeps_what_it_has_and_its_file_its_length(tmp_path: Path) -> None:
    before = start(tmp_path)
    store(before)
    before.abandon()
    smaller = start(tmp_path, num_extents=1)
    assert (smaller.capacity_bytes, smaller.span_bytes) == (EXTENT_BYTES, NUM_EXTENTS * EXTENT_BYTES)
    assert region_file(tmp_path).stat().st_size == NUM_EXTENTS * EXTENT_BYTES, "clients have it mapped"
    assert (len(kept(smaller)), smaller.extents.surplus) == (len(KEYS), 1)
    smaller.abandon()
    larger = start(tmp_path, num_extents=2 * NUM_EXTENTS)
    assert larger.span_bytes == region_file(tmp_path).stat().st_size == 2 * NUM_EXTENTS * EXTENT_BYTES
    assert len(kept(larger)) == len(KEYS)
    larger.abandon()


def test_no_number_is_given_out_twice_over_restarts(tmp_path: Path) -> None:
    """Owners of slots are told by it, whether the daemon had the time to write it down or not."""
    seen: list[int] = []
    for _ in range(3):
        region = start(tmp_path)
        seen += [region.next_number() for _ in range(5)]
        region.abandon()
    assert len(set(seen)) == len(seen)
    catalog = read_catalog(catalog_path(tmp_path))
    assert catalog is not None
    assert catalog.epoch == 3
