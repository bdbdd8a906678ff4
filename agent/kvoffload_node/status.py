"""The region's status, built from the daemon's figures, findings and engines.

Runs in the node daemon; used by `daemon.py`, written by `report.py`. Pure.
"""

from collections.abc import Sequence
from datetime import UTC, datetime

from kvoffload import __version__
from kvoffload.api.conditions import Condition, transition
from kvoffload.api.region import MAX_ENGINES, KVOffloadRegionStatus, RegionEngine
from kvoffload_node.findings import Finding
from kvoffload_node.region.figures import Figures
from kvoffload_node.session.engines import Engine


def build_status(
    *,
    previous: Sequence[Condition],
    generation: int,
    figures: Figures | None,
    findings: Sequence[Finding],
    engines: Sequence[Engine],
    epoch: int,
    now: datetime | None = None,
) -> KVOffloadRegionStatus:
    """Our part of the region's status. `previous` are its conditions as they were, whoever set them."""
    now = now or datetime.now(UTC)
    connected = [engine for engine in engines if engine.is_attached]
    attached = [engine for engine in connected if not engine.is_left_alone]
    left_alone = [engine for engine in connected if engine.is_left_alone]
    return KVOffloadRegionStatus(
        observed_generation=generation,
        conditions=[
            transition(
                previous,
                type=finding.type,
                status="True" if finding.holds else "False",
                reason=finding.reason,
                message=finding.message,
                generation=generation,
                now=now,
            )
            for finding in findings
        ],
        capacity_bytes=figures.capacity_bytes if figures else 0,
        allocated_bytes=figures.allocated_bytes if figures else 0,
        used_bytes=figures.used_bytes if figures else 0,
        free_bytes=figures.free_bytes if figures else 0,
        saved_bytes=figures.saved_bytes if figures else 0,
        daemon_version=__version__,
        epoch=epoch,
        engines=[_build_engine(engine) for engine in [*attached, *left_alone][:MAX_ENGINES]],
        engines_attached=len(attached),
        engines_replicated=sum(engine.layout == "replicated" for engine in attached),
    )


def _build_engine(engine: Engine) -> RegionEngine:
    # What leaves an engine alone is told as one sentence, reason first: the plugin's and the daemon's users know it so.
    words = [engine.note] if engine.is_left_alone and engine.note else [engine.message, engine.note]
    return RegionEngine(
        pod_namespace=engine.pod.namespace,
        pod_name=engine.pod.name,
        pod_uid=engine.pod.uid,
        engine_id=engine.engine_id,
        model=engine.model,
        tensor_parallel_size=engine.world_size,
        predicted_layout=engine.pod.predicted_layout[:64],
        confirmed_layout=engine.layout,
        reason=engine.reason[:64],
        message="; ".join(word for word in words if word)[:1024],
        stored_bytes=engine.stored_bytes,
        loaded_bytes=engine.loaded_bytes,
        attached_since=datetime.fromtimestamp(int(engine.attached_since), UTC),
    )
