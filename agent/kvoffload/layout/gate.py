"""The gate: may one copy of a chunk serve every rank, is each rank's part its own, or does this engine get no
offload at all?

Pure, standard library only. Each vLLM worker calls `decide_layout` with what it sees of its real layers and sends
the answer in its `Hello`; the daemon makes the row of the engine from the answers, so ranks that disagree end with
one part each. The operator's webhook uses the same `LayoutReason`s for its prediction.

    facts -> NO_OFFLOAD   executor or topology that we cannot serve
          -> PER_RANK     first failed condition of replication; each rank keeps its part
          -> SHARED_HEADS grouped-query heads that several ranks hold, certified by vLLM's own page mapping
          -> REPLICATED   every rank holds the same bytes

Beside vLLM's own gate, for its CPU offload (`kv_connector/v1/offloading/config.py`):

    0.28 to 0.30   an MLA model; one KV cache group, whose spec is exactly MLAAttentionSpec; bytes of a block above 0,
                   and one page of that spec for each layer; TP above 1; PP, PCP, DCP of 1; as many ranks as TP;
                   executor mp; one node
    since 0.31     in place of group and pages, its count of ranks with equal KV; in its canonical layout each layer
                   exactly MLA and its page mapped: no scales for each head, one token a state, whole rows of tokens

Ours asks for all of them but:

    one group      a key belongs to one group, and a part has places for each group's pages; every layer is looked at
    page x layers  vLLM cuts its rows by one page length. Our part is made from each layer's own page (`layout.pages`),
                   so pages may differ; a packed block (all layers' pages in one) is copied whole, and is the same on
                   all ranks if each of its layers is. Of such a block vLLM gives no mapping, and none is needed: it
                   says how to cut a page, which we never do
    its own spec   only vLLM's CUDA and XPU specs have host memory that ranks share; a region always is

It asks for more where vLLM's count takes a layer that is not exactly MLA, or keeps compressed state.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from kvoffload.layout.rows import HEAD_PART_PREFIX, REPLICATED_PART

REPLICATED_SPEC_CLASSES = frozenset({"MLAAttentionSpec"})
"""Exact names of vLLM's per-layer specs whose pages are the same on every tensor-parallel rank. Subclasses are not:
a sliding window or a compressed state changes what a page holds."""

HEAD_SHARDED_SPEC_CLASSES = frozenset({"FullAttentionSpec", "SlidingWindowSpec"})
"""Exact names of specs whose pages hold KV heads, which ranks share when there are fewer heads than ranks."""

SUPPORTED_EXECUTORS = frozenset({"mp", "uni"})
"""Executor backends whose workers are processes of one pod on one node."""


class LayoutDecision(str, Enum):
    """What the gate decided."""

    REPLICATED = "replicated"
    SHARED_HEADS = "shared-heads"
    PER_RANK = "per-rank"
    NO_OFFLOAD = "no-offload"


class LayoutReason(str, Enum):
    """Why; a closed set, used as the reason in reports, events and the prediction."""

    REPLICATED = "Replicated"
    # no offload
    EXECUTOR_UNSUPPORTED = "ExecutorUnsupported"
    MULTI_NODE = "MultiNode"
    NO_KV_BYTES = "NoKVBytes"
    SEVERAL_GROUPS = "SeveralGroups"
    # per rank
    ONE_RANK = "OneRank"
    FORBIDDEN = "ReplicationForbidden"
    PIPELINE_PARALLEL = "PipelineParallel"
    PREFILL_CONTEXT_PARALLEL = "PrefillContextParallel"
    DECODE_CONTEXT_PARALLEL = "DecodeContextParallel"
    WORLD_SIZE = "WorldSizeIsNotTensorParallelSize"
    NOT_MLA = "NotMLA"
    LAYER_NOT_REPLICATED = "LayerNotReplicated"
    COMPRESSED_STATE = "CompressedState"
    REPLICAS_MISMATCH = "ReplicasMismatch"
    NOT_CERTIFIED = "NotCertified"
    UNKNOWN_MODEL = "UnknownModel"
    """Only in a prediction: the architecture is not in the table, so the engine decides."""
    # shared heads
    SHARED_HEADS = "SharedHeads"


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """One attention layer as its worker sees it.

    `num_writers` and `writer_index` come from vLLM's page mapping: how many ranks hold these very bytes and which of
    them this rank is. None where this vLLM has no mapping or does not certify the layer.
    """

    name: str
    spec_class: str
    page_bytes: int
    tokens_per_state: int = 1
    num_writers: int | None = None
    writer_index: int | None = None


@dataclass(frozen=True, slots=True)
class GateFacts:
    """What the gate looks at: this rank's layers and the engine's parallel configuration."""

    rank: int
    layers: tuple[LayerFacts, ...]
    use_mla: bool
    tensor_parallel_size: int
    pipeline_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    world_size: int = 1
    num_nodes: int = 1
    executor: str = "mp"
    kv_tp_replicas: int | None = None
    """Ranks that hold the same KV by vLLM's own count (0.31 and newer), None where it does not say."""
    num_groups: int = 1
    """KV cache groups of the engine: layers whose blocks vLLM hands out together."""
    reports_failed_receives: bool = True
    """Whether this vLLM lets a connector name the requests whose load failed (0.30 and newer)."""
    replication_allowed: bool = True
    """False: the pool says `replicatedLayout: Never`, or the webhook vetoed it."""


