"""Client of the node daemon: a session that never blocks, and its reconnection in the background.

Runs in vLLM's scheduler and worker processes (`kvoffload_engine`), and in the daemon's tests. `Session` is one
connection after a successful `Hello`; `Connector` keeps one alive: it connects in a thread of its own, so that the
thread that schedules or computes only ever looks at a finished session.

    Connector.current() ── None: no daemon, everything is a miss
           │   ▲
           │   └── thread: connect, Hello, Welcome (+ descriptors), then it ends
           └── Session.send / Session.receive from the owner's thread; any error closes the session, and the next
               `current()` starts a thread again, after a pause that doubles up to `MAX_PAUSE_SECONDS`
"""

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from kvoffload.errors import DaemonUnavailable, ProtocolError, RefusalReason, SessionRefused
from kvoffload.protocol.framing import FrameReader, pack_frame, receive_with_descriptors, send_frame
from kvoffload.protocol.messages import (
    Attached,
    AttachPod,
    FromDaemon,
    Hello,
    Message,
    Refused,
    Welcome,
)

MAX_BACKLOG_BYTES = 4 << 20
"""Unsent bytes above which the daemon counts as gone: it has stopped reading."""
MIN_PAUSE_SECONDS = 0.2
MAX_PAUSE_SECONDS = 5.0
CONNECT_SECONDS = 5.0
"""How long one attempt to connect and be welcomed may take; in the background only."""
_RECEIVE_BYTES = 1 << 18

Wanted = TypeVar("Wanted", bound=Message)
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[FromDaemon] = msgspec.msgpack.Decoder(FromDaemon)


def decode_from_daemon(payload: bytes) -> FromDaemon:
    """Decode and validate one frame's payload. Raises ProtocolError."""
    try:
        return _decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"the daemon sent a message that protocol does not allow: {error}") from error


