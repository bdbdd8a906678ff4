"""Files on hugetlbfs (or tmpfs, for `fallback: SharedMemory`): one sparse file for each tenant, pages by `fallocate`.

Runs in the node daemon; `extents.py` decides what to allocate, this module does it. Nothing here maps or touches a data
page: a client of the tenant may truncate its file at any time, and then only that client's mapping breaks.

    <mount>/kvoffload-<pool>/             0700
        tenant-<digest>.region            0600, as long as the capacity, holes where no extent is allocated
        (unlinked) the reservation        keeps pages that are not allocated yet from everybody else

The reservation is an unlinked file that was mapped once, whole, without MAP_NORESERVE: the kernel then keeps that
many pages for its inode, also when the mapping is gone, until the file is cut. Pages cannot go from one inode to
another: it is cut by one page just before that page is allocated in a tenant's file, again for each page of an extent
(clearing the 64 MiB of an extent takes 10 to 20 ms). Another program can take what was promised at the start only
between two system calls, and a daemon that is killed meanwhile leaves pages in the tenant's file, which the next finds.
"""

import ctypes
import errno
import mmap
import os
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

from kvoffload.errors import PagesUnavailable, RegionUnusable
from kvoffload_node.host.numa import running_on

RESERVATION = "reservation"
_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_OUT_OF_PAGES = (errno.ENOSPC, errno.ENOMEM)


class NoHugetlbfs(RegionUnusable):
    """Where the pool's pages should come from there is no hugetlbfs."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A folder that is the root of a hugetlbfs or tmpfs mount."""

    path: Path
    page_bytes: int
    is_hugetlbfs: bool


def read_mount(path: Path, mounts_file: Path = Path("/proc/self/mountinfo")) -> Mount:
    """What is mounted at `path`. Raises NoHugetlbfs where that is neither hugetlbfs nor tmpfs."""
    wanted = str(path.resolve())
    kind = ""
    for line in mounts_file.read_text().splitlines():
        fields, _, tail = line.partition(" - ")
        if fields.split()[4].replace("\\040", " ") == wanted:
            kind = tail.split()[0]
    if kind not in ("hugetlbfs", "tmpfs"):
        raise NoHugetlbfs(
            f"{path} is {kind or 'no mount point of its own'}, needed is a hugetlbfs mount; mount one on the node and "
            "delete this daemon's pod, which sees only what was mounted before it; or set hugetlbfsMount: Managed in "
            "the pool"
        )
    return Mount(path=path, page_bytes=os.statvfs(path).f_bsize, is_hugetlbfs=kind == "hugetlbfs")


class RegionFile:
    """One tenant's file. `allocate` and `punch` block for as long as the kernel clears pages: call them in a thread."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        """Open or create the file and make it `num_bytes` long; a new file is all holes."""
        self.path = path
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if os.fstat(self.descriptor).st_size < num_bytes:
                os.ftruncate(self.descriptor, num_bytes)
        except OSError as error:
            os.close(self.descriptor)
            raise RegionUnusable(f"{path} cannot be made {num_bytes} bytes long: {error}") from error

    @property
    def inode(self) -> int:
        """The file's inode number: another one is another file, whatever its name."""
        return os.fstat(self.descriptor).st_ino

    @property
    def allocated_bytes(self) -> int:
        """Bytes of pages the file holds, as the kernel counts them."""
        return os.fstat(self.descriptor).st_blocks * 512

    def allocate(self, offset: int, num_bytes: int, cpus: Set[int] = frozenset()) -> None:
        """Give the range pages, all or none, from the NUMA node of these CPUs if any are given.

        A file that a client has cut is lengthened. Raises PagesUnavailable; what was got is given back before.
        """
        with running_on(cpus):
            if _libc.fallocate(self.descriptor, 0, offset, num_bytes) == 0:
                return
            code = ctypes.get_errno()
        self.punch(offset, num_bytes)
        if code in _OUT_OF_PAGES:
            raise PagesUnavailable(f"{num_bytes} bytes of pages for {self.path.name}: {os.strerror(code)}")
        raise RegionUnusable(f"fallocate of {num_bytes} bytes in {self.path} failed: {os.strerror(code)}")

    def punch(self, offset: int, num_bytes: int) -> None:
        """Give the range's pages back. Whoever maps them sees zeros or SIGBUS next, so revoke first."""
        if _libc.fallocate(self.descriptor, _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE, offset, num_bytes):
            code = ctypes.get_errno()
            raise RegionUnusable(f"punching {num_bytes} bytes out of {self.path} failed: {os.strerror(code)}")

    def close(self) -> None:
        """Close the descriptor; the file and its pages stay."""
        os.close(self.descriptor)

    def unlink(self) -> None:
        """Remove the name; pages go when the last client's mapping is gone."""
        self.path.unlink(missing_ok=True)


class Reservation:
    """Pages kept for us that no extent holds yet. On tmpfs nothing can be kept: there it only counts."""

    def __init__(self, folder: Path, *, is_hugetlbfs: bool) -> None:
        self._is_hugetlbfs = is_hugetlbfs
        self.num_bytes = 0
        path = folder / RESERVATION
        for left in folder.glob(f"{RESERVATION}*"):  # of a daemon that was killed right here: only one runs in a folder
            left.unlink(missing_ok=True)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._page_bytes = os.fstatvfs(self._descriptor).f_bsize
        try:
            path.unlink(missing_ok=True)
        except OSError:
            os.close(self._descriptor)
            raise

    def hand_over(self, file: RegionFile, offset: int, num_bytes: int, cpus: Set[int] = frozenset()) -> None:
        """Allocate a range of `file`, all or none, from what is kept as far as that goes.

        Blocks like `RegionFile.allocate`, and raises what it raises; then these pages are not kept any more.
        """
        if not self._is_hugetlbfs:
            file.allocate(offset, num_bytes, cpus)
            self.num_bytes = max(0, self.num_bytes - num_bytes)
            return
        try:
            with running_on(cpus):
                for page in range(offset, offset + num_bytes, self._page_bytes):
                    self.resize(max(0, self.num_bytes - self._page_bytes))
                    file.allocate(page, self._page_bytes)
        except (PagesUnavailable, RegionUnusable, OSError):
            file.punch(offset, num_bytes)
            raise

    def resize(self, num_bytes: int) -> None:
        """Keep exactly `num_bytes`. Raises PagesUnavailable if there are not so many; then what was kept stays."""
        if num_bytes < self.num_bytes or not self._is_hugetlbfs:
            if self._is_hugetlbfs:
                os.ftruncate(self._descriptor, num_bytes)
            self.num_bytes = num_bytes
            return
        if num_bytes == self.num_bytes:
            return
        os.ftruncate(self._descriptor, num_bytes)
        try:
            mmap.mmap(self._descriptor, num_bytes - self.num_bytes, offset=self.num_bytes).close()
        except OSError as error:
            os.ftruncate(self._descriptor, self.num_bytes)
            if error.errno not in _OUT_OF_PAGES:
                raise RegionUnusable(f"reserving {num_bytes} bytes failed: {error}") from error
            raise PagesUnavailable(
                f"{num_bytes - self.num_bytes} bytes of pages to reserve: {os.strerror(error.errno)}"
            ) from error
        self.num_bytes = num_bytes

    def close(self) -> None:
        """Give everything back."""
        os.close(self._descriptor)
