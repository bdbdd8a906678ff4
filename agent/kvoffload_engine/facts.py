"""What one worker sees of its engine: real layers, pages and parallel configuration, as frozen facts.

Runs in vLLM's workers; called once by `kvoffload_engine.connector` when vLLM registers the KV caches.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import CanonicalKVCaches

from kvoffload.layout.fingerprint import Fingerprint
from kvoffload.layout.gate import GateFacts, LayerFacts, LayoutVerdict, decide_layout
from kvoffload.layout.pages import PartLayout, build_part_layout
from kvoffload_engine import compat
from kvoffload_engine.environment import CHECKSUM_VARIABLE, is_replication_allowed
from kvoffload_engine.identity import collect_identity
from kvoffload_engine.log import logger
from kvoffload_engine.transfer.backend import Transfer
from kvoffload_engine.transfer.checksums import MODES
from kvoffload_engine.transfer.host import HostTransfer
from kvoffload_engine.transfer.plan import DeviceTensors


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """All that `KVOffloadWorker` needs."""

    rank: int
    verdict: LayoutVerdict
    layout: PartLayout
    tensors: DeviceTensors
    identity: Fingerprint
    checksums: str
    build_transfer: Callable[[], Transfer]


def observe_worker(vllm_config: Any, kv_cache_config: Any, kv_caches: CanonicalKVCaches) -> WorkerFacts:
    """Collect the facts of this worker."""
    parallel = vllm_config.parallel_config
    groups = compat.offloaded_groups(kv_cache_config)
    specs = layer_specs(groups)
    layers = observe_layers(groups, kv_caches, specs)
    checksums = checksum_mode(os.environ)
    page_table = [[(ref.tensor_idx, int(ref.page_size_bytes)) for ref in group] for group in kv_caches.group_data_refs]
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    blocks_per_chunk = int(extra.get("blocks_per_chunk", 1))
    layout = build_part_layout(page_table, blocks_per_chunk=blocks_per_chunk, has_checksums=checksums != "off")
    verdict = decide_layout(
        GateFacts(
            rank=parallel.rank,
            layers=tuple(layers),
            use_mla=bool(vllm_config.model_config.use_mla),
            tensor_parallel_size=parallel.tensor_parallel_size,
            pipeline_parallel_size=parallel.pipeline_parallel_size,
            prefill_context_parallel_size=parallel.prefill_context_parallel_size,
            decode_context_parallel_size=parallel.decode_context_parallel_size,
            world_size=parallel.world_size,
            num_nodes=compat.num_nodes(parallel),
            executor=compat.executor_name(parallel),
            kv_tp_replicas=compat.kv_tp_replicas(kv_cache_config),
            num_groups=len(kv_cache_config.kv_cache_groups),
            reports_failed_receives=compat.reports_failed_receives(),
            replication_allowed=is_replication_allowed(os.environ),
        )
    )
    identity = collect_identity(
        vllm_version_minor=compat.require_supported_version(compat.installed_version()),
        vllm_config=vllm_config,
        layers=layers,
        specs=[spec_values(specs[layer.name]) for layer in layers],
        groups=[(group.kv_cache_spec.block_size, group.layer_names) for group in groups],
        page_table=page_table,
        blocks_per_chunk=blocks_per_chunk,
        tokens_per_hash=compat.tokens_per_hash(vllm_config.cache_config),
        page_layouts=compat.page_layouts(vllm_config),
        attention_backends=compat.attention_backends(vllm_config),
        has_checksums=layout.has_checksums,
    )
    device = kv_caches.tensors[0].tensor.device.type
    return WorkerFacts(
        parallel.rank, verdict, layout, observe_tensors(kv_caches), identity, checksums, transfer_builder(device)
    )


def checksum_mode(environment: Mapping[str, str]) -> str:
    """What the user asks for; anything unknown is `full`, because whoever set it wanted pages to be checked."""
    mode = environment.get(CHECKSUM_VARIABLE, "off") or "off"
    if mode in MODES:
        return mode
    logger.warning("kvoffload: %s is %r, needed %s: full is used", CHECKSUM_VARIABLE, mode, ", ".join(MODES))
    return "full"


def layer_specs(groups: Sequence[Any]) -> dict[str, Any]:
    """Each layer's own spec: a uniform group holds one for each layer, other groups one for all."""
    specs: dict[str, Any] = {}
    for group in groups:
        per_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None) or {}
        for name in group.layer_names:
            specs[name] = per_layer.get(name, group.kv_cache_spec)
    return specs


def spec_values(spec: Any) -> dict[str, str]:
    """All that vLLM says of a layer's pages: sizes, dtypes, heads, windows. Numbers, enums and dtypes, so their text is
    the same in every process."""
    return {one.name: str(getattr(spec, one.name)) for one in dataclasses.fields(spec)}


def observe_layers(groups: Sequence[Any], kv_caches: CanonicalKVCaches, specs: dict[str, Any]) -> list[LayerFacts]:
    """One entry a layer, in the order of the groups that vLLM offloads and of their layers; the mapping is there where
    each layer has its own page."""
    layers: list[LayerFacts] = []
    for group, refs in zip(groups, kv_caches.group_data_refs, strict=True):
        names = list(group.layer_names)
        mappings = [ref.mapping for ref in refs] if len(refs) == len(names) else [None] * len(names)
        for name, mapping in zip(names, mappings, strict=True):
            spec = specs[name]
            layers.append(
                LayerFacts(
                    name=name,
                    spec_class=type(spec).__name__,
                    page_bytes=int(spec.page_size_bytes),
                    tokens_per_state=compat.tokens_per_state(spec),
                    num_writers=mapping.num_writers if mapping is not None else None,
                    writer_index=mapping.writer_index if mapping is not None else None,
                )
            )
    return layers


def observe_tensors(kv_caches: CanonicalKVCaches) -> DeviceTensors:
    """Addresses and strides of the KV cache tensors, each (num_blocks, bytes of a block)."""
    tensors = [one.tensor for one in kv_caches.tensors]
    return DeviceTensors(
        base_addresses=np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64),
        block_strides=np.array([tensor.stride(0) * tensor.element_size() for tensor in tensors], dtype=np.int64),
        num_blocks=min(tensor.shape[0] for tensor in tensors),
    )


def transfer_builder(device: str) -> Callable[[], Transfer]:
    """The backend for KV caches on this kind of device."""
    if device == "cpu":
        return HostTransfer
    from kvoffload_engine.transfer.cuda import DeviceTransfer

    return DeviceTransfer
