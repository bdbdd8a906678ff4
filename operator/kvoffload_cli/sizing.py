"""What a pool holds of a model: the arithmetic behind `kubectl kvoffload plan` and the tables of docs/sizing.md.

Pure. It asks the same gate and the same row arithmetic as the engine and the node daemon, so that what it says and what
they do cannot drift apart.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from kvoffload.api.pool import PageSize
from kvoffload.errors import InvalidSpec
from kvoffload.layout.extents import MAX_EXTENT_BYTES, WANTED_EXTENTS, plan_extent_bytes
from kvoffload.layout.gate import (
    GateFacts,
    LayerFacts,
    LayoutDecision,
    LayoutReason,
    LayoutVerdict,
    decide_layout,
)
from kvoffload.layout.model_bytes import KVBytes, ModelShape, plan_kv_bytes
from kvoffload.layout.rows import MAX_RANKS, RankPart, Row, plan_row
from kvoffload.units import MAX_BYTES, exact_quantity, format_bytes, parse_quantity, round_bytes

GIB = 1 << 30
PAGE_BYTES = {size.value: size.num_bytes for size in PageSize}

KEPT_SHARE = 4
MIN_KEPT_BYTES = 16 * GIB
"""Memory left to the node without --capacity: a quarter, and never below 16 GiB (vLLM's own processes, page cache)."""


@dataclass(frozen=True, slots=True)
class Engine:
    """The engine to plan for, as vLLM's arguments give it."""

    shape: ModelShape
    tensor_parallel: int
    pipeline_parallel: int = 1
    num_nodes: int = 1
    block_tokens: int = 16
    blocks_per_chunk: int = 1
    kv_dtype: str = "auto"
    replication_allowed: bool = True


@dataclass(frozen=True, slots=True)
class QuotaPlan:
    """What one namespace's quota means in tokens of this model."""

    namespace: str
    guaranteed_bytes: int
    limit_bytes: int
    guaranteed_tokens: int
    limit_tokens: int


@dataclass(frozen=True, slots=True)
class SizingPlan:
    """What the pool holds of the engine's model, on each node."""

    engine: Engine
    kv: KVBytes
    verdict: LayoutVerdict
    row: Row
    plain_row: Row
    page_name: str
    capacity_bytes: int
    num_pages: int
    num_extents: int
    slots_per_extent: int
    quotas: tuple[QuotaPlan, ...]

    @property
    def notes(self) -> tuple[str, ...]:
        """What the figures leave out, or take for granted."""
        shape, num_ranks = self.engine.shape, self.engine.tensor_parallel
        larger, smaller = max(shape.num_kv_heads, num_ranks), min(shape.num_kv_heads, num_ranks)
        if shape.is_mla or larger % max(1, smaller) == 0:
            return shape.notes
        uneven = f"{shape.num_kv_heads} KV heads and --tp {num_ranks} do not divide: most models of vLLM refuse that"
        return (*shape.notes, uneven)

    @property
    def num_slots(self) -> int:
        """Chunks that fit."""
        return self.num_extents * self.slots_per_extent

    @property
    def plain_num_slots(self) -> int:
        """Chunks that one plain buffer of the same bytes holds, with one part for each rank (vLLM's own layout)."""
        return self.capacity_bytes // self.plain_row.slot_bytes

    @property
    def chunk_tokens(self) -> int:
        """Tokens in one chunk."""
        return self.engine.block_tokens * self.engine.blocks_per_chunk

    @property
    def num_blocks(self) -> int:
        """GPU blocks that fit."""
        return self.num_slots * self.engine.blocks_per_chunk

    @property
    def num_tokens(self) -> int:
        """Tokens that fit."""
        return self.num_slots * self.chunk_tokens

    @property
    def plain_num_tokens(self) -> int:
        """Tokens that the plain layout holds in the same bytes."""
        return self.plain_num_slots * self.chunk_tokens

    @property
    def saved_bytes_per_token(self) -> int:
        """Bytes per token that sharing saves."""
        return (self.plain_row.slot_bytes - self.row.slot_bytes) // self.chunk_tokens

    @property
    def waste_bytes(self) -> int:
        """Bytes of the pool that no slot covers."""
        return self.capacity_bytes - self.num_slots * self.row.slot_bytes


def default_capacity(node_memory: str, page_name: str) -> int:
    """The pool's capacity on a node of so much memory: what is left after the node's share, in whole pages."""
    number, page_bytes = exact_quantity(node_memory), PAGE_BYTES[page_name]
    if number < MIN_KEPT_BYTES + page_bytes:
        raise InvalidSpec(
            f"--node-memory {node_memory} leaves a pool nothing after {format_bytes(MIN_KEPT_BYTES)} for vLLM and the "
            f"system: the least is {format_bytes(MIN_KEPT_BYTES + page_bytes)}; give --capacity to set it yourself"
        )
    node_memory_bytes = parse_quantity(node_memory)
    kept = max(MIN_KEPT_BYTES, node_memory_bytes // KEPT_SHARE)
    return (node_memory_bytes - kept) // page_bytes * page_bytes


def parse_capacity(text: str, page_name: str) -> int:
    """Bytes of a pool's capacity as it was written.

    Raises:
        InvalidSpec: no quantity, or no positive multiple of the page size: with the nearest that are.
    """
    number = exact_quantity(text)
    require_whole_pages(number, page_name, written=text)
    return int(number)


def require_whole_pages(number: Fraction, page_name: str, *, written: str) -> None:
    """Raises InvalidSpec with the nearest that are, where it is no positive multiple of the page size within int64."""
    pages, most = number / PAGE_BYTES[page_name], MAX_BYTES // PAGE_BYTES[page_name]
    if pages.denominator == 1 and 1 <= pages <= most:
        return
    around = sorted({min(max(one, 1), most) for one in (math.floor(pages), math.ceil(pages))})
    named = " and ".join(format_bytes(one * PAGE_BYTES[page_name]) for one in around)
    verb = "is" if len(around) == 1 else "are"
    raise InvalidSpec(f"capacity {written} is no positive multiple of {page_name} pages; the nearest {verb} {named}")


def plan_sizing(
    engine: Engine, *, capacity_bytes: int, page_name: str, quotas: Sequence[tuple[str, int, int | None]] = ()
) -> SizingPlan:
    """Plan the pool for one engine.

    Raises:
        InvalidSpec: capacity no multiple of the page, a slot beyond an extent, a quota beyond the capacity, or sizes
            that no engine has.
    """
    num_ranks = engine.tensor_parallel * engine.pipeline_parallel
    if num_ranks > MAX_RANKS:
        raise InvalidSpec(
            f"--tp {engine.tensor_parallel} and --pp {engine.pipeline_parallel} make {num_ranks} ranks; the node "
            f"daemon takes at most {MAX_RANKS} of an engine"
        )
    page_bytes = PAGE_BYTES[page_name]
    require_whole_pages(Fraction(capacity_bytes), page_name, written=format_bytes(capacity_bytes))
    heads = engine.shape.num_attention_heads
    if heads % engine.tensor_parallel:
        raise InvalidSpec(
            f"--tp {engine.tensor_parallel} does not divide the model's {heads} attention heads: vLLM would not start"
        )
    kv = plan_kv_bytes(
        engine.shape,
        tensor_parallel=engine.tensor_parallel,
        pipeline_parallel=engine.pipeline_parallel,
        block_tokens=engine.block_tokens,
        kv_dtype=engine.kv_dtype,
    )
    verdicts = decide_ranks(engine, kv)
    part_bytes = kv.bytes_per_block * engine.blocks_per_chunk
    parts = [RankPart(part=verdict.part, num_bytes=part_bytes) for verdict in verdicts]
    row, plain_row = plan_row(parts), plan_row(parts, sharing_allowed=False)
    extent_bytes = plan_extent_bytes(capacity_bytes, page_bytes)
    if row.slot_bytes > extent_bytes:
        raise InvalidSpec(
            f"one chunk needs {round_bytes(row.slot_bytes)} ({row.slot_bytes:,} bytes), more than an extent of "
            f"{format_bytes(extent_bytes)}, into which a pool of {format_bytes(capacity_bytes)} is cut; use "
            f"{_room_for_chunk(row.slot_bytes, capacity_bytes, page_bytes)}"
        )
    num_extents, slots_per_extent = capacity_bytes // extent_bytes, extent_bytes // row.slot_bytes
    chunk = _Chunk(
        num_tokens=engine.block_tokens * engine.blocks_per_chunk,
        num_bytes=row.slot_bytes,
        num_that_fit=num_extents * slots_per_extent,
    )
    return SizingPlan(
        engine=engine,
        kv=kv,
        verdict=verdicts[0],
        row=row,
        plain_row=plain_row,
        page_name=page_name,
        capacity_bytes=capacity_bytes,
        num_pages=capacity_bytes // page_bytes,
        num_extents=num_extents,
        slots_per_extent=slots_per_extent,
        quotas=tuple(_plan_quota(quota, capacity_bytes=capacity_bytes, chunk=chunk) for quota in quotas),
    )


def _room_for_chunk(slot_bytes: int, capacity_bytes: int, page_bytes: int) -> str:
    """What makes the extents long enough: more capacity, as far as that goes, or other pages, or a smaller chunk."""
    wanted = page_bytes
    while wanted < min(slot_bytes, MAX_EXTENT_BYTES):
        wanted *= 2
    if wanted >= slot_bytes:
        return f"--capacity {format_bytes(max(WANTED_EXTENTS, -(-capacity_bytes // wanted)) * wanted)}"
    pages = "--page-size 1Gi, " if slot_bytes <= PageSize.GI_1.num_bytes else ""
    return f"{pages}a smaller --block-size or fewer --blocks-per-chunk"


def decide_ranks(engine: Engine, kv: KVBytes) -> list[LayoutVerdict]:
    """The gate's answer for every rank, from what a configuration tells of the layers."""
    shape, num_ranks = engine.shape, engine.tensor_parallel
    sharing = 1
    if not shape.is_mla and num_ranks > shape.num_kv_heads and num_ranks % shape.num_kv_heads == 0:
        sharing = num_ranks // shape.num_kv_heads
    spec_class = "MLAAttentionSpec" if shape.is_mla else "FullAttentionSpec"
    verdicts = []
    for rank in range(num_ranks * engine.pipeline_parallel):
        layer = LayerFacts(
            name="every layer",
            spec_class=spec_class,
            page_bytes=kv.bytes_per_token_layer * engine.block_tokens,
            num_writers=sharing if sharing > 1 else None,
            writer_index=rank % sharing if sharing > 1 else None,
        )
        facts = GateFacts(
            rank=rank,
            layers=(layer,) * kv.layers_per_stage,
            use_mla=shape.is_mla,
            tensor_parallel_size=num_ranks,
            pipeline_parallel_size=engine.pipeline_parallel,
            world_size=num_ranks * engine.pipeline_parallel,
            num_nodes=engine.num_nodes,
            replication_allowed=engine.replication_allowed,
        )
        verdicts.append(decide_layout(facts))
    if verdicts[0].decision is LayoutDecision.NO_OFFLOAD:
        raise InvalidSpec(f"no offload ({verdicts[0].reason.value}): {verdicts[0].message}")
    return verdicts


def is_conditional(verdict: LayoutVerdict) -> bool:
    """Whether the layout stands only where vLLM certifies it when the engine starts."""
    return verdict.reason is LayoutReason.SHARED_HEADS


def parse_quota(text: str) -> tuple[str, int, int | None]:
    """`NAMESPACE=GUARANTEED[:LIMIT]` as (namespace, guaranteed bytes, limit bytes or None)."""
    namespace, found, amounts = text.partition("=")
    guaranteed, has_limit, limit = amounts.partition(":")
    if not found or not namespace or not guaranteed or (has_limit and not limit):
        raise InvalidSpec(f"quota {text!r} is not NAMESPACE=GUARANTEED[:LIMIT], such as team-a=64Gi:128Gi")
    return namespace, parse_quantity(guaranteed), parse_quantity(limit) if has_limit else None


@dataclass(frozen=True, slots=True)
class _Chunk:
    num_tokens: int
    num_bytes: int
    num_that_fit: int

    def tokens_in(self, num_bytes: int) -> int:
        return min(num_bytes // self.num_bytes, self.num_that_fit) * self.num_tokens


def _plan_quota(quota: tuple[str, int, int | None], *, capacity_bytes: int, chunk: _Chunk) -> QuotaPlan:
    namespace, guaranteed, limit = quota
    if limit is None:
        limit = capacity_bytes
    if not guaranteed <= limit <= capacity_bytes:
        raise InvalidSpec(
            f"quota of {namespace}: guaranteed {format_bytes(guaranteed)}, limit {format_bytes(limit)}, capacity "
            f"{format_bytes(capacity_bytes)}; needed guaranteed <= limit <= capacity"
        )
    return QuotaPlan(
        namespace=namespace,
        guaranteed_bytes=guaranteed,
        limit_bytes=limit,
        guaranteed_tokens=chunk.tokens_in(guaranteed),
        limit_tokens=chunk.tokens_in(limit),
    )
