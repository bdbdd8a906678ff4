"""Who may attach: what a `Hello` must say, and how many engines a node and a pod may have.

Runs in the node daemon, called by `registry.py` for each `Hello`; it changes nothing itself.
"""

from collections.abc import Callable, Collection

from kvoffload.errors import ProtocolError, RefusalReason, SessionRefused
from kvoffload.protocol.messages import LEFT_ALONE_PREFIX, PROTOCOL_VERSION, Hello
from kvoffload_node.region.region import Region
from kvoffload_node.session.engines import SCHEDULER, Engine, Pod

MAX_POD_SHARE = 2
"""One pod has at most this part of maxEnginesPerNode (rounded up), so that the others find room."""
MIN_SILENT = 16
"""So many engines of a pod may live without a connection, or as many as it may have attached: their locks are tested in
each sweep."""


def check_hello(hello: Hello, region: Region, *, draining: str) -> None:
    """Raise SessionRefused or ProtocolError where such a process is not taken; `draining` says why nobody is."""
    if not hello.protocol_min <= PROTOCOL_VERSION <= hello.protocol_max:
        raise SessionRefused(
            RefusalReason.PROTOCOL_VERSION,
            f"the engine speaks protocol {hello.protocol_min} to {hello.protocol_max}, this daemon "
            f"{PROTOCOL_VERSION}; recreate the pod so that it gets this daemon's library",
        )
    if draining:
        raise SessionRefused(RefusalReason.DRAINING, draining)
    if hello.engine_id.startswith(LEFT_ALONE_PREFIX):
        if hello.rank != SCHEDULER:
            raise ProtocolError(f"rank {hello.rank} of {hello.engine_id}, which is to be left alone")
    else:
        region.check_serving()
    if (hello.role == "scheduler") != (hello.rank == SCHEDULER) or hello.rank >= hello.world_size:
        raise ProtocolError(f"role {hello.role} with rank {hello.rank} of {hello.world_size}")
    if hello.rank != SCHEDULER and not hello.part_bytes > 0:
        raise ProtocolError("a worker's part has no bytes")


def check_room(
    pod: Pod,
    engines: Collection[Engine],
    limit: int,
    *,
    is_left_alone: bool,
    end_dead_sessions: Callable[[Engine], None],
) -> None:
    """Raise SessionRefused where the node, or the pod, has as many engines as it may have.

    `limit` is the node's; `end_dead_sessions` asks the kernel whether the processes of a silent engine live.
    """
    attached = [e for e in engines if e.is_attached and e.is_left_alone == is_left_alone]
    if len(attached) >= limit and not is_left_alone:
        raise SessionRefused(
            RefusalReason.TOO_MANY_ENGINES,
            f"{len(attached)} engines are attached, maxEnginesPerNode is {limit}; raise it or run fewer engines on "
            "this node",
        )
    of_pod, share = sum(engine.pod is pod for engine in attached), -(-limit // MAX_POD_SHARE)
    if of_pod >= share:
        raise SessionRefused(
            RefusalReason.TOO_MANY_ENGINES_IN_POD,
            f"{of_pod} engines of this pod are attached, one pod may have {share} of the {limit} that "
            f"maxEnginesPerNode allows; raise it to at least {MAX_POD_SHARE * of_pod + 1}, or run the engines in "
            "more pods",
        )
    allowed = max(MIN_SILENT, share)
    if len(silent := _silent(pod, engines)) < allowed:
        return
    for engine in silent:
        end_dead_sessions(engine)
    if (left := len(_silent(pod, silent))) >= allowed:
        raise SessionRefused(
            RefusalReason.TOO_MANY_ENGINES_IN_POD,
            f"{left} engines of this pod live without a connection, allowed are {allowed}; end their processes",
        )


def _silent(pod: Pod, engines: Collection[Engine]) -> list[Engine]:
    """Those of the pod that hold locks and no connection."""
    return [e for e in engines if e.pod is pod and e.sessions and not e.is_attached]
