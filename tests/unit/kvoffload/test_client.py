"""The client against real sockets: what a daemon may do wrong ends a session, not the process, and blocks nobody."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from daemon_process import wait_until
from kvoffload.errors import DaemonUnavailable, ProtocolError, RefusalReason, SessionRefused
from kvoffload.protocol.client import MAX_BACKLOG_BYTES, Connector, Session, decode_from_daemon
from kvoffload.protocol.framing import FrameReader, pack_frame
from kvoffload.protocol.messages import Bound, Found, Hello, Lookup, Message, Refused, Seal, Welcome

HELLO = Hello(
    protocol_min=2, protocol_max=2, engine_id="e", role="scheduler", rank=-1, world_size=1, identity=b"i" * 32
)
WELCOME = Welcome(protocol=2, epoch=7, region_bytes=4096, extent_bytes=4096)


class Peer:
    """The daemon's end of connections, driven by the test: accepts, says what it is told, and closes at the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listening.bind(str(path))
        self.listening.listen()
        self.listening.settimeout(10)
        self.connections: list[socket.socket] = []

    def accept(self) -> socket.socket:
        connection, _ = self.listening.accept()
        connection.settimeout(10)
        self.connections.append(connection)
        return connection

    def welcome(self, message: Message = WELCOME, descriptors: tuple[int, ...] = ()) -> socket.socket:
        """Accept one connection, read its hello, answer."""
        connection = self.accept()
        reader = FrameReader()
        while reader.next_frame() is None:
            reader.feed(connection.recv(65536))
        frame = pack_frame(msgspec.msgpack.encode(message))
        if descriptors:
            socket.send_fds(connection, [frame], list(descriptors))
        else:
            connection.sendall(frame)
        return connection

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        self.listening.close()


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    peer = Peer(tmp_path / "daemon.sock")
    yield peer
    peer.close()


def connected(
    peer: Peer, message: Message = WELCOME, descriptors: tuple[int, ...] = ()
) -> tuple[Session, socket.socket]:
    found: list[socket.socket] = []
    thread = threading.Thread(target=lambda: found.append(peer.welcome(message, descriptors)))
    thread.start()
    try:
        return Session.connect(str(peer.path), HELLO, 10), (thread.join(), found[0])[1]
    finally:
        thread.join()


def test_a_welcome_brings_its_descriptors(peer: Peer) -> None:
    session, _ = connected(peer, descriptors=(0,))
    assert session.welcome == WELCOME
    (descriptor,) = session.take_descriptors()
    assert os.fstat(descriptor).st_ino == os.fstat(0).st_ino
    os.close(descriptor)


def test_descriptors_that_nobody_took_are_closed_with_the_session(peer: Peer) -> None:
    session, _ = connected(peer, descriptors=(0,))
    (descriptor,) = session.descriptors
    del session
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_refusal_carries_the_daemons_reason(peer: Peer) -> None:
    with pytest.raises(SessionRefused, match="64 engines") as caught:
        connected(peer, Refused("TooManyEngines", "64 engines are attached"))
    assert caught.value.reason is RefusalReason.TOO_MANY_ENGINES


def test_an_answer_that_is_no_welcome_is_a_protocol_error(peer: Peer) -> None:
    with pytest.raises(ProtocolError, match="Bound"):
        connected(peer, Bound(0))


def test_a_daemon_of_a_protocol_that_was_not_offered_is_a_protocol_error(peer: Peer) -> None:
    with pytest.raises(ProtocolError, match="protocol 3, this process 2 to 2"):
        connected(peer, msgspec.structs.replace(WELCOME, protocol=3))


def test_a_message_with_text_that_is_none_is_a_protocol_error() -> None:
    payload = msgspec.msgpack.encode(Refused("OK", "")).replace(b"OK", b"\xff\xfe")
    with pytest.raises(ProtocolError, match="utf-8"):
        decode_from_daemon(payload)


def test_nobody_listening_is_unavailable_at_once(tmp_path: Path) -> None:
    with pytest.raises(DaemonUnavailable):
        Session.connect(str(tmp_path / "nobody.sock"), HELLO, 10)


def test_a_daemon_that_never_answers_is_unavailable_in_time(peer: Peer) -> None:
    begin = time.monotonic()
    with pytest.raises(DaemonUnavailable):
        Session.connect(str(peer.path), HELLO, 0.05)
    assert time.monotonic() - begin < 5


def test_receive_waits_no_longer_than_it_may(peer: Peer) -> None:
    session, _ = connected(peer)
    begin = time.monotonic()
    assert session.receive(0.02) == []
    assert 0.015 < time.monotonic() - begin < 5


def test_messages_come_whole_however_they_were_cut(peer: Peer) -> None:
    session, connection = connected(peer)
    data = b"".join(pack_frame(msgspec.msgpack.encode(Found(number, b"12345678" * 50))) for number in range(20))
    received: list[object] = []
    for begin in range(0, len(data), 37):
        connection.sendall(data[begin : begin + 37])
        received += session.receive(0)
    wait_until(lambda: bool(received.extend(session.receive(0))) or len(received) == 20)
    assert [message.request for message in received if isinstance(message, Found)] == list(range(20))


