"""Events as kopf hands them to the handlers: whatever their order, the view ends with the newest that was said."""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvoffload.api.keys import DAEMON_OF_LABEL, POOL_LABEL
from kvoffload_operator.handlers import build_registry
from kvoffload_operator.resources.region import build_region, build_region_spec
from kvoffload_operator.view import ClusterView, Dirty, key_of
from operator_builders import node_manifest, pool_manifest, spec_of

Manifest = dict[str, Any]

MANIFESTS: dict[str, Manifest] = {
    "kvoffloadpools": pool_manifest(),
    "kvoffloadregions": build_region("main", "u", build_region_spec("main", "a", spec_of())),
    "nodes": node_manifest("a", labels={"of": "main"}),
    "daemonsets": {
        "metadata": {"name": "kvoffload-main", "uid": "u", "generation": 1, "labels": {DAEMON_OF_LABEL: "main"}}
    },
    "pods": {"metadata": {"name": "server", "namespace": "team", "uid": "u", "labels": {POOL_LABEL: "main"}}},
}
KINDS = pytest.mark.parametrize("kind", MANIFESTS)


class Watch:
    """One watch of a kind: sends its events to the handler that kopf would call."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.view = ClusterView()
        self.view.update_pool(pool_manifest("other"))
        self.dirty: list[Dirty] = []
        registry = build_registry(self.view, self.dirty.append)
        (handler,) = [one for one in registry._watching.get_all_handlers() if one.selector.any_name == kind]
        self._handler: Callable[..., Awaitable[None]] = handler.fn

    def manifest(self, version: int, uid: str = "u") -> Manifest:
        manifest = MANIFESTS[self.kind]
        return {**manifest, "metadata": {**manifest["metadata"], "resourceVersion": str(version), "uid": uid}}

    async def send(self, event: str, manifest: Manifest) -> None:
        metadata = manifest["metadata"]
        namespace = metadata.get("namespace")
        await self._handler(event={"type": event, "object": manifest}, name=metadata["name"], namespace=namespace)

    @property
    def key(self) -> str:
        return key_of(self.kind, MANIFESTS[self.kind])

    @property
    def is_known(self) -> bool:
        return self.key in self.view.keys_of(self.kind)


@KINDS
async def test_what_is_deleted_is_gone_and_no_older_word_of_it_brings_it_back(kind: str) -> None:
    watch = Watch(kind)
    await watch.send("ADDED", watch.manifest(5))
    assert watch.is_known
    await watch.send("DELETED", watch.manifest(9))
    assert not watch.is_known
    dirty = len(watch.dirty)
    await watch.send("MODIFIED", watch.manifest(8))
    assert not watch.is_known
    assert watch.dirty[dirty:] == [Dirty()]
    await watch.send("ADDED", watch.manifest(10, uid="anew"))
    assert watch.is_known


@KINDS
async def test_a_deletion_that_comes_late_takes_nothing_that_was_made_since(kind: str) -> None:
    watch = Watch(kind)
    await watch.send("ADDED", watch.manifest(20))
    await watch.send("DELETED", watch.manifest(15))
    assert watch.is_known
    assert watch.dirty[-1] == Dirty()
    await watch.send("DELETED", watch.manifest(21))
    assert not watch.is_known


async def test_an_older_word_changes_nothing_and_wakes_nobody() -> None:
    watch = Watch("nodes")
    newest, older = watch.manifest(10), watch.manifest(9)
    newest["metadata"]["labels"] = {"of": "other"}
    for manifest in (newest, older):
        await watch.send("MODIFIED", manifest)
    assert watch.view.nodes["a"].labels == {"of": "other"}
    assert watch.dirty == [Dirty(pools=frozenset({"other"})), Dirty()]


async def test_what_cannot_be_read_counts_as_gone_and_is_said(caplog: pytest.LogCaptureFixture) -> None:
    watch = Watch("kvoffloadregions")
    await watch.send("ADDED", watch.manifest(5))
    with caplog.at_level(logging.WARNING):
        await watch.send("MODIFIED", {**watch.manifest(6), "spec": {"capacityBytes": "many"}})
    assert not watch.is_known
    assert watch.dirty[-1] == Dirty(pools=frozenset({"main"})), "it is written anew"
    assert f"kvoffloadregions {watch.key}: " in caplog.text
    await watch.send("MODIFIED", watch.manifest(7))
    assert watch.is_known
