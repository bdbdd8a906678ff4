"""The gate's decision table: cases 1 and 5, and every condition of upstream's first and present replicated layout."""

import dataclasses

import pytest

from kvoffload.layout.gate import GateFacts, LayerFacts, LayoutDecision, LayoutReason, decide_layout
from kvoffload.layout.rows import RankPart, plan_row

MLA = LayerFacts("model.layers.0.attn", "MLAAttentionSpec", 18432)
FULL = LayerFacts("draft.layers.0.attn", "FullAttentionSpec", 65536)


def facts(ranks: int = 8, **changes: object) -> GateFacts:
    plain = GateFacts(
        rank=0, layers=(MLA, MLA), use_mla=True, tensor_parallel_size=ranks, world_size=ranks, kv_tp_replicas=ranks
    )
    return dataclasses.replace(plain, **changes)


def shared_heads(rank: int, ranks: int = 4, sharing: int = 2) -> GateFacts:
    layer = dataclasses.replace(FULL, num_writers=sharing, writer_index=rank % sharing)
    return facts(ranks, rank=rank, layers=(layer, layer), use_mla=False, kv_tp_replicas=1)


TABLE = [
    # case 1
    ("MLA on 8 ranks", facts(8), LayoutDecision.REPLICATED, LayoutReason.REPLICATED),
    ("MLA on 2 ranks", facts(2), LayoutDecision.REPLICATED, LayoutReason.REPLICATED),
    ("one rank", facts(1), LayoutDecision.PER_RANK, LayoutReason.ONE_RANK),
    (
        "MLA with one full-attention draft layer",
        facts(8, layers=(MLA, MLA, FULL)),
        LayoutDecision.PER_RANK,
        LayoutReason.LAYER_NOT_REPLICATED,
    ),
    (
        "MLA with sliding-window MLA",
        facts(8, layers=(MLA, dataclasses.replace(MLA, spec_class="SlidingWindowMLASpec"))),
        LayoutDecision.PER_RANK,
        LayoutReason.LAYER_NOT_REPLICATED,
    ),
    (
        "MLA with Mamba",
        facts(8, layers=(MLA, dataclasses.replace(MLA, spec_class="MambaSpec"))),
        LayoutDecision.PER_RANK,
        LayoutReason.LAYER_NOT_REPLICATED,
    ),
    (
        "MLA on two pipeline stages",
        facts(4, pipeline_parallel_size=2, world_size=8),
        LayoutDecision.PER_RANK,
        LayoutReason.PIPELINE_PARALLEL,
    ),
    (
        "MLA with prefill-context parallelism",
        facts(4, prefill_context_parallel_size=2, world_size=8),
        LayoutDecision.PER_RANK,
        LayoutReason.PREFILL_CONTEXT_PARALLEL,
    ),
    (
        "MLA with decode-context parallelism",
        facts(8, decode_context_parallel_size=2),
        LayoutDecision.PER_RANK,
        LayoutReason.DECODE_CONTEXT_PARALLEL,
    ),
    (
        "grouped-query with fewer heads than ranks, not certified",
        facts(8, layers=(FULL, FULL), use_mla=False, kv_tp_replicas=1),
        LayoutDecision.PER_RANK,
        LayoutReason.NOT_MLA,
    ),
    (
        "grouped-query with fewer heads than ranks, certified",
        shared_heads(rank=3),
        LayoutDecision.SHARED_HEADS,
        LayoutReason.SHARED_HEADS,
    ),
    (
        "an unknown spec class",
        facts(8, layers=(MLA, dataclasses.replace(MLA, spec_class="SpecOfTomorrow"))),
        LayoutDecision.PER_RANK,
        LayoutReason.LAYER_NOT_REPLICATED,
    ),
    ("executor ray", facts(8, executor="ray"), LayoutDecision.NO_OFFLOAD, LayoutReason.EXECUTOR_UNSUPPORTED),
    (
        "executor external_launcher",
        facts(8, executor="external_launcher"),
        LayoutDecision.NO_OFFLOAD,
        LayoutReason.EXECUTOR_UNSUPPORTED,
    ),
    # case 5
    ("two nodes", facts(8, num_nodes=2), LayoutDecision.NO_OFFLOAD, LayoutReason.MULTI_NODE),
    # upstream's conditions; the gate's docstring says why some of the first version are none of ours
    (
        "pages of several lengths, in one group or in two, all exactly MLA",
        facts(8, layers=(MLA, dataclasses.replace(MLA, name="model.layers.0.indexer", page_bytes=4224))),
        LayoutDecision.REPLICATED,
        LayoutReason.REPLICATED,
    ),
    (
        "a packed block, of which vLLM maps no page",
        facts(8, layers=(dataclasses.replace(MLA, num_writers=None, writer_index=None),) * 2),
        LayoutDecision.REPLICATED,
        LayoutReason.REPLICATED,
    ),
    (
        "a packed block with one layer that is not MLA",
        facts(8, layers=(MLA, dataclasses.replace(FULL, num_writers=None))),
        LayoutDecision.PER_RANK,
        LayoutReason.LAYER_NOT_REPLICATED,
    ),
    (
        "a subclass of the MLA spec",
        facts(8, layers=(MLA, dataclasses.replace(MLA, spec_class="HiddenStateCacheSpec"))),
        LayoutDecision.PER_RANK,
        LayoutReason.LAYER_NOT_REPLICATED,
    ),
    ("executor uni", facts(1, executor="uni"), LayoutDecision.PER_RANK, LayoutReason.ONE_RANK),
    ("world larger than tensor parallel", facts(4, world_size=8), LayoutDecision.PER_RANK, LayoutReason.WORLD_SIZE),
    (
        "vLLM counts other replicas",
        facts(8, kv_tp_replicas=4),
        LayoutDecision.PER_RANK,
        LayoutReason.REPLICAS_MISMATCH,
    ),
    ("vLLM before 0.31 counts none", facts(8, kv_tp_replicas=None), LayoutDecision.REPLICATED, LayoutReason.REPLICATED),
    ("no layer at all", facts(8, layers=()), LayoutDecision.NO_OFFLOAD, LayoutReason.NO_KV_BYTES),
    (
        "a layer without bytes",
        facts(8, layers=(MLA, dataclasses.replace(MLA, page_bytes=0))),
        LayoutDecision.NO_OFFLOAD,
        LayoutReason.NO_KV_BYTES,
    ),
    # ours
    (
        "two groups where a failed load ends the engine",
        facts(8, num_groups=2, reports_failed_receives=False),
        LayoutDecision.NO_OFFLOAD,
        LayoutReason.SEVERAL_GROUPS,
    ),
    (
        "one group there",
        facts(8, reports_failed_receives=False),
        LayoutDecision.REPLICATED,
        LayoutReason.REPLICATED,
    ),
    ("two groups elsewhere", facts(8, num_groups=2), LayoutDecision.REPLICATED, LayoutReason.REPLICATED),
    ("the pool says Never", facts(8, replication_allowed=False), LayoutDecision.PER_RANK, LayoutReason.FORBIDDEN),
    (
        "several tokens in one state",
        facts(8, layers=(MLA, dataclasses.replace(MLA, tokens_per_state=4))),
        LayoutDecision.PER_RANK,
        LayoutReason.COMPRESSED_STATE,
    ),
    (
        "vLLM's mapping names one writer",
        facts(8, layers=(MLA, dataclasses.replace(MLA, num_writers=1))),
        LayoutDecision.PER_RANK,
        LayoutReason.NOT_CERTIFIED,
    ),
    (
        "vLLM's mapping names every rank",
        facts(8, layers=(dataclasses.replace(MLA, num_writers=8, writer_index=0),)),
        LayoutDecision.REPLICATED,
        LayoutReason.REPLICATED,
    ),
]


