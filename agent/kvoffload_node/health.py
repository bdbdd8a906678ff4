"""`/metrics`, `/healthz` and `/readyz` of the daemon, and `/healthz` of the attacher.

Runs in both processes, in a thread, on the standard library's server: a daemon that is back sooner is worth more than
a web framework. The daemon's answers are made in its event loop, so that nothing changes while it is read, and so that
/healthz fails when the loop is stuck.

    /healthz   the loop answers: do not restart it
    /readyz    engines can attach now; else 503 and why not
    /metrics   Prometheus' text format
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import TimeoutError as LoopIsStuck
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

Answer = tuple[int, str, bytes]
"""Status, content type, body."""

LOOP_SECONDS = 5.0
"""A loop that does not answer for so long is stuck."""
REQUEST_SECONDS = 10.0
"""A connection that says nothing for so long is ended, and its thread with it."""
TEXT = "text/plain; charset=utf-8"


def start_endpoints(port: int, answers: dict[str, Callable[[], Answer]]) -> ThreadingHTTPServer:
    """Serve each path with what its function returns. Stop it with `shutdown` and `server_close`."""

    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_SECONDS

        def do_GET(self) -> None:
            answer = answers.get(self.path.partition("?")[0])
            status, content_type, body = answer() if answer else (404, TEXT, b"not found\n")
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Probes are not logged."""

    server = ThreadingHTTPServer(("", port), Handler)
    server.daemon_threads = True
    Thread(target=server.serve_forever, name="endpoints", daemon=True).start()
    return server


def in_loop(loop: asyncio.AbstractEventLoop, make: Callable[[], Answer]) -> Callable[[], Answer]:
    """The same answer, made in the event loop; 503 if that does not come round to it."""

    async def make_there() -> Answer:
        return make()

    def answer() -> Answer:
        try:
            return asyncio.run_coroutine_threadsafe(make_there(), loop).result(LOOP_SECONDS)
        except LoopIsStuck:
            return 503, TEXT, f"the event loop has not answered for {LOOP_SECONDS:g} s\n".encode()

    return answer
