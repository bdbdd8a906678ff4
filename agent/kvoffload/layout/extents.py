"""How long an extent is: the unit in which a pool's pages are allocated, moved between tenants and given back.

Pure. The node daemon cuts its region by it, and `kubectl kvoffload plan` counts with it: a slot never lies across two
extents, so their length decides how many bytes stay empty.
"""

MAX_EXTENT_BYTES = 64 << 20
WANTED_EXTENTS = 8
"""A pool has at least so many extents, if its pages are not too large for that: else nothing could move."""


def plan_extent_bytes(capacity_bytes: int, page_bytes: int) -> int:
    """The extent's length: one large page, or 64 MiB; less where capacity is small or would leave a remainder."""
    extent_bytes = max(page_bytes, MAX_EXTENT_BYTES)
    while extent_bytes > page_bytes and (
        capacity_bytes // extent_bytes < WANTED_EXTENTS or capacity_bytes % extent_bytes > capacity_bytes // 100
    ):
        extent_bytes = max(page_bytes, extent_bytes // 2)
    return extent_bytes
