"""`/metrics`, `/healthz` and `/readyz` of the daemon, and `/healthz` of the attacher.

Runs in both processes. /healthz: the loop answers, so do not restart it. /readyz: engines can attach now.
"""

from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector


async def start_daemon_endpoints(port: int, collector: Collector, problem: Callable[[], str]) -> web.AppRunner:
    """Serve the daemon's endpoints; `problem()` is empty while engines can attach, else says why not."""
    registry = CollectorRegistry()
    registry.register(collector)

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        why = problem()
        return web.Response(status=503 if why else 200, text=(why or "ok") + "\n")

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, port=port).start()
    return runner


def start_attacher_endpoint(port: int, is_alive: Callable[[], bool]) -> ThreadingHTTPServer:
    """Serve the attacher's /healthz in a thread: 200 while its loop looks around, 503 once it no longer does."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path == "/healthz"
            self.send_response((200 if is_alive() else 503) if found else 404)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Probes are not logged."""

    server = ThreadingHTTPServer(("", port), Handler)
    Thread(target=server.serve_forever, name="health", daemon=True).start()
    return server
