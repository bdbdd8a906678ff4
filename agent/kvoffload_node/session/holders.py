"""Who holds extents: on whom a smaller capacity waits, in words.

Runs in the node daemon; used by `daemon.py` for the condition Degraded (`ShrinkWaits`).
"""

from collections.abc import Iterable

from kvoffload_node.session.engines import Engine

MAX_NAMED = 5


def describe_holders(engines: Iterable[Engine]) -> str:
    """The engines that lease, write or still map extents that are taken back, those with the most first; at most
    `MAX_NAMED` by name. Empty if there is none."""
    found = [(count, engine) for engine in engines if (count := len(_held_extents(engine))) or _is_silent(engine)]
    found.sort(key=lambda entry: -entry[0])
    words = [_describe(engine, count) for count, engine in found[:MAX_NAMED]]
    if len(found) > MAX_NAMED:
        words.append(f"and {len(found) - MAX_NAMED} more")
    return f"{len(found)} engine{'s' * (len(found) > 1)}: {', '.join(words)}" if words else ""


def _held_extents(engine: Engine) -> set[int]:
    """Positions of the extents that cannot go because of it; those on their way out go when it has unmapped them."""
    index = engine.tenant.index
    offsets = {offset for session in engine.sessions.values() for offset in (*session.holder, *session.unmapping)}
    if engine.num_writes:
        offsets.update(offset for offset, write in index.writes.items() if write.owner is engine)
    return {offset // index.extent_bytes for offset in offsets}


def _is_silent(engine: Engine) -> bool:
    """Whether it has not yet said what it holds since the daemon's restart."""
    return any(session.recovered for session in engine.sessions.values())


def _describe(engine: Engine, count: int) -> str:
    what = "has not said since the daemon's restart" if _is_silent(engine) else f"{count} extent{'s' * (count > 1)}"
    return f"pod {engine.pod.namespace}/{engine.pod.name} engine {engine.engine_id} ({what})"
