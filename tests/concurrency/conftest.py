"""Pages and folders of the tests of a whole daemon; a module that needs others defines its own."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon_process import hugetlb_mount
from small_pool import CAPACITY_BYTES


@pytest.fixture(scope="module")
def mount() -> Iterator[Path]:
    with hugetlb_mount(CAPACITY_BYTES, limit=True) as path:
        yield path


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="kvo-dmn-"))
    yield path
    shutil.rmtree(path)
