"""`/metrics`, `/healthz` and `/readyz` of the daemon, and `/healthz` of the attacher.

Runs in both processes, in threads, on the standard library's server: a daemon that is back sooner is worth more than
a web framework. The daemon's answers are made in its event loop, so that nothing changes while it is read, and so that
/healthz fails when the loop is stuck.

    /healthz   the loop answers: do not restart it
    /readyz    engines can attach now; else 503 and why not
    /metrics   Prometheus' text format

Any pod may reach the port (where no NetworkPolicy keeps it out), so what it costs is bounded:

    accepted ──> its request is read ──> its answer is made ──> written ──> closed
                 (ended where that takes REQUEST_SECONDS, or where it is the oldest of MAX_REQUESTS)
                                         (waits until the loop has had its LOOP_SHARE: one answer for all who wait)
"""

import asyncio
import contextlib
import logging
import math
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import TimeoutError as LoopIsStuck
from dataclasses import dataclass
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

log = logging.getLogger(__name__)

Answer = tuple[int, str, bytes]
"""Status, content type, body."""

LOOP_SECONDS = 5.0
"""A loop that does not answer for so long is stuck."""
MAX_PAUSE_SECONDS = 1.0
LOOP_SHARE = 0.05
"""Of the loop's time that the answers of one path may take, however often they are asked for; after each it is left
alone, for `MAX_PAUSE_SECONDS` at most."""
REQUEST_SECONDS = 10.0
"""A connection that is not done after so long is ended, and its thread with it."""
MAX_REQUESTS = 8
"""Connections at once, each with a thread; the kubelet and Prometheus need three."""
GRACE_SECONDS = 0.02
"""A connection has so long to be heard before another may take its place."""
SEND_BUFFER_BYTES = 1 << 20
"""An answer is written at once, whether it is read or not."""
SAY_AGAIN_SECONDS = 60.0
LOOK_SECONDS = 0.5
"""How often overdue connections are looked for."""
TEXT = "text/plain; charset=utf-8"


class Ended(StrEnum):
    """Why a connection was ended before it had its answer; a closed set, used as metric label."""

    TOO_SLOW = "TooSlow"
    TOO_MANY = "TooMany"


@dataclass(slots=True)
class _Open:
    """A connection that has a thread."""

    address: str
    since: float
    is_heard: bool = False
    """Its request was read whole."""
    is_being_made: bool = False
    """Its answer is: that is bounded by itself."""


