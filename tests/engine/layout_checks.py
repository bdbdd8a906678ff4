"""Which layout real configurations of vLLM get (cases 1 to 5), and that it is stored and loaded by;
`configured_engine.py` has the way from the layers' specs. Run by `check_runner.py`.

Each row also says what vLLM's own gate says of the same configuration for its CPU offload: `first` in 0.28 to 0.30,
`now` since then. Where ours says more or less, `kvoffload.layout.gate` has the reason.
"""

import os
import time
from typing import Any

import torch
from check_runner import check, run_checks
from configured_engine import (
    BLOCK_OUTERMOST,
    BLOCK_TOKENS,
    GROUPED_QUERY_MODEL,
    ConfiguredEngine,
    Specs,
    allocate,
    configure,
    connect,
    grouped_query,
    latent,
    observe,
    plan_kv_caches,
)
from toy_engine import ToyEngine, keys_of, wait_until
from vllm.v1 import kv_cache_interface
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.kv_cache_interface import KVQuantMode, MambaSpec, MLAAttentionSpec, SlidingWindowMLASpec

from kvoffload.layout.gate import LayoutReason
from kvoffload_engine import compat
from kvoffload_engine.facts import observe_worker

MLA = {"layers.0": latent(), "layers.1": latent()}
WITH_DRAFT = {**MLA, "draft.0": grouped_query()}
HAS_LAYOUTS = "layer_stride" in kv_cache_interface.KVCacheTensor.__dataclass_fields__
"""Since 0.29 a model's pages can stand block by block (`BLOCK_OUTERMOST`)."""


def expect(
    reason: LayoutReason, specs: Specs, *, part: str = "rank-0", first: bool = False, now: bool = False, **options: Any
) -> None:
    """The first rank's verdict on these layers, beside vLLM's own. Where vLLM ends at a failed load of several groups
    (0.28, 0.29) these get no offload."""
    config = configure(**options)
    stages = config.parallel_config.pipeline_parallel_size
    kv_cache_config = plan_kv_caches(config, [specs] * stages)[0]
    verdict = observe(config, kv_cache_config).verdict
    if len(kv_cache_config.kv_cache_groups) > 1 and not compat.reports_failed_receives():
        reason, part = LayoutReason.SEVERAL_GROUPS, "rank-0"
    assert (verdict.reason, verdict.part) == (reason, part), verdict
    theirs = connect(config, kv_cache_config).connector_worker.spec.config.replicated_layout
    assert theirs == (now if hasattr(kv_cache_config, "kv_tp_replicas") else first), theirs


@check
def latent_attention_is_replicated(socket_path: str) -> None:
    expect(LayoutReason.REPLICATED, MLA, part="all", first=True, now=True)
    expect(LayoutReason.REPLICATED, MLA, part="all", first=True, now=True, tensor_parallel_size=8)


@check
def latent_attention_on_one_rank_has_nothing_to_share(socket_path: str) -> None:
    expect(LayoutReason.ONE_RANK, MLA, tensor_parallel_size=1)


@check
def latent_attention_of_each_data_parallel_engine_is_replicated(socket_path: str) -> None:
    expect(LayoutReason.REPLICATED, MLA, part="all", first=True, now=True, data_parallel_size=2)


@check
def pages_of_several_lengths_in_one_group_are_replicated(socket_path: str) -> None:
    """As DeepSeek-V3.2 has them: the latent, and the indexer's keys. vLLM's first gate knew one length only."""
    specs = {**MLA, "indexer.0": latent(head_size=132, dtype=torch.uint8)}
    expect(LayoutReason.REPLICATED, specs, part="all", now=True)


@check
def two_groups_of_latent_attention_are_replicated(socket_path: str) -> None:
    """vLLM's first gate knew one group only."""
    narrow = latent(block_size=2 * BLOCK_TOKENS, head_size=32)
    specs = {**MLA, "narrow.0": narrow, "narrow.1": narrow}
    config = configure()
    assert len(plan_kv_caches(config, [specs])[0].kv_cache_groups) == 2
    expect(LayoutReason.REPLICATED, specs, part="all", now=True)


