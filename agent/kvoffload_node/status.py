"""The region's status, built from the daemon's figures, findings and engines.

Runs in the node daemon; used by `status_writer.py`, written by `report.py`. Pure. What pods say of themselves is cut
to what the API takes, so that no pod can keep the others' engines out of the status.
"""

from collections.abc import Sequence
from datetime import UTC, datetime

from kvoffload import __version__
from kvoffload.api.conditions import Condition, transition
from kvoffload.api.model import MAX_BYTE_COUNT
from kvoffload.api.region import MAX_ENGINES, ConfirmedLayout, KVOffloadRegionStatus, RegionEngine
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
    now: datetime,
) -> KVOffloadRegionStatus:
    """Our part of the region's status. `previous` are its conditions as they were, whoever set them.

    A pod may have attached two engines of one id: the older one, whose processes have been told apart from the newer
    one's, counts, and only the newer one is listed.
    """
    connected = [engine for engine in engines if engine.is_attached]
    attached = [engine for engine in connected if not engine.is_left_alone]
    listed = {(e.pod.uid, e.engine_id): e for e in sorted(connected, key=lambda e: (e.is_left_alone, e.number))}
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
        saved_bytes=min(figures.saved_bytes, MAX_BYTE_COUNT) if figures else 0,
        daemon_version=__version__,
        epoch=epoch,
        engines=[_build_engine(engine) for engine in list(listed.values())[:MAX_ENGINES]],
        engines_attached=len(attached),
        engines_replicated=sum(engine.layout == ConfirmedLayout.REPLICATED for engine in attached),
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
        stored_bytes=min(engine.stored_bytes, MAX_BYTE_COUNT),
        loaded_bytes=min(engine.loaded_bytes, MAX_BYTE_COUNT),
        attached_since=datetime.fromtimestamp(int(engine.attached_since), UTC),
    )
