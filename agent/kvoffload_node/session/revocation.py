"""Taking extents back from the clients that map them: ask, then wait for each one's acknowledgement or death.

Runs in the node daemon, called by `registry.py`. Pages that a client registered with its GPU survive a punched hole,
so a later DMA would land in pages that are somebody else's by then: nothing is punched before every mapping is gone.
"""

import asyncio
from collections.abc import Sequence

from kvoffload.protocol.messages import Revoke, split_offsets
from kvoffload_node.session.engines import Session
from kvoffload_node.session.packing import pack_offsets


class Revocations:
    """Revocations under way."""

    def __init__(self, extent_bytes: int) -> None:
        self._extent_bytes = extent_bytes
        self._waiting: dict[object, tuple[set[Session], asyncio.Future[None]]] = {}

    async def revoke(self, sessions: Sequence[Session], positions: Sequence[int]) -> None:
        """Ask these workers to unmap these extents; returns when each has, or is dead."""
        if not sessions:
            return
        token = object()
        acknowledged: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[token] = (set(sessions), acknowledged)
        for session in sessions:
            for position in positions:
                session.unmapping[position * self._extent_bytes] = token
            self.remind(session)
        await acknowledged

    def remind(self, session: Session) -> None:
        """Tell a worker, also one that has just connected again, which extents it still has to unmap."""
        if session.connection is not None and session.unmapping:
            for piece in split_offsets(pack_offsets(session.unmapping)):
                session.connection.send(Revoke(piece))

    def unmapped(self, session: Session, extents: Sequence[int]) -> None:
        """A worker has unmapped these extents."""
        tokens = {session.unmapping.pop(extent, None) for extent in extents} - {None}
        for token in tokens.difference(session.unmapping.values()):
            self._acknowledge(token, session)

    def died(self, session: Session) -> None:
        """A worker is dead: nothing is mapped there any more."""
        tokens = set(session.unmapping.values())
        session.unmapping.clear()
        for token in tokens:
            self._acknowledge(token, session)

    def succeeded(self, before: Session, session: Session) -> None:
        """The same process under a new session: what it still has mapped, it still has."""
        session.unmapping, before.unmapping = before.unmapping, {}
        for token in set(session.unmapping.values()):
            waiting, _ = self._waiting[token]
            waiting.discard(before)
            waiting.add(session)

    def _acknowledge(self, token: object, session: Session) -> None:
        waiting, acknowledged = self._waiting[token]
        waiting.discard(session)
        if not waiting:
            del self._waiting[token]
            if not acknowledged.done():
                acknowledged.set_result(None)
