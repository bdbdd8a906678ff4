"""Client of the node daemon: a session that never blocks, and its reconnection in the background.

Runs in vLLM's scheduler and worker processes (`kvoffload_engine`), and in the daemon's tests. `Session` is one
connection after a successful `Hello`; `Connector` keeps one alive: it connects in a thread of its own, so that the
thread that schedules or computes only ever looks at a finished session.

    Connector's thread:  connect, Hello, Welcome (+ descriptors) -> on_connected -> watch until it ends -> pause,
    again owner's thread:      current() -> None: no daemon, everything is a miss
                                   -> Session: send, receive; any error closes it
"""

import contextlib
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable
from typing import TypeVar

import msgspec

from kvoffload.errors import DaemonUnavailable, ProtocolError, RefusalReason, SessionRefused
from kvoffload.protocol.framing import FrameReader, pack_frame, receive_with_descriptors, send_frame
from kvoffload.protocol.messages import (
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
WATCH_SECONDS = 0.5
"""How soon the thread notices that the owner closed the session."""
_RECEIVE_BYTES = 1 << 18

Wanted = TypeVar("Wanted", bound=Message)
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[FromDaemon] = msgspec.msgpack.Decoder(FromDaemon)


def decode_from_daemon(payload: bytes) -> FromDaemon:
    """Decode and validate one frame's payload. Raises ProtocolError."""
    try:
        return _decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError(f"the daemon sent a message that protocol does not allow: {error}") from error


class Session:
    """One welcomed connection; closed by its first error, and then says so for ever.

    Threads may send and receive at the same time; a message is received by one of them. `welcome` is the daemon's
    answer; `descriptors` came with it ([region, lock] for a worker, [lock] for a scheduler) and belong to the
    session until `take_descriptors`. The lock must stay open as long as this process may touch the region.
    """

    def __init__(self, sock: socket.socket, welcome: Welcome, descriptors: list[int], reader: FrameReader) -> None:
        self.welcome = welcome
        self.descriptors = descriptors
        self._sock = sock
        self._reader = reader
        self._unsent = bytearray()
        self._closed_because = ""
        self._lock = threading.RLock()
        sock.setblocking(False)
        # Not closed by `close`: another thread may be polling the descriptor, whose number would be taken anew.
        weakref.finalize(self, _close_all, sock, descriptors).atexit = False

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
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may have refused us before our hello
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
            if not hello.protocol_min <= answer.protocol <= hello.protocol_max:
                raise ProtocolError(
                    f"the daemon speaks protocol {answer.protocol}, this process {hello.protocol_min} to "
                    f"{hello.protocol_max}: recreate the pod so that it gets the daemon's library"
                )
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

    def fileno(self) -> int:
        """The socket, to be polled."""
        return self._sock.fileno()

    def take_descriptors(self) -> list[int]:
        """The welcome's descriptors; the caller closes them."""
        taken = list(self.descriptors)
        self.descriptors.clear()
        return taken

    def send(self, *messages: Message) -> None:
        """Queue the messages and write what the socket takes now; never waits. Raises DaemonUnavailable."""
        with self._lock:
            self._require_open()
            for message in messages:
                self._unsent += pack_frame(_encoder.encode(message))
            self._flush()
            if len(self._unsent) > MAX_BACKLOG_BYTES:
                self._fail(
                    f"{len(self._unsent)} bytes wait to be sent, allowed are {MAX_BACKLOG_BYTES}: it does not read"
                )

    def receive(self, timeout_seconds: float = 0.0) -> list[FromDaemon]:
        """What has come, waiting up to `timeout_seconds` for at least one message. Raises DaemonUnavailable.

        A message that the protocol does not allow closes the session too.
        """
        deadline = time.monotonic() + timeout_seconds
        while True:
            with self._lock:
                self._require_open()
                messages = self._receive_available()
                wanted = select.POLLIN | (select.POLLOUT if self._unsent else 0)
            remaining = deadline - time.monotonic()
            if messages or remaining <= 0:
                return messages
            poll = select.poll()
            poll.register(self._sock, wanted)
            # poll waits whole milliseconds, rounded up: a deadline is overrun by less than one.
            poll.poll(remaining * 1000)

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
        """End the connection. Safe to call again, and from any thread: the descriptors go with the object."""
        if not self._closed_because:
            self._closed_because = because
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

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

    def _receive_available(self) -> list[FromDaemon]:
        if self._unsent:
            self._flush()
        messages: list[FromDaemon] = []
        ended = ""
        try:
            while True:
                data = self._sock.recv(_RECEIVE_BYTES)
                if not data:
                    ended = "the daemon closed the connection"
                    break
                self._reader.feed(data)
                if len(data) < _RECEIVE_BYTES:
                    break
        except BlockingIOError:
            pass
        except OSError as error:
            ended = f"the daemon's socket failed on read: {error}"
        try:
            while (payload := self._reader.next_frame()) is not None:
                messages.append(decode_from_daemon(payload))
        except ProtocolError as error:
            ended = str(error)
        if ended and not messages:
            self._fail(ended)
        if ended:
            self.close(ended)
        return messages


class Connector:
    """Keeps a session to the daemon. `current()` never blocks and returns an open session or None.

    One thread connects, and connects again when the session ends. In that thread: `make_hello` before each attempt,
    `on_connected` with a new session before anybody else sees it (map the region, re-assert what is held),
    `on_readable` whenever something can be received (None: the owner receives), and `on_event` with one line for the
    log when the state changes.
    """

    def __init__(
        self,
        path: str,
        *,
        make_hello: Callable[[], Hello],
        on_connected: Callable[[Session], None],
        on_event: Callable[[str], None],
        on_readable: Callable[[Session], object] | None = None,
        on_tick: Callable[[], None] | None = None,
    ) -> None:
        self._path = path
        self._make_hello = make_hello
        self._on_connected = on_connected
        self._on_event = on_event
        self._on_readable = on_readable
        self._on_tick = on_tick
        self._session: Session | None = None
        self._stopped = threading.Event()
        self._attempted = threading.Event()
        self._last_event = ""
        self._thread = threading.Thread(target=self._run, name="kvoffload-session", daemon=True)
        self.refused: SessionRefused | None = None
        """The daemon's last refusal, None once it has welcomed this client."""

    def start(self, wait_seconds: float = 0.0) -> Session | None:
        """Begin to connect; wait for the first attempt to end, where waiting is allowed (at start)."""
        self._thread.start()
        if wait_seconds:
            self._attempted.wait(wait_seconds)
        return self.current()

    def current(self) -> Session | None:
        """The open session, or None: then everything is a miss, and the thread is at it."""
        session = self._session
        return session if session is not None and session.is_open else None

    def close(self) -> None:
        """End the session and the thread; `current()` returns None from now on."""
        self._stopped.set()
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _run(self) -> None:
        pause_seconds = 0.0
        while not self._stopped.is_set():
            session = self._attempt()
            self._attempted.set()
            if session is None:
                pause_seconds = min(MAX_PAUSE_SECONDS, max(MIN_PAUSE_SECONDS, 2 * pause_seconds))
                self._stopped.wait(pause_seconds)
                continue
            pause_seconds = 0.0
            self._watch(session)
            if not self._stopped.is_set():
                self._say(f"the session with the node daemon ended: {session.closed_because}")
                self._stopped.wait(MIN_PAUSE_SECONDS)

    def _attempt(self) -> Session | None:
        session: Session | None = None
        try:
            session = Session.connect(self._path, self._make_hello())
            self._on_connected(session)
        except SessionRefused as error:
            self.refused = error
            self._say(f"the node daemon refused this engine: {error.reason.value}: {error}")
        except (DaemonUnavailable, ProtocolError) as error:
            self._say(f"no session with the node daemon: {error}")
        except Exception as error:  # noqa: BLE001 - this thread must not die: vLLM goes on without us and we try again
            self._say(f"connecting to the node daemon failed: {type(error).__name__}: {error}")
        else:
            self.refused = None
            self._session = session
            if self._stopped.is_set():  # closed meanwhile: before this it had nothing to close
                self.close()
            self._say(f"connected to the node daemon {session.welcome.daemon_version} (epoch {session.welcome.epoch})")
            return session
        if session is not None:
            session.close("it could not be used")
        return None

    def _watch(self, session: Session) -> None:
        poll = select.poll()
        poll.register(session, select.POLLRDHUP | (select.POLLIN if self._on_readable else 0))
        while session.is_open and not self._stopped.is_set():
            try:
                if self._on_tick is not None:
                    self._on_tick()
                for _, event in poll.poll(WATCH_SECONDS * 1000):
                    if self._on_readable is not None and event & select.POLLIN:
                        self._on_readable(session)
                    elif event & (select.POLLRDHUP | select.POLLHUP | select.POLLERR):
                        session.close("the daemon closed the connection")
            except DaemonUnavailable:
                continue  # the session is closed and says why
            except Exception as error:  # noqa: BLE001 - as above: this session ends, the thread goes on
                session.close(f"{type(error).__name__}: {error}")

    def _say(self, line: str) -> None:
        if line != self._last_event:
            self._last_event = line
            self._on_event(line)


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
