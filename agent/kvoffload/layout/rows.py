"""The row: where each rank's bytes of one chunk stand in its slot.

Pure. The node daemon calls `plan_row` once all ranks of an engine have said what they hold; the engine gets the
answer (`EngineReady`) and copies by it.

    replicated       part "all" on every rank        |  all ranks at offset 0  |
    per rank         parts "rank-0", "rank-1"        |  rank 0  |  rank 1  |
    certified heads  "head-0" twice, "head-1" twice  |  ranks 0, 1  |  ranks 2, 3  |

Ranks share only if they are unanimous: "all" of every rank, or a head of every rank and as many ranks to each. One
rank that says otherwise has seen something that the others have not, and every rank then gets a part of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT_BYTES = 64
"""Slots and parts begin on a cache line, so that no two ranks ever write one line."""

MAX_RANKS = 64
"""Of one engine, all on one node: a registration says one, and a row lists a part of each."""
REPLICATED_PART = "all"
HEAD_PART_PREFIX = "head-"


@dataclass(frozen=True)
class RankPart:
    """What one rank says of itself: the name of the part it holds, and that part's bytes for one chunk."""

    part: str
    num_bytes: int


@dataclass(frozen=True)
class Row:
    """Layout of one slot. The three tuples have one entry a rank.

    `sharers[r]` ranks write rank r's part together, and r is number `sharer_index[r]` of them: it copies every
    `sharers[r]`-th page of the part, beginning with that number.
    """

    slot_bytes: int
    part_offsets: tuple[int, ...]
    part_bytes: tuple[int, ...]
    sharers: tuple[int, ...]
    sharer_index: tuple[int, ...]

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds the same bytes, of more than one rank."""
        return len(self.sharers) > 1 and self.sharers[0] == len(self.sharers)

    @property
    def plain_bytes(self) -> int:
        """Bytes of the same chunk with one part for each rank (what a plain offload keeps)."""
        return sum(align_up(num_bytes) for num_bytes in self.part_bytes)


def align_up(num_bytes: int, alignment: int = ALIGNMENT_BYTES) -> int:
    """Round `num_bytes` up to a multiple of `alignment`."""
    return -(-num_bytes // alignment) * alignment


def is_unanimous(ranks: Sequence[RankPart]) -> bool:
    """Whether every rank holds what all hold, or every rank holds a head and each head has as many ranks.

    A name that means several lengths is no agreement either.
    """
    names = [rank.part for rank in ranks]
    lengths = {(rank.part, rank.num_bytes) for rank in ranks}
    one_kind = set(names) == {REPLICATED_PART} or all(name.startswith(HEAD_PART_PREFIX) for name in names)
    return one_kind and len(lengths) == len(set(names)) and len({names.count(name) for name in names}) == 1


def plan_row(ranks: Sequence[RankPart], *, sharing_allowed: bool = True) -> Row:
    """Place each distinct part once, in order of the first rank that holds it.

    Where the ranks are not unanimous (see the module), where sharing is not allowed, and where ranks that name one
    part differ in its length, so that they cannot hold the same bytes, every rank gets a part of its own.
    """
    shared = sharing_allowed and is_unanimous(ranks)
    names = [rank.part if shared else f"rank-{number}" for number, rank in enumerate(ranks)]
    offsets: dict[str, int] = {}
    end = 0
    for name, rank in zip(names, ranks, strict=True):
        if name not in offsets:
            offsets[name] = end
            end += align_up(rank.num_bytes)
    return Row(
        slot_bytes=end,
        part_offsets=tuple(offsets[name] for name in names),
        part_bytes=tuple(rank.num_bytes for rank in ranks),
        sharers=tuple(names.count(name) for name in names),
        sharer_index=tuple(names[:number].count(name) for number, name in enumerate(names)),
    )