class Endpoints(ThreadingHTTPServer):
    """Serves each path with what its function returns, in a thread; `stop` ends it."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, port: int, answers: dict[str, Callable[[], Answer]]) -> None:
        self.answers = answers
        self.ended: Counter[str] = Counter({reason.value: 0 for reason in Ended})
        self._open: dict[Any, _Open] = {}
        self._changing = threading.Condition()
        self._say_at = 0.0
        self._is_stopping = False
        super().__init__(("", port), _Handler)
        Thread(target=self.serve_forever, args=(LOOK_SECONDS,), name="endpoints", daemon=True).start()

    def stop(self) -> None:
        """Answer no more."""
        with self._changing:
            self._is_stopping = True
            self._changing.notify_all()
        self.shutdown()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """A connection was accepted: make room for it, or let it wait until an answer is made."""
        with self._changing:
            while len(self._open) >= MAX_REQUESTS and not self._is_stopping:
                self.service_actions()  # which nobody else calls meanwhile
                unheard = [(found.since, sock) for sock, found in self._open.items() if not found.is_heard]
                since, oldest = unheard[0] if unheard else (math.inf, None)
                if (wait_seconds := since + GRACE_SECONDS - time.monotonic()) <= 0:
                    self._end(oldest, Ended.TOO_MANY)
                else:
                    self._changing.wait(min(wait_seconds, LOOK_SECONDS))
            request.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            self._open[request] = _Open(client_address[0], time.monotonic())
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """A connection's thread is done with it."""
        with self._changing:
            self._open.pop(request, None)
            self._changing.notify_all()
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called at least every `LOOK_SECONDS`."""
        with self._changing:
            oldest = time.monotonic() - REQUEST_SECONDS
            for sock, found in list(self._open.items()):
                if found.since < oldest and not found.is_being_made:
                    self._end(sock, Ended.TOO_SLOW)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - socketserver names it
        """A peer that hangs up is nothing to log; what else is raised is a bug."""
        level = logging.DEBUG if isinstance(sys.exception(), OSError) else logging.ERROR
        log.log(level, "a request of %s ended", client_address[0], exc_info=True)

    def make(self, request: Any, answer: Callable[[], Answer]) -> Answer:
        """The answer to a request that was read whole."""
        with self._changing:
            if (found := self._open.get(request)) is not None:
                found.is_heard = found.is_being_made = True
        try:
            return answer()
        finally:
            with self._changing:
                if found is not None:
                    found.is_being_made = False
                self._changing.notify_all()

    def _end(self, sock: Any, reason: Ended) -> None:
        found = self._open.pop(sock)
        self.ended[reason] += 1
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)  # its thread reads the end, and closes it
        if (now := time.monotonic()) >= self._say_at:
            self._say_at = now + SAY_AGAIN_SECONDS
            log.warning(
                "port %d: a connection of %s was ended (%s): it was open for %.1f s, %d others are, allowed are %d for "
                "%g s; keep all but Prometheus and the kubelet from that port",
                self.server_address[1], found.address, reason, now - found.since, len(self._open), MAX_REQUESTS,
                REQUEST_SECONDS,
            )  # fmt: skip


class _Handler(BaseHTTPRequestHandler):
    server: Endpoints

    def do_GET(self) -> None:
        """One request, then the connection is closed."""
        answer = self.server.answers.get(self.path.partition("?")[0])
        status, content_type, body = self.server.make(self.request, answer) if answer else (404, TEXT, b"not found\n")
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Probes are not logged."""


class InLoop:
    """An answer that is made in the event loop, in its `LOOP_SHARE`; 503 if the loop does not come round to it.

    Whoever asks while one is waited for gets that one: it is made after they asked.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, make: Callable[[], Answer]) -> None:
        self._loop = loop
        self._make = make
        self._changing = threading.Condition()
        self._num_begun = self._num_made = 0
        self._is_taken = False
        """One of those who wait makes the next answer."""
        self._not_before = 0.0
        self._answer: Answer = (503, TEXT, b"")

    def __call__(self) -> Answer:
        """Blocks until the answer is made."""
        with self._changing:
            wanted = self._num_begun + 1
            while self._num_made < wanted and self._is_taken:
                self._changing.wait()
            if self._num_made >= wanted:
                return self._answer
            self._is_taken = True
        time.sleep(max(0.0, self._not_before - time.monotonic()))
        with self._changing:
            self._num_begun += 1
        answer = self._ask_loop()
        with self._changing:
            self._answer = answer
            self._num_made += 1
            self._is_taken = False
            self._changing.notify_all()
        return answer

    def _ask_loop(self) -> Answer:
        async def make_there() -> Answer:
            begun = time.thread_time()
            try:
                return self._make()
            finally:
                pause_seconds = (time.thread_time() - begun) / LOOP_SHARE
                self._not_before = time.monotonic() + min(MAX_PAUSE_SECONDS, pause_seconds)

        made = asyncio.run_coroutine_threadsafe(make_there(), self._loop)
        try:
            return made.result(LOOP_SECONDS)
        except LoopIsStuck:
            made.cancel()
            return 503, TEXT, f"the event loop has not answered for {LOOP_SECONDS:g} s\n".encode()
        except Exception:
            log.exception("an answer could not be made")
            return 500, TEXT, b"the answer could not be made, the log says why\n"
