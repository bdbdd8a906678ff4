"""Overwrite a pool's pages with zeros behind everybody's back: the control of every test that compares outputs."""

import mmap
from io import FileIO

from hack.cluster.machine import HUGETLBFS
from hack.cluster.settings import HUGEPAGE_BYTES


def zero_region_pages(pool: str) -> int:
    """Zero every page of the pool's region files that holds anything; returns how many those were."""
    num_zeroed = 0
    for path in (HUGETLBFS / f"kvoffload-{pool}").glob("*.region"):
        with path.open("r+b", buffering=0) as file:
            num_pages = path.stat().st_size // HUGEPAGE_BYTES
            # read() gives zeros for holes; a mapping would allocate them
            written = [page for page in range(num_pages) if any(_read_page(file, page))]
            for page in written:
                with mmap.mmap(file.fileno(), HUGEPAGE_BYTES, offset=page * HUGEPAGE_BYTES) as mapped:
                    mapped[:] = bytes(HUGEPAGE_BYTES)
            num_zeroed += len(written)
    return num_zeroed


def _read_page(file: FileIO, page: int) -> bytes:
    file.seek(page * HUGEPAGE_BYTES)
    return file.read(HUGEPAGE_BYTES).strip(b"\0")