class Session:
    """One welcomed connection. Used by one thread at a time; closed by its first error, and then says so for ever.

    `welcome` is the daemon's answer; `descriptors` came with it ([region, lock] for a worker, [lock] for a
    scheduler) and belong to the session until `take_descriptors`. The lock must stay open as long as this process
    may touch the region.
    """

    def __init__(self, sock: socket.socket, welcome: Welcome, descriptors: list[int], reader: FrameReader) -> None:
        self.welcome = welcome
        self.descriptors = descriptors
        self._sock = sock
        self._reader = reader
        self._unsent = bytearray()
        self._closed_because = ""
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        sock.setblocking(False)

    @classmethod
    def connect(cls, path: str, hello: Hello, timeout_seconds: float = CONNECT_SECONDS) -> "Session":
        """Connect, say `hello`, wait for the welcome. Blocks up to `timeout_seconds`.

        Raises DaemonUnavailable (nobody there, too slow), SessionRefused (with the daemon's reason), ProtocolError.
        """
        deadline = time.monotonic() + timeout_seconds
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        descriptors: list[int] = []
        try:
            sock.settimeout(timeout_seconds)
            sock.connect(path)
            send_frame(sock, _encoder.encode(hello))
            reader = FrameReader()
            payload = None
            while payload is None:
                sock.settimeout(max(0.001, deadline - time.monotonic()))
                data, received = receive_with_descriptors(sock, _RECEIVE_BYTES)
                descriptors += received
                if not data:
                    raise DaemonUnavailable(f"the daemon at {path} closed the connection before its welcome")
                reader.feed(data)
                payload = reader.next_frame()
            answer = decode_from_daemon(payload)
            if isinstance(answer, Refused):
                raise SessionRefused(refusal_reason(answer.reason), answer.message)
            if not isinstance(answer, Welcome):
                raise ProtocolError(f"the daemon answered a hello with {type(answer).__name__}, needed Welcome")
            return cls(sock, answer, descriptors, reader)
        except OSError as error:
            _close_all(sock, descriptors)
            raise DaemonUnavailable(f"no daemon at {path} within {timeout_seconds:g} s: {error}") from error
        except BaseException:
            _close_all(sock, descriptors)
            raise

    @property
    def is_open(self) -> bool:
        """False once any send or receive has failed, or `close` was called."""
        return not self._closed_because

    @property
    def closed_because(self) -> str:
        """What ended the session, empty while it is open."""
        return self._closed_because

    def take_descriptors(self) -> list[int]:
        """The welcome's descriptors; the caller closes them."""
        taken, self.descriptors = self.descriptors, []
        return taken

    def send(self, *messages: Message) -> None:
        """Queue the messages and write what the socket takes now; never waits. Raises DaemonUnavailable."""
        self._require_open()
        for message in messages:
            self._unsent += pack_frame(_encoder.encode(message))
        self._flush()
        if len(self._unsent) > MAX_BACKLOG_BYTES:
            self._fail(f"{len(self._unsent)} bytes wait to be sent, allowed are {MAX_BACKLOG_BYTES}: it does not read")

    def receive(self, timeout_seconds: float = 0.0) -> list[FromDaemon]:
        """What has come, waiting up to `timeout_seconds` for at least one message. Raises DaemonUnavailable.

        A message that the protocol does not allow closes the session too.
        """
        self._require_open()
        deadline = time.monotonic() + timeout_seconds
        messages: list[FromDaemon] = []
        while True:
            if self._unsent:
                self._flush()
            self._read_available()
            try:
                while (payload := self._reader.next_frame()) is not None:
                    messages.append(decode_from_daemon(payload))
            except ProtocolError as error:
                self._fail(str(error))
            remaining = deadline - time.monotonic()
            if messages or remaining <= 0:
                return messages
            self._poll.modify(self._sock, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            # poll waits whole milliseconds, rounded up: a deadline is overrun by less than one.
            self._poll.poll(remaining * 1000)

    def wait_for(self, wanted: type[Wanted], timeout_seconds: float) -> Wanted:
        """Receive until a message of this type comes; others are dropped. For tests and tools, not for a
        scheduler."""
        deadline = time.monotonic() + timeout_seconds
        while (remaining := deadline - time.monotonic()) > 0:
            for message in self.receive(remaining):
                if isinstance(message, wanted):
                    return message
        raise DaemonUnavailable(f"no {wanted.__name__} came within {timeout_seconds:g} s")

    def close(self, because: str = "closed by this process") -> None:
        """Close the connection and the descriptors that nobody took. Safe to call again."""
        if not self._closed_because:
            self._closed_because = because
            _close_all(self._sock, self.take_descriptors())

    def _require_open(self) -> None:
        if self._closed_because:
            raise DaemonUnavailable(self._closed_because)

    def _fail(self, because: str) -> None:
        self.close(because)
        raise DaemonUnavailable(because)

    def _flush(self) -> None:
        try:
            while self._unsent:
                sent = self._sock.send(self._unsent)
                del self._unsent[:sent]
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(f"the daemon's socket failed on write: {error}")

    def _read_available(self) -> None:
        try:
            while True:
                data = self._sock.recv(_RECEIVE_BYTES)
                if not data:
                    self._fail("the daemon closed the connection")
                self._reader.feed(data)
                if len(data) < _RECEIVE_BYTES:
                    return
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(f"the daemon's socket failed on read: {error}")


class Connector:
    """Keeps a session to the daemon: `current()` never blocks and returns an open session or None.

    `make_hello` is called in the connecting thread for each attempt; `on_event` gets one line for the log whenever
    the state changes (connected, refused, lost), from whichever thread noticed.
    """

    def __init__(self, path: str, make_hello: Callable[[], Hello], on_event: Callable[[str], None]) -> None:
        self._path = path
        self._make_hello = make_hello
        self._on_event = on_event
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._thread: threading.Thread | None = None
        self._pause_seconds = 0.0
        self._not_before = 0.0
        self._last_event = ""
        self._stopped = False
        self.refused: SessionRefused | None = None
        """The daemon's last refusal, None once it has welcomed this client."""

    def current(self) -> Session | None:
        """The open session, or None; then a thread tries to connect unless one does already or the pause lasts."""
        session = self._session
        if session is not None and session.is_open:
            return session
        self._ensure_connecting(session)
        return None

    def connect_now(self, timeout_seconds: float) -> Session | None:
        """Wait for a session: at start, where waiting is allowed."""
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            session = self.current()
            if session is not None:
                return session
            thread = self._thread
            if thread is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
            elif self.refused is not None or self._stopped:
                return None
            else:
                time.sleep(min(0.05, max(0.0, deadline - time.monotonic())))
        return self.current()

    def close(self) -> None:
        """End the session and any attempt; `current()` returns None from now on."""
        with self._lock:
            self._stopped = True
            session, self._session = self._session, None
        if session is not None:
            session.close()

    def _ensure_connecting(self, dead: Session | None) -> None:
        with self._lock:
            if dead is not None and self._session is dead:
                self._session = None
                self._say(f"the session with the node daemon ended: {dead.closed_because}")
            if self._stopped or self._thread is not None or time.monotonic() < self._not_before:
                return
            self._thread = threading.Thread(target=self._attempt, name="kvoffload-connect", daemon=True)
            self._thread.start()

    def _attempt(self) -> None:
        session: Session | None = None
        said = ""
        try:
            session = Session.connect(self._path, self._make_hello())
            self.refused = None
        except SessionRefused as error:
            self.refused = error
            said = f"the node daemon refused this engine: {error.reason.value}: {error}"
        except (DaemonUnavailable, ProtocolError) as error:
            said = f"no session with the node daemon: {error}"
        except Exception as error:  # noqa: BLE001 - a thread must not die silently, and vLLM must go on without us
            said = f"connecting to the node daemon failed: {type(error).__name__}: {error}"
        with self._lock:
            self._thread = None
            if session is None:
                self._pause_seconds = min(MAX_PAUSE_SECONDS, max(MIN_PAUSE_SECONDS, 2 * self._pause_seconds))
                self._not_before = time.monotonic() + self._pause_seconds
            elif self._stopped:
                session.close()
            else:
                self._pause_seconds = 0.0
                self._session = session
                said = f"connected to the node daemon {session.welcome.daemon_version} (epoch {session.welcome.epoch})"
            self._say(said)

    def _say(self, line: str) -> None:
        if line and line != self._last_event:
            self._last_event = line
            self._on_event(line)


def attach_pod(path: str, request: AttachPod, listening: socket.socket, timeout_seconds: float = 5.0) -> socket.socket:
    """As the attacher does: hand a pod's listening socket to the daemon. Returns the connection, which detaches on
    close.

    Raises DaemonUnavailable, SessionRefused, ProtocolError.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.settimeout(timeout_seconds)
        sock.connect(path)
        send_frame(sock, _encoder.encode(request), [listening.fileno()])
        reader = FrameReader()
        while (payload := reader.next_frame()) is None:
            data = sock.recv(_RECEIVE_BYTES)
            if not data:
                raise DaemonUnavailable(f"the daemon at {path} closed the connection before its answer")
            reader.feed(data)
        answer = decode_from_daemon(payload)
        if isinstance(answer, Refused):
            raise SessionRefused(refusal_reason(answer.reason), answer.message)
        if not isinstance(answer, Attached):
            raise ProtocolError(f"the daemon answered an attach with {type(answer).__name__}")
        return sock
    except OSError as error:
        sock.close()
        raise DaemonUnavailable(f"no daemon at {path}: {error}") from error
    except BaseException:
        sock.close()
        raise


def refusal_reason(text: str) -> RefusalReason:
    """The closed set's member for a reason on the wire; a newer daemon's unknown reason reads as NotReady."""
    try:
        return RefusalReason(text)
    except ValueError:
        return RefusalReason.NOT_READY


def _close_all(sock: socket.socket, descriptors: list[int]) -> None:
    sock.close()
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