@dataclass(frozen=True, slots=True)
class LayoutVerdict:
    """The gate's answer for one rank. `part` names the bytes that this rank holds (`kvoffload.layout.rows`)."""

    decision: LayoutDecision
    reason: LayoutReason
    message: str
    part: str


@dataclass(frozen=True, slots=True)
class Violation:
    """A failed condition: found, needed, and what it means."""

    reason: LayoutReason
    message: str


Check = Callable[[GateFacts], Violation | None]


def executor_is_unsupported(facts: GateFacts) -> Violation | None:
    """Ray and external launchers run a scheduler or workers outside this pod's reach."""
    if facts.executor in SUPPORTED_EXECUTORS:
        return None
    needed = " or ".join(sorted(SUPPORTED_EXECUTORS))
    return Violation(
        LayoutReason.EXECUTOR_UNSUPPORTED,
        f"executor is {facts.executor!r}, needed {needed}: start vLLM with --distributed-executor-backend mp",
    )


def spans_several_nodes(facts: GateFacts) -> Violation | None:
    """A node's region serves ranks of that node only."""
    if facts.num_nodes == 1:
        return None
    return Violation(
        LayoutReason.MULTI_NODE, f"the engine spans {facts.num_nodes} nodes, needed 1: a region belongs to one node"
    )


def has_no_kv_bytes(facts: GateFacts) -> Violation | None:
    """Nothing to offload, or a layer whose size we would get wrong."""
    empty = [layer.name for layer in facts.layers if layer.page_bytes <= 0]
    if facts.layers and not empty:
        return None
    found = f"layer {empty[0]} has pages of 0 bytes" if empty else "this rank has no KV cache layer"
    return Violation(LayoutReason.NO_KV_BYTES, f"{found}, needed at least 1 byte a block")


def failed_load_ends_the_engine(facts: GateFacts) -> Violation | None:
    """Before 0.30 failed loads are invalid block ids, which vLLM's scheduler takes of one cache group only: with more
    it raises, and its engine core ends."""
    if facts.reports_failed_receives or facts.num_groups == 1:
        return None
    return Violation(
        LayoutReason.SEVERAL_GROUPS,
        f"the model has {facts.num_groups} KV cache groups, needed 1: a failed load would end the engine; use vLLM "
        "0.30 or newer",
    )


def is_one_rank(facts: GateFacts) -> Violation | None:
    """One rank holds one copy anyway."""
    if facts.world_size > 1:
        return None
    return Violation(LayoutReason.ONE_RANK, "world size is 1: there is one copy anyway")


def replication_is_forbidden(facts: GateFacts) -> Violation | None:
    """The pool's owner or the webhook said no."""
    if facts.replication_allowed:
        return None
    return Violation(
        LayoutReason.FORBIDDEN,
        "replicated rows are switched off (pool's replicatedLayout: Never, or the webhook's veto)",
    )


def splits_the_model(facts: GateFacts) -> Violation | None:
    """Stages and context shards hold different layers or tokens."""
    for found, reason, name in (
        (facts.pipeline_parallel_size, LayoutReason.PIPELINE_PARALLEL, "pipeline"),
        (facts.prefill_context_parallel_size, LayoutReason.PREFILL_CONTEXT_PARALLEL, "prefill-context"),
        (facts.decode_context_parallel_size, LayoutReason.DECODE_CONTEXT_PARALLEL, "decode-context"),
    ):
        if found != 1:
            return Violation(reason, f"{name} parallel size is {found}, needed 1: ranks hold different bytes")
    return None


def world_is_not_tensor_parallel(facts: GateFacts) -> Violation | None:
    """Some other axis, which we do not know, divides the ranks."""
    if facts.world_size == facts.tensor_parallel_size:
        return None
    return Violation(
        LayoutReason.WORLD_SIZE,
        f"world size is {facts.world_size}, tensor parallel size {facts.tensor_parallel_size}: needed equal",
    )


def model_is_not_mla(facts: GateFacts) -> Violation | None:
    """Heads are divided over the ranks."""
    if facts.use_mla:
        return None
    return Violation(
        LayoutReason.NOT_MLA, "the model does not use multi-head latent attention: KV heads are divided over the ranks"
    )


