"""Workers as vLLM's own connector makes them for a real configuration, without a model, on CPU tensors.

No pytest here: it runs under the Python of a vLLM environment. Only the layers' specs are ours; the way from there is
vLLM's:

    specs -> get_kv_cache_configs -> allocate_kv_cache -> OffloadingConnector.register_kv_caches -> observe_worker
"""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from toy_engine import ToyEngine
from vllm.config import KVTransferConfig, ParallelConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.engine import core
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, MambaSpec, MLAAttentionSpec
from vllm.v1.worker import utils as worker_utils

from kvoffload_engine.budget import DEFAULT_STEP_SECONDS
from kvoffload_engine.connector import KVOffloadConnector
from kvoffload_engine.environment import DEADLINE_VARIABLE
from kvoffload_engine.facts import WorkerFacts, layer_specs, observe_worker
from kvoffload_engine.plugin import CONNECTOR, CONNECTOR_MODULE, SPEC, SPEC_MODULE

CONFIGURATIONS = Path(__file__).resolve().parents[2] / "hack" / "vllm" / "configurations"
LATENT_MODEL, GROUPED_QUERY_MODEL = "tiny-deepseek", "tiny-llama"
BLOCK_TOKENS = 16
KV_BYTES = 1 << 20
LAYER_OUTERMOST, BLOCK_OUTERMOST = "LBHNC", "BLHNC"
"""Names of vLLM's layouts: pages of a layer together; or of a block, of which all layers are one page then."""

Specs = Mapping[str, Any]


