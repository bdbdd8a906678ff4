"""One connection of an engine's process: frames in, frames out, each message bounded, validated and handed on.

Runs in the node daemon's event loop, made by `server.py` for each accepted socket. Whatever a peer sends ends at
worst this connection: a ProtocolError closes it, a SessionRefused is answered with its reason.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from time import perf_counter

import msgspec

from kvoffload import __version__
from kvoffload.errors import ProtocolError, RefusalReason, SessionRefused
from kvoffload.protocol.framing import FrameReader, pack_frame
from kvoffload.protocol.messages import (
    MAX_FRAME_BYTES,
    MAX_HELLO_BYTES,
    PROTOCOL_VERSION,
    FromEngine,
    Hello,
    Message,
    Refused,
    Welcome,
)
from kvoffload_node.session.engines import SCHEDULER, EndReason, Pod, Session
from kvoffload_node.session.memory import SEND_BUFFER_BYTES
from kvoffload_node.session.readiness import announce
from kvoffload_node.session.registry import Registry
from kvoffload_node.session.requests import HANDLERS
from kvoffload_node.session.turns import TURN_SECONDS

log = logging.getLogger(__name__)

MAX_UNSENT_BYTES = 1 << 20
"""A peer that does not read is not read from; above this, which pushed messages alone can reach, it is ended."""
HELLO_SECONDS = 10.0
"""A connection that has not said hello by then is ended, and so is one whose last words are not read by then."""
_encode = msgspec.msgpack.Encoder().encode
_decode: Callable[[bytes], FromEngine] = msgspec.msgpack.Decoder(FromEngine).decode


class Connection(asyncio.Protocol):
    """Speaks the session protocol with one process of one pod."""

    def __init__(self, registry: Registry, pod: Pod) -> None:
        self.registry = registry
        self._pod = pod
        self._reader = FrameReader(MAX_HELLO_BYTES)
        self._transport: asyncio.Transport | None = None
        self._session: Session | None = None
        self._ended = ""
        self._timer: asyncio.TimerHandle | None = None
        self._held_bytes = 0
        """What of the pod's `held_bytes` is this connection's."""
        self._is_choked = False
        """The peer does not read its answers."""
        self._is_waiting = False
        """Frames are left for the next turn."""
        self._durations = registry.durations
        self._turns = pod.turns

    # --- asyncio ----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A socket was accepted."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=0)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self.registry.connections.add(self)
        self._timer = asyncio.get_running_loop().call_later(HELLO_SECONDS, self._require_hello)
        self._pod.num_connections += 1
        budget = self.registry.connection_budget
        budget.total += 1
        allowed = budget.allowed(len(self.registry.pods))
        if self._pod.num_connections > allowed:
            self.refuse(
                SessionRefused(
                    RefusalReason.TOO_MANY_CONNECTIONS,
                    f"this pod has {self._pod.num_connections} connections, allowed are {allowed} (all pods have "
                    f"{budget.total} of {budget.max_of_all}); run its engines in more pods",
                )
            )

    def data_received(self, data: bytes) -> None:
        """Bytes have come: handle every whole frame in them."""
        self._reader.feed(data)
        if self._turns.is_over:
            self._wait_for_turn()
            self._check_held()
        else:
            self._handle_frames()

    def _handle_frames(self) -> None:
        """Handle the frames that have come, a turn's worth; the rest after everybody else's."""
        reader = self._reader
        begun = ended = perf_counter()
        try:
            while not self._ended and not self._is_choked and (payload := reader.next_frame()) is not None:
                before = ended
                try:
                    kind = self._handle(payload)
                    ended = perf_counter()
                    self._durations[kind].add(ended - before)
                except SessionRefused as error:
                    self.refuse(error)
                    ended = perf_counter()
                if ended - begun > TURN_SECONDS:
                    break
            else:
                self._go_on_reading()
        except ProtocolError as error:
            self.registry.refusals[RefusalReason.MALFORMED.value] += 1
            if self.registry.is_first(self._pod, RefusalReason.MALFORMED.value):
                log.warning("pod %s/%s: connection ended: %s", self._pod.namespace, self._pod.name, error)
            self.end(RefusalReason.MALFORMED.value)
        except OSError as error:
            # of the state folder's disk, or of descriptors: nothing else is opened or written here
            if self.registry.is_first(self._pod, EndReason.SYSTEM_ERROR):
                log.error("pod %s/%s: connection ended: %s", self._pod.namespace, self._pod.name, error)
            self.end(EndReason.SYSTEM_ERROR)
        except Exception:
            log.exception("pod %s/%s: connection ended by a bug of this daemon", self._pod.namespace, self._pod.name)
            self.end(EndReason.INTERNAL_ERROR)
        self._turns.spend(begun, ended)
        if ended - begun > TURN_SECONDS:
            self._wait_for_turn()
        if self._held_bytes or reader.num_bytes:
            self._check_held()

    def _check_held(self) -> None:
        allowed = self._count_held()
        if allowed is not None and not self._ended:
            budget, of_pod = self.registry.byte_budget, self._pod.held_bytes
            self.refuse(
                SessionRefused(
                    RefusalReason.TOO_MANY_BYTES,
                    f"the connections of this pod hold {of_pod} bytes of unfinished messages and of answers that it "
                    f"does not read, allowed are {allowed} (all pods hold {budget.total} of {budget.max_of_all}); run "
                    "its engines in more pods",
                )
            )
            self.abort(RefusalReason.TOO_MANY_BYTES.value)

    def _count_held(self) -> int | None:
        """Count what this connection holds of the daemon's memory; what the pod may hold, where this made it more."""
        unsent = self._transport.get_write_buffer_size() if self._transport is not None else 0
        change = self._reader.num_bytes + unsent - self._held_bytes
        budget = self.registry.byte_budget
        self._held_bytes += change
        self._pod.held_bytes += change
        budget.total += change
        if change <= 0:
            return None
        allowed = budget.allowed(len(self.registry.pods))
        return allowed if self._pod.held_bytes > allowed else None

    def _wait_for_turn(self) -> None:
        if self._transport is not None:
            self._is_waiting = True
            self._transport.pause_reading()
            self._turns.wait(self)

    def take_turn(self) -> None:
        """It is this connection's turn: handle what has come meanwhile."""
        self._is_waiting = False
        if not self._is_choked:
            self._handle_frames()

    def _go_on_reading(self) -> None:
        if self._transport is not None and not self._ended and not self._is_choked:
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        """The peer does not read what it asked for: do not take more from it."""
        self._is_choked = True
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        """The peer has read."""
        self._is_choked = False
        if not self._is_waiting:
            self.data_received(b"")

    def _require_hello(self) -> None:
        if self._session is None:
            self.end(EndReason.NO_HELLO)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio names it
        """The socket is closed, by whichever side."""
        self.registry.connections.discard(self)
        self._pod.num_connections -= 1
        self.registry.connection_budget.total -= 1
        self._reader = FrameReader()
        self._count_held()
        if self._timer is not None:
            self._timer.cancel()
        self.registry.disconnected(self._session, self._ended or EndReason.PEER_CLOSED)

    # --- for the registry -------------------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Queue one message."""
        transport = self._transport
        if transport is None or self._ended:
            return
        transport.write(pack_frame(_encode(message)))
        unsent = transport.get_write_buffer_size()
        if unsent and (self._count_held() is not None or unsent > MAX_UNSENT_BYTES):
            self.abort(EndReason.SLOW_READER)

    def refuse(self, error: SessionRefused) -> None:
        """Answer with the reason; after a `Hello` the connection ends."""
        self.registry.refusals[error.reason.value] += 1
        if self.registry.is_first(self._pod, error.reason.value):
            log.warning("pod %s/%s refused: %s: %s", self._pod.namespace, self._pod.name, error.reason.value, error)
        self.send(Refused(error.reason.value, str(error)[:8000]))
        if self._session is None:
            self.end(error.reason.value)

    def end(self, reason: str) -> None:
        """Close the connection; what was queued is still sent, if the peer reads it soon."""
        if not self._ended and self._transport is not None:
            self._ended = reason
            self._transport.close()
            if self._timer is not None:
                self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_later(HELLO_SECONDS, self._transport.abort)

    def abort(self, reason: str) -> None:
        """Close the connection at once, and let go of all that it holds: many may be ended in one round of the loop."""
        if self._transport is not None:
            self._ended = self._ended or reason
            self._transport.abort()
            self._reader = FrameReader()
            self._count_held()

    # --- messages ---------------------------------------------------------------------------------------------------

    def _handle(self, payload: bytes) -> type[Message]:
        """Decode and handle one message, and say which it was."""
        try:
            message = _decode(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ProtocolError(f"a message that the protocol does not allow: {error}") from error
        session = self._session
        if session is None:
            if type(message) is not Hello:
                raise ProtocolError(f"{type(message).__name__} before Hello")
            self._on_hello(message)
            return Hello
        kind = type(message)
        handler = HANDLERS.get(kind)
        if handler is None:
            raise ProtocolError("a second Hello")
        if session.is_unconfirmed:
            self.registry.confirm(session)
        handler(self, session, message)
        return kind

    def _on_hello(self, hello: Hello) -> None:
        region = self.registry.region
        welcome = Welcome(
            protocol=PROTOCOL_VERSION,
            epoch=region.epoch,
            region_bytes=region.span_bytes,
            extent_bytes=region.extent_bytes,
            daemon_version=__version__,
        )
        session, lock = self.registry.greet(self._pod, hello, self)
        try:  # a lock that stayed open here would be held as long as the daemon lives
            self._session = session
            self._reader.max_frame_bytes = MAX_FRAME_BYTES
            descriptors = [lock] if session.rank == SCHEDULER else [self._pod.tenant.file.descriptor, lock]
            self._send_with_descriptors(pack_frame(_encode(welcome)), descriptors)
        finally:
            os.close(lock)
        self.registry.revocations.remind(session)
        if session.rank == SCHEDULER:
            announce(session)

    def _send_with_descriptors(self, frame: bytes, descriptors: list[int]) -> None:
        """The first frame of a connection: nothing is queued before it, and the socket's buffer takes it whole."""
        assert self._transport is not None
        sock = self._transport.get_extra_info("socket")
        with socket.socket(fileno=os.dup(sock.fileno())) as copy:
            copy.setblocking(False)
            try:
                sent = socket.send_fds(copy, [frame], descriptors)
            except OSError:
                sent = 0
        if sent != len(frame):
            self.end(EndReason.PEER_CLOSED)