def layer_is_not_replicated(facts: GateFacts) -> Violation | None:
    """One layer of another kind is enough: a draft model's attention, a sliding window, a state-space layer."""
    for layer in facts.layers:
        if layer.spec_class not in REPLICATED_SPEC_CLASSES:
            others = sum(one.spec_class not in REPLICATED_SPEC_CLASSES for one in facts.layers)
            return Violation(
                LayoutReason.LAYER_NOT_REPLICATED,
                f"layer {layer.name} is a {layer.spec_class} ({others} of {len(facts.layers)} layers), needed "
                f"{' or '.join(sorted(REPLICATED_SPEC_CLASSES))}",
            )
    return None


def state_is_compressed(facts: GateFacts) -> Violation | None:
    """Several tokens in one state: vLLM does not certify such pages either."""
    for layer in facts.layers:
        if layer.tokens_per_state != 1:
            return Violation(
                LayoutReason.COMPRESSED_STATE,
                f"layer {layer.name} keeps {layer.tokens_per_state} tokens a state, needed 1",
            )
    return None


def replicas_do_not_match(facts: GateFacts) -> Violation | None:
    """VLLM's own count of equal ranks says otherwise."""
    if facts.kv_tp_replicas in (None, facts.tensor_parallel_size):
        return None
    return Violation(
        LayoutReason.REPLICAS_MISMATCH,
        f"vLLM counts {facts.kv_tp_replicas} ranks with equal KV, needed {facts.tensor_parallel_size}",
    )


def mapping_says_otherwise(facts: GateFacts) -> Violation | None:
    """Where vLLM maps a layer's page, the mapping must name every rank as its writer."""
    for layer in facts.layers:
        if layer.num_writers not in (None, facts.tensor_parallel_size):
            return Violation(
                LayoutReason.NOT_CERTIFIED,
                f"vLLM's page mapping of layer {layer.name} names {layer.num_writers} writers, "
                f"needed {facts.tensor_parallel_size}",
            )
    return None


NO_OFFLOAD_CHECKS: tuple[Check, ...] = (
    executor_is_unsupported,
    spans_several_nodes,
    has_no_kv_bytes,
    failed_load_ends_the_engine,
)
PER_RANK_CHECKS: tuple[Check, ...] = (
    is_one_rank,
    replication_is_forbidden,
    splits_the_model,
    world_is_not_tensor_parallel,
)
"""Conditions of every kind of sharing."""
REPLICATION_CHECKS: tuple[Check, ...] = (
    model_is_not_mla,
    layer_is_not_replicated,
    state_is_compressed,
    replicas_do_not_match,
    mapping_says_otherwise,
)


def first_violation(facts: GateFacts, checks: tuple[Check, ...]) -> Violation | None:
    """Run the checks in order and return the first that fails."""
    for check in checks:
        violation = check(facts)
        if violation is not None:
            return violation
    return None


def certified_head_shard(facts: GateFacts) -> int | None:
    """Which distinct heads this rank holds, where vLLM certifies that several ranks hold them; None otherwise.

    Every layer must be head-sharded, certified, and agree on how many ranks share.
    """
    writers = {(layer.num_writers, layer.writer_index) for layer in facts.layers}
    if len(writers) != 1 or any(layer.spec_class not in HEAD_SHARDED_SPEC_CLASSES for layer in facts.layers):
        return None
    num_writers, writer_index = writers.pop()
    if num_writers is None or writer_index is None or not 1 < num_writers <= facts.world_size:
        return None
    if facts.world_size % num_writers or facts.rank % num_writers != writer_index:
        return None
    return facts.rank // num_writers


def decide_layout(facts: GateFacts) -> LayoutVerdict:
    """Decide for one rank; all ranks of an engine see the same facts but for their own rank and writer index."""
    own_part = f"rank-{facts.rank}"
    refused = first_violation(facts, NO_OFFLOAD_CHECKS)
    if refused is not None:
        return LayoutVerdict(LayoutDecision.NO_OFFLOAD, refused.reason, refused.message, own_part)
    alone = first_violation(facts, PER_RANK_CHECKS)
    if alone is not None:
        return LayoutVerdict(LayoutDecision.PER_RANK, alone.reason, alone.message, own_part)
    different = first_violation(facts, REPLICATION_CHECKS)
    if different is None:
        num = facts.tensor_parallel_size
        message = f"all {len(facts.layers)} layers hold the same bytes on {num} ranks: 1 copy instead of {num}"
        return LayoutVerdict(LayoutDecision.REPLICATED, LayoutReason.REPLICATED, message, REPLICATED_PART)
    shard = certified_head_shard(facts)
    if shard is not None:
        sharing = facts.layers[0].num_writers
        message = f"vLLM certifies that {sharing} ranks hold the same heads: 1 copy instead of {sharing}"
        return LayoutVerdict(
            LayoutDecision.SHARED_HEADS, LayoutReason.SHARED_HEADS, message, f"{HEAD_PART_PREFIX}{shard}"
        )
    return LayoutVerdict(LayoutDecision.PER_RANK, different.reason, different.message, own_part)