@check
def a_group_that_is_not_offloaded_is_left_out(socket_path: str) -> None:
    """Since 0.31: a ring buffer of each request, of which no prefix is cached."""
    if not hasattr(kv_cache_interface.KVCacheConfig, "kv_tp_replicas"):
        return
    ring = kv_cache_interface.CircularBufferSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=32, dtype=torch.float32
    )
    specs = {**MLA, "ring.0": ring, "ring.1": ring}
    expect(LayoutReason.REPLICAS_MISMATCH, specs)
    with ConfiguredEngine(socket_path, [specs, specs]) as engine:
        assert len(engine.caches[0]) == 2
        store_and_load(engine, 10_060, (1, 1))


@check
def blocks_of_which_all_layers_are_one_page_are_stored_once(socket_path: str) -> None:
    if not HAS_LAYOUTS:
        return
    config = configure(layout=BLOCK_OUTERMOST)
    kv_cache_config = plan_kv_caches(config, [MLA])[0]
    assert [len(group.page_bytes) for group in observe(config, kv_cache_config).layout.groups] == [1]
    expect(LayoutReason.REPLICATED, MLA, part="all", first=True, now=True, layout=BLOCK_OUTERMOST)
    with ConfiguredEngine(socket_path, [MLA, MLA], layout=BLOCK_OUTERMOST) as engine:
        store_and_load(engine, 10_070, (2, 2))
    expect(LayoutReason.LAYER_NOT_REPLICATED, WITH_DRAFT, layout=BLOCK_OUTERMOST)
    with ConfiguredEngine(socket_path, [WITH_DRAFT, WITH_DRAFT], layout=BLOCK_OUTERMOST) as engine:
        store_and_load(engine, 10_080, (1, 1))


class BlockOutermostBackend:
    """What vLLM 0.28 asks an attention backend before it keeps all layers of a block together."""

    @staticmethod
    def get_kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        return (num_blocks, block_size, head_size)

    @staticmethod
    def get_kv_cache_stride_order(*, include_num_layers_dimension: bool) -> tuple[int, ...]:
        return (1, 0, 2, 3)


@check
def layers_in_one_tensor_of_blocks_are_replicated(socket_path: str) -> None:
    """0.28 has a call of its own for it."""
    if HAS_LAYOUTS:
        return
    config = configure()
    kv_cache_config = plan_kv_caches(config, [MLA])[0]
    connector, seen = connect(config, kv_cache_config), []
    connector.connector_worker.spec.build_worker = lambda kv_caches: seen.append(
        observe_worker(config, kv_cache_config, kv_caches)
    )
    block_bytes = sum(spec.page_size_bytes for spec in MLA.values())
    blocks = torch.zeros(kv_cache_config.num_blocks * block_bytes, dtype=torch.int8)
    connector.register_cross_layers_kv_cache(blocks, BlockOutermostBackend)
    assert not connector._inert_because, connector._inert_because
    assert (seen[0].verdict.reason, seen[0].verdict.part) == (LayoutReason.REPLICATED, "all")
    assert [group.page_bytes for group in seen[0].layout.groups] == [(block_bytes,)]
    assert seen[0].tensors.num_blocks == kv_cache_config.num_blocks


@check
def a_grouped_query_draft_layer_in_the_group_of_latent_layers_makes_it_per_rank(socket_path: str) -> None:
    """The scheduler sees one spec for the group, and that is an MLA layer's."""
    config = configure()
    kv_cache_config = plan_kv_caches(config, [WITH_DRAFT])[0]
    assert len(kv_cache_config.kv_cache_groups) == 1
    seen_by_scheduler = generate_scheduler_kv_cache_config([kv_cache_config]).kv_cache_groups[0].kv_cache_spec
    assert type(seen_by_scheduler) is MLAAttentionSpec
    expect(LayoutReason.LAYER_NOT_REPLICATED, WITH_DRAFT)


@check
def a_latent_layer_with_a_sliding_window_makes_it_per_rank(socket_path: str) -> None:
    sliding = SlidingWindowMLASpec(
        block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=64, dtype=torch.float32, sliding_window=64
    )
    expect(LayoutReason.LAYER_NOT_REPLICATED, {**MLA, "sliding.0": sliding, "sliding.1": sliding})


@check
def a_state_space_layer_makes_it_per_rank(socket_path: str) -> None:
    mamba = MambaSpec(block_size=BLOCK_TOKENS, shapes=((8, 32),), dtypes=(torch.float32,))
    expect(LayoutReason.LAYER_NOT_REPLICATED, {**MLA, "mamba.0": mamba, "mamba.1": mamba})


