"""The region as one worker maps it. Runs in vLLM's workers; made by `kvoffload_engine.worker_link` from a session's
descriptors.

A mapping outlives its session: after the daemon's restart the same file is mapped once more only if it is another
file. Slots given out in an epoch may be touched only through a mapping that belongs to that epoch.
"""

import contextlib
import mmap
import os

import numpy as np

from kvoffload.errors import RegionUnusable

_MAP_NORESERVE = 0x4000
"""Linux's value; `mmap.MAP_NORESERVE` exists only in newer Pythons. Without it a mapping over holes is ENOMEM."""
_MADV_DONTFORK = 10
_MADV_DONTDUMP = 16


class RegionMapping:
    """A shared mapping of the whole region file from offset 0.

    Pages appear where the daemon has allocated extents; touching a hole is SIGBUS, so only offsets that the daemon
    gave out are touched. An extent that is revoked stays mapped: punching the hole takes its pages out of every
    mapping, and allocating it again puts new ones in; only its registration with a device must go
    (`transfer.pinning`).
    """

    def __init__(self, descriptor: int, num_bytes: int, epoch: int) -> None:
        try:
            status = os.fstat(descriptor)
            self._map = mmap.mmap(
                descriptor, num_bytes, flags=mmap.MAP_SHARED | _MAP_NORESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE
            )
        except (OSError, ValueError) as error:
            raise RegionUnusable(f"mapping the region of {num_bytes} bytes failed: {error}") from error
        for advice in (_MADV_DONTFORK, _MADV_DONTDUMP):
            with contextlib.suppress(OSError):
                self._map.madvise(advice)
        self.num_bytes = num_bytes
        self.file = (status.st_dev, status.st_ino)
        """Device and inode of the region file."""
        self.epochs = {epoch}
        """Epochs of the daemon in which this very file was the region."""
        self.address = int(np.frombuffer(self._map, dtype=np.uint8).ctypes.data)

    def close(self) -> None:
        """Unmap; nothing may be touching it."""
        with contextlib.suppress(BufferError):
            self._map.close()

    def is_of(self, descriptor: int, num_bytes: int) -> bool:
        """Whether this descriptor names the file that is mapped here, in the same length."""
        status = os.fstat(descriptor)
        return (status.st_dev, status.st_ino) == self.file and num_bytes == self.num_bytes