def test_a_daemon_that_does_not_read_ends_the_session_and_blocks_nobody(peer: Peer) -> None:
    session, _ = connected(peer)
    messages = [Seal(7, bytes(8 * 8000))] * (2 * MAX_BACKLOG_BYTES // 64000 + 20)
    begin = time.monotonic()
    with pytest.raises(DaemonUnavailable, match="does not read"):
        session.send(*messages)
    assert time.monotonic() - begin < 5
    assert not session.is_open


def test_what_the_socket_does_not_take_is_sent_later_in_order(peer: Peer) -> None:
    session, connection = connected(peer)
    for number in range(20):
        session.send(Lookup(number, bytes(60000)))
    numbers: list[int] = []
    reader = FrameReader()
    decoder = msgspec.msgpack.Decoder(Lookup)
    while len(numbers) < 20:
        reader.feed(connection.recv(65536))
        while (payload := reader.next_frame()) is not None:
            numbers.append(decoder.decode(payload).request)
        session.receive(0)
    assert numbers == list(range(20))


@pytest.mark.parametrize(
    "data",
    [b"\xff\xff\xff\xff", b"\x00\x00\x00\x00", pack_frame(b"\x93\xa3abc\x01\x02"), pack_frame(b"\xc1")],
    ids=["length beyond the limit", "length zero", "unknown message", "not msgpack"],
)
def test_nonsense_ends_the_session(peer: Peer, data: bytes) -> None:
    session, connection = connected(peer)
    connection.sendall(data)
    with pytest.raises(DaemonUnavailable):
        session.receive(10)
    assert session.closed_because
    with pytest.raises(DaemonUnavailable):
        session.send(Bound(0))


def test_what_came_before_the_end_is_still_received(peer: Peer) -> None:
    session, connection = connected(peer)
    connection.sendall(pack_frame(msgspec.msgpack.encode(Bound(3))))
    connection.close()
    assert session.receive(10) == [Bound(3)]
    with pytest.raises(DaemonUnavailable):
        session.receive(10)


class Events:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.sessions: list[Session] = []


def keep_connected(peer: Peer, events: Events) -> Connector:
    return Connector(
        str(peer.path), make_hello=lambda: HELLO, on_connected=events.sessions.append, on_event=events.lines.append
    )


def test_a_connector_connects_again_by_itself_and_says_each_change_once(peer: Peer) -> None:
    events = Events()
    connector = keep_connected(peer, events)
    connector.start()
    first = peer.welcome()
    wait_until(lambda: connector.current() is not None)
    first.close()
    wait_until(lambda: connector.current() is None)
    peer.welcome()
    wait_until(lambda: connector.current() is not None)
    connector.close()
    assert connector.current() is None
    assert len(events.sessions) == 2
    assert [line.split()[0] for line in events.lines] == ["connected", "the", "connected"]


def test_current_never_waits_for_a_daemon_that_does_not_answer(peer: Peer) -> None:
    connector = keep_connected(peer, Events())
    connector.start()
    begin = time.monotonic()
    assert all(connector.current() is None for _ in range(1000))
    assert time.monotonic() - begin < 1
    connector.close()


def test_an_exception_in_a_callback_does_not_end_the_thread(peer: Peer) -> None:
    lines: list[str] = []
    failures = iter([ValueError("a bug")])

    def on_connected(_: Session) -> None:
        error = next(failures, None)
        if error is not None:
            raise error

    connector = Connector(str(peer.path), make_hello=lambda: HELLO, on_connected=on_connected, on_event=lines.append)
    connector.start()
    unused = peer.welcome()
    peer.welcome()
    wait_until(lambda: connector.current() is not None)
    assert unused.recv(1) == b"", "a session that could not be used is closed"
    connector.close()
    assert "ValueError: a bug" in lines[0]


def test_an_exception_in_what_is_done_regularly_ends_the_session_and_not_the_thread(peer: Peer) -> None:
    events, failures = Events(), iter([ValueError("a bug")])

    def on_tick() -> None:
        error = next(failures, None)
        if error is not None:
            raise error

    connector = Connector(
        str(peer.path),
        make_hello=lambda: HELLO,
        on_connected=events.sessions.append,
        on_event=events.lines.append,
        on_tick=on_tick,
    )
    connector.start()
    peer.welcome()
    peer.welcome()
    wait_until(lambda: len(events.sessions) == 2 and connector.current() is events.sessions[1])
    connector.close()
    assert events.sessions[0].closed_because == "ValueError: a bug"


def test_a_connector_closed_in_the_middle_of_an_attempt_has_no_session_afterwards(peer: Peer) -> None:
    connecting, closed = threading.Event(), threading.Event()

    def on_connected(_: Session) -> None:
        connecting.set()
        assert closed.wait(10)

    connector = Connector(str(peer.path), make_hello=lambda: HELLO, on_connected=on_connected, on_event=lambda _: None)
    connector.start()
    connection = peer.welcome()
    assert connecting.wait(10)
    connector.close()
    closed.set()
    assert connection.recv(1) == b"", "the session is closed"
    assert connector.current() is None


def test_a_refusal_is_kept_and_tried_again(peer: Peer) -> None:
    events = Events()
    connector = keep_connected(peer, events)
    connector.start()
    peer.welcome(Refused("PoolPaused", "the pool is paused"))
    wait_until(lambda: connector.refused is not None)
    peer.welcome()
    wait_until(lambda: connector.current() is not None)
    assert connector.refused is None
    connector.close()
