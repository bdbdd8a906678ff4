"""The order of uses, kept over an orderly stop: which slots were last used when, so that a restarted daemon evicts the
coldest first.

Runs in the node daemon, written when it stops and read once when the next one starts. Not in the journal: a write for
each use would cost the hot path, and after a kill only the order is lost.

    <state>/tenant-<digest>.order     packed int64 pairs (byte offset, tick) of READY slots
"""

import array
from collections.abc import Mapping
from pathlib import Path

from kvoffload_node.index.slots import ReadySlot
from kvoffload_node.whole_file import write_whole

_PAIR_BYTES = 16


def order_path(journal: Path) -> Path:
    """Beside the tenant's journal."""
    return journal.with_suffix(".order")


def write_order(journal: Path, ready: Mapping[int, ReadySlot], tick: int) -> None:
    """Keep the ticks of these slots; one that is leased is used now, at `tick`."""
    packed = array.array("q")
    for offset, slot in ready.items():
        packed.extend((offset, tick if slot.holders else slot.lru.get(offset, tick)))
    write_whole(order_path(journal), packed.tobytes())


def take_order(journal: Path) -> list[tuple[int, int]]:
    """Ticks and offsets, the coldest first, and remove them: what is used from now on makes them old. Empty if there
    are none."""
    path = order_path(journal)
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return []
    path.unlink()
    packed = array.array("q", raw[: len(raw) // _PAIR_BYTES * _PAIR_BYTES])
    return sorted(zip(packed[1::2], packed[::2], strict=True))