@check
def compressed_state_makes_it_per_rank(socket_path: str) -> None:
    field = "compress_ratio" if "compress_ratio" in MLAAttentionSpec.__dataclass_fields__ else "tokens_per_state"
    specs = {name: latent(**{field: 4}) for name in MLA}
    expect(LayoutReason.COMPRESSED_STATE, specs, first=True, now=True)


@check
def scales_beside_the_latent_that_vllm_does_not_map_make_it_per_rank(socket_path: str) -> None:
    scaled = next(mode for mode in KVQuantMode if mode.is_per_token_head)
    specs = {name: latent(kv_quant_mode=scaled) for name in MLA}
    expect(LayoutReason.NOT_CERTIFIED, specs, first=True, now=True)


@check
def pipeline_stages_are_per_rank(socket_path: str) -> None:
    expect(LayoutReason.PIPELINE_PARALLEL, MLA, pipeline_parallel_size=2)


@check
def prefill_context_parallelism_is_per_rank(socket_path: str) -> None:
    expect(LayoutReason.PREFILL_CONTEXT_PARALLEL, MLA, prefill_context_parallel_size=2)


@check
def decode_context_parallelism_is_per_rank(socket_path: str) -> None:
    expect(LayoutReason.DECODE_CONTEXT_PARALLEL, MLA, decode_context_parallel_size=2)


@check
def grouped_query_heads_divided_over_the_ranks_are_per_rank(socket_path: str) -> None:
    expect(LayoutReason.NOT_MLA, {"layers.0": grouped_query()}, model=GROUPED_QUERY_MODEL)


@check
def fewer_heads_than_ranks_that_vllm_does_not_certify_are_per_rank(socket_path: str) -> None:
    """Two heads of the model on each of four ranks: not what dividing two heads by four gives."""
    specs = {"layers.0": grouped_query(num_kv_heads=2)}
    expect(LayoutReason.NOT_MLA, specs, model=GROUPED_QUERY_MODEL, tensor_parallel_size=4)


@check
def fewer_heads_than_ranks_that_vllm_certifies_are_shared(socket_path: str) -> None:
    specs = {"layers.0": grouped_query()}
    for rank, part in enumerate(("head-0", "head-0", "head-1", "head-1")):
        options = {"model": GROUPED_QUERY_MODEL, "tensor_parallel_size": 4, "rank": rank}
        expect(LayoutReason.SHARED_HEADS, specs, part=part, **options)


def inert_because(**parallel: Any) -> str:
    """Why the connector stays out of it."""
    config = configure(**parallel)
    kv_cache_config = plan_kv_caches(config, [MLA])[0]
    connector = connect(config, kv_cache_config)
    connector.register_kv_caches(allocate(config, kv_cache_config))
    told = connector.get_handshake_metadata()
    assert told.digest == b""
    return told.inert_reason


@check
def two_nodes_run_without_offload(socket_path: str) -> None:
    assert LayoutReason.MULTI_NODE.value in inert_because(nnodes=2)


@check
def executors_of_other_places_run_without_offload(socket_path: str) -> None:
    """Ray's name is put in afterwards: ParallelConfig imports Ray, which is not installed here."""
    assert LayoutReason.EXECUTOR_UNSUPPORTED.value in inert_because(distributed_executor_backend="external_launcher")
    config = configure()
    config.parallel_config.distributed_executor_backend = "ray"
    verdict = observe(config, plan_kv_caches(config, [MLA])[0]).verdict
    assert verdict.reason is LayoutReason.EXECUTOR_UNSUPPORTED


@check
def parts_come_from_the_rank_and_not_from_the_device(socket_path: str) -> None:
    """Case 2: both ranks' devices by number, others, and one visible device in each process."""
    specs = {"layers.0": grouped_query()}
    for devices in (("0,2", "0,2"), ("5,6", "5,6"), ("0", "1"), ("3", "3")):
        parts = []
        for rank, visible in enumerate(devices):
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
            os.environ["LOCAL_RANK"] = "0" if "," not in visible else str(rank)
            config = configure(rank, model=GROUPED_QUERY_MODEL)
            parts.append(observe(config, plan_kv_caches(config, [specs])[0]).verdict.part)
        assert parts == ["rank-0", "rank-1"], (devices, parts)
    del os.environ["CUDA_VISIBLE_DEVICES"], os.environ["LOCAL_RANK"]