def latent(**changes: Any) -> MLAAttentionSpec:
    """An MLA layer as vLLM's attention classes describe it, 4096 bytes a block."""
    fields = {"block_size": BLOCK_TOKENS, "num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}
    if "max_tp_shards" in MLAAttentionSpec.__dataclass_fields__:
        fields["max_tp_shards"] = 1
    return MLAAttentionSpec(**{**fields, **changes})


def grouped_query(**changes: Any) -> FullAttentionSpec:
    """A layer of one KV head on this rank, 8192 bytes a block."""
    fields = {"block_size": BLOCK_TOKENS, "num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}
    return FullAttentionSpec(**{**fields, **changes})


def configure(
    rank: int = 0,
    *,
    model: str = LATENT_MODEL,
    layout: str = LAYER_OUTERMOST,
    socket_path: str = "/nowhere",
    engine_id: str = "configured",
    **parallel: Any,
) -> VllmConfig:
    """A worker's VllmConfig, two tensor-parallel ranks if nothing else is said.

    ParallelConfig is set afterwards: vLLM refuses some of these here, for want of devices or of Triton, and the gate
    must know them all the same.
    """
    transfer = KVTransferConfig(
        kv_connector=CONNECTOR,
        kv_connector_module_path=CONNECTOR_MODULE,
        kv_role="kv_both",
        engine_id=engine_id,
        kv_connector_extra_config={
            "spec_name": SPEC,
            "spec_module_path": SPEC_MODULE,
            "kvoffload_socket": socket_path,
        },
    )
    config = EngineArgs(
        model=str(CONFIGURATIONS / model),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=512,
        block_size=BLOCK_TOKENS,
        disable_hybrid_kv_cache_manager=False,
        kv_transfer_config=transfer,
    ).create_engine_config()
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", **parallel}
    config.parallel_config = ParallelConfig(**options)
    config.parallel_config.rank = rank
    if hasattr(config.cache_config, "kv_cache_layout"):
        config.cache_config.kv_cache_layout = layout
    return config


def plan_kv_caches(config: VllmConfig, specs_of_ranks: Sequence[Specs]) -> list[KVCacheConfig]:
    """Each rank's KVCacheConfig, as the engine core plans them for the layers that its workers report."""
    specs = [dict(one) for one in specs_of_ranks]
    arguments: list[Any] = [config, specs, [KV_BYTES] * len(specs)]
    if hasattr(core, "get_global_kv_cache_groups"):
        arguments.append(core.get_global_kv_cache_groups(config, specs))
    return core.get_kv_cache_configs(*arguments)


def allocate(config: VllmConfig, kv_cache_config: KVCacheConfig) -> dict[str, torch.Tensor]:
    """The tensors that a worker registers: (num_blocks, heads, tokens, bytes of a token's entry) for each layer."""
    if hasattr(worker_utils, "allocate_kv_cache"):
        layout = config.cache_config.get_resolved_kv_cache_layout()
        return worker_utils.allocate_kv_cache(kv_cache_config, torch.device("cpu"), layout)
    specs, caches = layer_specs(kv_cache_config.kv_cache_groups), {}
    for tensor in kv_cache_config.kv_cache_tensors:  # 0.28 does this in its model runner
        raw = torch.zeros(tensor.size, dtype=torch.int8)
        for name in tensor.shared_by:
            spec = specs[name]
            shape = (kv_cache_config.num_blocks, getattr(spec, "num_kv_heads", 1), spec.block_size, -1)
            caches[name] = raw if isinstance(spec, MambaSpec) else raw.view(spec.dtype).view(shape)
    return caches


def connect(config: VllmConfig, kv_cache_config: KVCacheConfig) -> KVOffloadConnector:
    """The worker's connector, before it has seen a tensor."""
    connector = KVOffloadConnector(config, KVConnectorRole.WORKER, kv_cache_config)
    assert not connector._inert_because, connector._inert_because
    return connector


def observe(config: VllmConfig, kv_cache_config: KVCacheConfig) -> WorkerFacts:
    """What our worker is built from when vLLM registers the KV caches."""
    seen = []
    connector = connect(config, kv_cache_config)
    connector.connector_worker.spec.build_worker = lambda kv_caches: seen.append(
        observe_worker(config, kv_cache_config, kv_caches)
    )
    connector.connector_worker.register_kv_caches(allocate(config, kv_cache_config))
    return seen[0]


class ConfiguredEngine(ToyEngine):
    """A toy engine whose workers and manager are those of vLLM's connectors, one rank for each entry of
    `specs_of_ranks`, in order of pipeline stages."""

    def __init__(self, socket_path: str, specs_of_ranks: Sequence[Specs], **options: Any) -> None:
        os.environ[DEADLINE_VARIABLE] = "0.5"
        os.environ["PYTHONHASHSEED"] = "0"
        kv_cache_utils.init_none_hash(sha256)
        options = {"socket_path": socket_path, "engine_id": f"configured-{time.monotonic_ns()}", **options}
        self.workers, self.caches, self.identities = [], [], {}
        for rank in range(len(specs_of_ranks)):
            config = configure(rank, **options)
            kv_cache_configs = plan_kv_caches(config, specs_of_ranks)
            connector = connect(config, kv_cache_configs[rank])
            build, tensors = connector.connector_worker.spec.build_worker, []

            def build_and_keep(kv_caches: Any, build: Any = build, tensors: list[torch.Tensor] = tensors) -> Any:
                tensors.extend(one.tensor for one in kv_caches.tensors)
                return build(kv_caches)

            connector.connector_worker.spec.build_worker = build_and_keep
            connector.register_kv_caches(allocate(config, kv_cache_configs[rank]))
            assert not connector._inert_because, connector._inert_because
            self.workers.append(connector.connector_worker.worker)
            self.caches.append(tensors)
            place = divmod(rank, config.parallel_config.tensor_parallel_size)
            self.identities[place] = connector.get_handshake_metadata()
        planned = kv_cache_utils.generate_scheduler_kv_cache_config(kv_cache_configs)
        scheduler = KVOffloadConnector(configure(**options), KVConnectorRole.SCHEDULER, planned)
        scheduler.set_xfer_handshake_metadata_pp_aware(self.identities)
        assert not scheduler._inert_because, scheduler._inert_because
        self.manager = scheduler._manager
        self.record_waits(DEFAULT_STEP_SECONDS)
        self.wait_until_ready()
