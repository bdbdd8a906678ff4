"""The registry beside its region, without sockets: pods that come and go, and what is closed to whom."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvoffload.api.pool import Mode, Sharing
from kvoffload.errors import SessionRefused
from kvoffload_node.region.region import Region
from kvoffload_node.session.locks import Attachments
from kvoffload_node.session.registry import Registry
from region_on_disk import give_extents, open_region, spec_of

SIZE = {"extent_bytes": 65536, "num_extents": 8}


def open_registry(folder: Path, **spec: object) -> Registry:
    region = open_region(folder, **SIZE, **spec)
    return Registry(region=region, attachments=Attachments(folder / "attachments"), quarantine_seconds=0.0)


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    """Of a pool whose pods share with nobody."""
    registry = open_registry(tmp_path, sharing=Sharing.POD)
    yield registry
    registry.region.abandon()


def files(region: Region) -> set[str]:
    return {path.suffix for path in region.folder.iterdir()} | {path.suffix for path in region._state.glob("tenant-*")}


def test_a_pod_that_is_gone_leaves_no_tenant_and_no_file(registry: Registry) -> None:
    pod = registry.add_pod("uid", "team", "pod", "auto")
    assert files(registry.region) == {".region", ".journal"}
    registry.sweep()
    assert set(registry.pods) == {"uid"}, "it is there, with engines or without"
    registry.remove_pod("uid")
    registry.sweep()
    assert registry.pods == {}
    assert pod.tenant.name not in registry.region.extents.tenants
    assert files(registry.region) == set()
    registry.remove_pod("uid")  # told twice


def test_a_pod_that_is_handed_over_again_while_its_pages_go_keeps_its_tenant(registry: Registry) -> None:
    tenant = registry.add_pod("uid", "team", "pod", "auto").tenant
    give_extents(tenant, 1)
    registry.remove_pod("uid")
    registry.sweep()
    assert registry.pods == {}
    assert tenant.is_abandoned, "its extent is on its way out"
    again = registry.add_pod("uid", "team", "pod", "auto")
    tenant.positions.clear()  # it has gone
    registry.sweep()
    assert again.tenant is tenant is registry.region.extents.tenants[tenant.name]
    assert set(registry.pods) == {"uid"}


def test_a_pod_that_goes_and_comes_between_two_sweeps_is_there(registry: Registry) -> None:
    pod = registry.add_pod("uid", "team", "pod", "auto")
    registry.remove_pod("uid")
    assert registry.add_pod("uid", "team", "pod", "auto") is pod
    registry.sweep()
    assert registry.pods == {"uid": pod}


@pytest.mark.parametrize(
    ("sharing", "names"),
    [
        (Sharing.POD, ["pod/uid-1", "pod/uid-2", "pod/uid-3"]),
        (Sharing.NAMESPACE, ["namespace/a", "namespace/a", "namespace/b"]),
        (Sharing.POOL, ["pool", "pool", "pool"]),
    ],
)
def test_who_shares_is_the_pools_to_say(tmp_path: Path, sharing: Sharing, names: list[str]) -> None:
    registry = open_registry(tmp_path, sharing=sharing)
    pods = [("uid-1", "a"), ("uid-2", "a"), ("uid-3", "b")]
    assert [registry.add_pod(uid, namespace, uid, "auto").tenant.name for uid, namespace in pods] == names
    registry.region.abandon()


def test_no_engine_is_taken_before_the_pages_are_reserved_nor_where_the_pool_does_not_serve(
    registry: Registry,
) -> None:
    region = registry.region
    with pytest.raises(SessionRefused, match="524288 bytes of pages are not reserved"):
        region.check_serving()
    region.reserve_pages()
    region.check_serving()
    for mode, words in ((Mode.PAUSED, "is paused"), (Mode.OBSERVE, "only observes")):
        registry.take_spec(spec_of(**SIZE, mode=mode))
        with pytest.raises(SessionRefused, match=words):
            region.check_serving()
    registry.take_spec(spec_of(**SIZE))
    region.check_serving()


def test_quotas_are_those_of_the_newest_spec(registry: Registry) -> None:
    known = registry.region.account("team")
    quotas = [
        {"namespace": "other", "guaranteedBytes": 1, "limitBytes": 2},
        {"namespace": "team", "guaranteedBytes": 65536, "limitBytes": 131072},
    ]
    before = known.limit_bytes
    assert registry.region.account("team") is known, "of all pods of the namespace"
    registry.take_spec(spec_of(**SIZE, quotas=quotas))
    for account in (known, registry.region.account("other"), registry.region.account("none")):
        expected = {"team": (65536, 131072), "other": (1, 2), "none": (0, before)}[account.namespace]
        assert (account.guaranteed_bytes, account.limit_bytes) == expected
    registry.take_spec(spec_of(**SIZE))
    assert (known.guaranteed_bytes, known.limit_bytes) == (0, before)


def test_nobody_else_may_open_the_region_or_hold_its_locks(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        registry = open_registry(tmp_path, sharing=Sharing.POD)
        tenant = registry.add_pod("uid", "team", "pod", "auto").tenant
    finally:
        os.umask(before)
    folders = (registry.region.folder, tmp_path / "attachments")
    assert [stat.S_IMODE(path.stat().st_mode) for path in folders] == [0o700, 0o700]
    kept = (tenant.file.path, tenant.index.journal.path)
    assert [stat.S_IMODE(path.stat().st_mode) for path in kept] == [0o600, 0o600]
    registry.region.abandon()