@pytest.mark.parametrize(("given", "decision", "reason"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_decision_table(given: GateFacts, decision: LayoutDecision, reason: LayoutReason) -> None:
    verdict = decide_layout(given)
    assert (verdict.decision, verdict.reason) == (decision, reason)
    assert verdict.message


def test_the_message_says_what_was_found_and_how_much() -> None:
    message = decide_layout(facts(8, layers=(MLA, MLA, FULL))).message
    assert "draft.layers.0.attn" in message
    assert "1 of 3 layers" in message


def test_every_layer_counts_not_only_the_first() -> None:
    assert decide_layout(facts(8, layers=(MLA,) * 60 + (FULL,))).decision is LayoutDecision.PER_RANK


def test_ranks_on_other_devices_get_their_own_parts() -> None:
    # case 2: whatever devices the ranks run on, the part's name comes from the rank
    parts = [decide_layout(facts(2, rank=rank, use_mla=False, layers=(FULL,))).part for rank in range(2)]
    assert parts == ["rank-0", "rank-1"]


def test_certified_heads_give_one_part_for_each_distinct_head() -> None:
    verdicts = [decide_layout(shared_heads(rank)) for rank in range(4)]
    assert [one.part for one in verdicts] == ["head-0", "head-0", "head-1", "head-1"]
    row = plan_row([RankPart(one.part, 1024) for one in verdicts])
    assert (row.slot_bytes, row.part_offsets) == (2048, (0, 0, 1024, 1024))


@pytest.mark.parametrize(
    "layers",
    [
        (dataclasses.replace(FULL, num_writers=2, writer_index=0), FULL),
        (dataclasses.replace(FULL, num_writers=2, writer_index=1),),
        (dataclasses.replace(FULL, spec_class="MambaSpec", num_writers=2, writer_index=0),),
        (dataclasses.replace(FULL, num_writers=3, writer_index=0),),
    ],
    ids=["one layer uncertified", "writer index of another rank", "not an attention layer", "ranks do not divide"],
)
def test_heads_that_are_not_certified_in_every_layer_stay_per_rank(layers: tuple[LayerFacts, ...]) -> None:
    verdict = decide_layout(facts(4, layers=layers, use_mla=False, kv_tp_replicas=1))
    assert (verdict.decision, verdict.part) == (LayoutDecision.PER_RANK, "rank-0")
