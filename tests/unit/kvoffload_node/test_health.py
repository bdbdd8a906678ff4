"""The daemon's endpoints: whoever connects, and however often, keeps neither threads nor the event loop from others."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import endpoints
from daemon_process import wait_until
from kvoffload_node import health
from kvoffload_node.health import TEXT, Answer, Ended, Endpoints, InLoop

OK: Answer = (200, TEXT, b"ok\n")


@contextlib.contextmanager
def serving(**answers: Callable[[], Answer]) -> Iterator[tuple[Endpoints, int]]:
    server = Endpoints(0, {"/healthz": lambda: OK, **{f"/{name}": make for name, make in answers.items()}})
    try:
        yield server, server.server_address[1]
    finally:
        server.stop()


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=20)


def ask(port: int, path: str = "/healthz") -> bytes:
    with connect(port) as sock:
        sock.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
        return b"".join(iter(lambda: sock.recv(1 << 16), b""))


def test_a_connection_that_says_little_and_that_slowly_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "REQUEST_SECONDS", 0.2)
    monkeypatch.setattr(health, "LOOK_SECONDS", 0.01)
    with serving() as (server, port), connect(port) as silent, connect(port) as slow:
        slow.settimeout(0.02)
        deadline = time.monotonic() + 20
        text = iter("GET /healthz HTTP/1.0\r\nX: " + "x" * 10_000)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while time.monotonic() < deadline:
                slow.sendall(next(text).encode())
                with contextlib.suppress(TimeoutError):
                    assert slow.recv(100) == b""
                    break
        assert time.monotonic() < deadline, "each byte gave it as long again"
        assert silent.recv(100) == b""
        assert server.ended[Ended.TOO_SLOW] == 2


def test_200_silent_connections_keep_no_thread_and_hold_up_no_probe(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as (server, port), contextlib.ExitStack() as silent:
        before = threading.active_count()
        for _ in range(200):
            silent.enter_context(connect(port))
        assert ask(port).endswith(b"ok\n")
        assert server.ended[Ended.TOO_MANY] >= 200 - health.MAX_REQUESTS
        wait_until(lambda: threading.active_count() <= before + health.MAX_REQUESTS)
    assert caplog.text.count("a connection of 127.0.0.1 was ended (TooMany)") == 1
    assert "keep all but Prometheus and the kubelet" in caplog.text


def test_answers_that_nobody_reads_make_room_in_time_while_another_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(health, "REQUEST_SECONDS", 0.5)
    monkeypatch.setattr(health, "LOOK_SECONDS", 0.01)
    with serving(large=lambda: (200, TEXT, bytes(16 << 20))) as (server, port), contextlib.ExitStack() as unread:
        for _ in range(health.MAX_REQUESTS):
            unread.enter_context(connect(port)).sendall(b"GET /large HTTP/1.0\r\n\r\n")
        assert ask(port).endswith(b"ok\n")
        assert server.ended[Ended.TOO_SLOW] >= 1


def test_while_every_answer_is_being_made_the_next_one_waits_and_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    def slow() -> Answer:
        assert go_on.wait(20)
        return OK

    with serving(slow=slow) as (server, port), ThreadPoolExecutor(health.MAX_REQUESTS + 1) as askers:
        found = [askers.submit(ask, port, "/slow") for _ in range(health.MAX_REQUESTS)]
        wait_until(lambda: sum(one.is_being_made for one in server._open.values()) == health.MAX_REQUESTS)
        is_held_up, wait = threading.Event(), server._changing.wait
        monkeypatch.setattr(server._changing, "wait", lambda seconds: (is_held_up.set(), wait(seconds))[1])
        found.append(askers.submit(ask, port))
        try:
            assert is_held_up.wait(20)
        finally:
            go_on.set()
        assert all(one.result(20).endswith(b"ok\n") for one in found)
        assert sum(server.ended.values()) == 0


@contextlib.contextmanager
def running_loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)
        loop.close()


def test_a_flood_of_scrapes_has_its_share_of_the_loop_and_all_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "MAX_PAUSE_SECONDS", 60.0)
    num_made = 0

    def make() -> Answer:
        nonlocal num_made
        num_made += 1
        end = time.thread_time() + 0.005
        while time.thread_time() < end:
            pass
        return OK

    with running_loop() as loop, serving(metrics=InLoop(loop, make)) as (_, port):
        begun = time.monotonic()
        with ThreadPoolExecutor(health.MAX_REQUESTS) as flood:
            found = list(flood.map(lambda _: ask(port, "/metrics"), range(60)))
        took = time.monotonic() - begun
        assert [answer.endswith(b"ok\n") for answer in found] == [True] * 60
        assert (num_made - 1) * 0.005 / health.LOOP_SHARE <= took, "each answer was followed by its pause"
        assert num_made < 60, "those who waited shared one"


def test_an_answer_is_never_older_than_its_question() -> None:
    count = 0

    def make() -> Answer:
        return 200, TEXT, f"{count}".encode()

    with running_loop() as loop:
        answer = InLoop(loop, make)
        for count in range(1, 50):
            assert answer() == (200, TEXT, f"{count}".encode())


def test_who_asks_while_an_answer_is_being_made_gets_a_later_one() -> None:
    begun, go_on, asked, count = threading.Event(), threading.Event(), threading.Event(), 0

    def make() -> Answer:
        nonlocal count
        count += 1
        if count == 1:
            begun.set()
            assert go_on.wait(20)
        return 200, TEXT, f"{count}".encode()

    with running_loop() as loop, ThreadPoolExecutor(2) as askers:
        answer = InLoop(loop, make)
        first = askers.submit(answer)
        assert begun.wait(20)
        second = askers.submit(lambda: (asked.set(), answer())[1])
        assert asked.wait(20)
        go_on.set()
        assert [one.result(20)[2] for one in (first, second)] == [b"1", b"2"]


def test_an_answer_that_cannot_be_made_is_500_and_the_next_one_is_made() -> None:
    answers = iter([OK])

    def make() -> Answer:
        return next(answers) if go_well else (_ for _ in ()).throw(RuntimeError("odd"))

    go_well = False
    with running_loop() as loop, serving(metrics=InLoop(loop, make)) as (_, port):
        assert b" 500 " in ask(port, "/metrics").partition(b"\r\n")[0]
        go_well = True
        assert endpoints.scrape(port) == "ok\n"


def test_a_loop_that_is_stuck_is_503(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "LOOP_SECONDS", 0.05)
    with running_loop() as loop:
        held = threading.Event()
        loop.call_soon_threadsafe(held.wait, 20)
        answer = InLoop(loop, lambda: OK)
        assert answer()[0] == 503
        held.set()
        wait_until(lambda: answer() == OK)