def store_and_load(engine: ToyEngine, number: int, copies_of_part: tuple[int, ...]) -> None:
    """Each layer of each rank gets bytes that name its part; stored from blocks 1 and 2, they are loaded to 5 and 6.

    `copies_of_part` says how many ranks share each rank's part.
    """
    assert engine.manager.link.row.sharers == copies_of_part
    offsets = engine.manager.link.row.part_offsets
    keys = keys_of(number, number + 1)

    def value(rank: int, layer: int, block: int) -> int:
        return 1 + 24 * sorted(set(offsets)).index(offsets[rank]) + 8 * block + layer

    for rank, tensors in enumerate(engine.caches):
        for layer, tensor in enumerate(tensors):
            for block in (1, 2):
                tensor[block] = value(rank, layer, block)
    missing = dict(zip(keys, (1, 2), strict=True))

    def is_stored() -> bool:  # in as many steps as it takes until there are slots
        for key in engine.store(f"store-{time.monotonic_ns()}", list(missing), list(missing.values())):
            del missing[key]
        return not missing

    wait_until(is_stored)
    wait_until(lambda: engine.is_hit(keys))
    assert engine.load(f"load-{number}", keys, [5, 6]) == {}
    for rank, tensors in enumerate(engine.caches):
        for layer, tensor in enumerate(tensors):
            assert bool((tensor[5] == value(rank, layer, 1)).all() and (tensor[6] == value(rank, layer, 2)).all())


@check
def latent_attention_is_stored_once_and_loaded_by_both_ranks(socket_path: str) -> None:
    with ConfiguredEngine(socket_path, [MLA, MLA]) as engine:
        store_and_load(engine, 10_000, (2, 2))
        assert engine.manager.link.row.slot_bytes == 2 * MLA["layers.0"].page_size_bytes


@check
def with_a_draft_layer_each_rank_stores_and_loads_its_own_bytes(socket_path: str) -> None:
    with ConfiguredEngine(socket_path, [WITH_DRAFT, WITH_DRAFT]) as engine:
        store_and_load(engine, 10_010, (1, 1))


@check
def pipeline_stages_of_several_lengths_store_and_load_their_own_layers(socket_path: str) -> None:
    """Case 3, too: as many blocks on both, and parts of two lengths in one slot."""
    stages = [MLA, {"layers.2": latent()}]
    with ConfiguredEngine(socket_path, stages, tensor_parallel_size=1, pipeline_parallel_size=2) as engine:
        assert {tensor.shape[0] for tensors in engine.caches for tensor in tensors} == {engine.caches[0][0].shape[0]}
        store_and_load(engine, 10_020, (1, 1))


@check
def stages_with_other_layers_are_another_namespace(socket_path: str) -> None:
    stages = [MLA, {"layers.2": latent()}]
    renamed = [MLA, {"layers.3": latent()}]
    options = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}
    keys = keys_of(10_030)
    with ConfiguredEngine(socket_path, stages, **options) as engine:
        engine.ensure_stored(keys)
        with ConfiguredEngine(socket_path, stages, **options) as same:
            wait_until(lambda: same.is_hit(keys))
        with ConfiguredEngine(socket_path, renamed, **options) as other:
            other.ensure_stored(keys_of(10_031))
            assert not other.is_hit(keys)


@check
def heads_that_two_ranks_hold_are_stored_once_each(socket_path: str) -> None:
    specs = {"layers.0": grouped_query(), "layers.1": grouped_query()}
    options = {"model": GROUPED_QUERY_MODEL, "tensor_parallel_size": 4}
    with ConfiguredEngine(socket_path, [specs] * 4, **options) as engine:
        store_and_load(engine, 10_040, (2, 2, 2, 2))
        assert engine.manager.link.row.slot_bytes == 2 * 2 * specs["layers.0"].page_size_bytes


@check
def one_rank_of_four_that_says_otherwise_gives_every_rank_its_own_part(socket_path: str) -> None:
    with ToyEngine(socket_path, parts=("all", "all", "all", "rank-3"), identity=b"u" * 32) as engine:
        store_and_load(engine, 10_050, (1, 1, 1, 1))


if __name__ == "__main__":
    run_checks(with_control=False)
