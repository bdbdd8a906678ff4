"""Engines and daemons for the tests with a real vLLM: each engine starts once for all tests that use it."""

import os
from collections.abc import Iterator

import pytest
from engine_process import CHECKSUMS, EngineProcess

from daemon_process import DaemonProcess

CAPACITY_BYTES = 64 << 20
LOW_PRIORITY = 10


@pytest.fixture(scope="module", autouse=True)
def low_priority() -> Iterator[None]:
    """What these tests start gives way: vLLM's ranks wait busily, and beside them `make test` runs the cluster, whose
    tests mostly wait for processes that need little. Only root can take it back, and only root can run the cluster."""
    is_root = os.geteuid() == 0
    if is_root:
        os.setpriority(os.PRIO_PROCESS, 0, LOW_PRIORITY)
    yield
    if is_root:
        os.setpriority(os.PRIO_PROCESS, 0, 0)


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """One node daemon for all engines of the session."""
    folder = tmp_path_factory.mktemp("pool")
    with DaemonProcess(folder, capacity_bytes=CAPACITY_BYTES) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def mla_engine(pool: DaemonProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """The tiny DeepSeek, two ranks."""
    with EngineProcess(
        tmp_path_factory.mktemp("mla"),
        model="tiny-deepseek",
        socket=pool.attach("pod-mla"),
        environment=CHECKSUMS,
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def gqa_engine(pool: DaemonProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """The tiny Llama, two ranks."""
    with EngineProcess(tmp_path_factory.mktemp("gqa"), model="tiny-llama", socket=pool.attach("pod-gqa")) as engine:
        yield engine
