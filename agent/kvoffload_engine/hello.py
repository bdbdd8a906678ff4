"""The first message of each process of an engine, to the node daemon.

Runs in vLLM's engine core and workers; called by `kvoffload_engine.connector`, which hands the makers to the sessions:
a session says hello anew whenever it connects.
"""

from typing import Any

from kvoffload import __version__
from kvoffload.layout.gate import LayoutDecision
from kvoffload.protocol.messages import PROTOCOL_VERSION, Hello
from kvoffload_engine import compat
from kvoffload_engine.facts import WorkerFacts
from kvoffload_engine.identity import common_identity


def engine_digest(vllm_config: Any, facts: WorkerFacts) -> bytes:
    """The identity that all processes of the engine say."""
    has_stages = vllm_config.parallel_config.pipeline_parallel_size > 1
    return (common_identity(facts.identity) if has_stages else facts.identity).digest


def worker_hello(vllm_config: Any, process: bytes, facts: WorkerFacts) -> Hello:
    """A worker's first message."""
    verdict = facts.verdict
    replicated = verdict.decision is LayoutDecision.REPLICATED
    return _hello(
        vllm_config,
        process,
        engine_digest(vllm_config, facts),
        role="worker",
        rank=facts.rank,
        part=verdict.part,
        part_bytes=facts.layout.part_bytes,
        reason="" if replicated else verdict.reason.value,
        message=verdict.message,
    )


def scheduler_hello(vllm_config: Any, process: bytes, digest: bytes) -> Hello:
    """The scheduler's first message."""
    return _hello(vllm_config, process, digest, role="scheduler", rank=-1)


def _hello(vllm_config: Any, process: bytes, digest: bytes, **fields: Any) -> Hello:
    return Hello(
        protocol_min=PROTOCOL_VERSION,
        protocol_max=PROTOCOL_VERSION,
        engine_id=vllm_config.kv_transfer_config.engine_id[:128],
        world_size=vllm_config.parallel_config.world_size,
        identity=digest,
        model=str(vllm_config.model_config.model)[-256:],
        engine_version=compat.installed_version(),
        agent_version=__version__,
        process=process,
        **fields,
    )
