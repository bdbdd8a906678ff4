"""A daemon of a small pool on /dev/shm that is not started, for tests that call its parts."""

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvoffload.api.pool import Fallback, Sharing
from kvoffload.api.region import KVOffloadRegionSpec
from kvoffload_node.daemon import Daemon
from kvoffload_node.settings import NodeSettings

MOUNT = Path("/dev/shm")


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    pool = f"test-{uuid.uuid4().hex[:12]}"
    daemon = Daemon(
        NodeSettings(pool=pool, node_name="n", state=tmp_path, hugepages=MOUNT, handoff=tmp_path, metrics_port=0)
    )
    daemon.source.spec = KVOffloadRegionSpec(
        pool_name=pool,
        node_name="n",
        capacity_bytes=16 << 20,
        page_size_bytes=2 << 20,
        fallback=Fallback.SHARED_MEMORY,
        sharing=Sharing.POOL,
    )
    yield daemon
    shutil.rmtree(MOUNT / f"kvoffload-{pool}", ignore_errors=True)
