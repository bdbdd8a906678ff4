"""A proxy before the API server that can answer with errors, hang, or cut its client off, as networks do.

Runs in a thread of the test with an event loop of its own. Watches are passed on as they stream.
"""

import asyncio
import ssl
import threading
from collections import Counter
from collections.abc import Callable

import aiohttp
from aiohttp import web

Fault = Callable[[str, str, int], int | None]
"""Method, path and the number of the request, from 1; returns the status to answer with, None to pass it on."""


class FaultyProxy:
    """Listens on `port`; what happens to requests is set while it runs."""

    def __init__(self, upstream: str, port: int) -> None:
        self._upstream, self._port = upstream, port
        self.fault: Fault = lambda method, path, number: None
        self.stand_ins: dict[str, object] = {}
        """What the proxy itself answers for a path, as JSON."""
        self.is_cut_off = False
        self.answered: Counter[int] = Counter()
        """Statuses that the proxy answered with by itself."""
        self._number = 0
        self._started = threading.Event()
        self._stopped: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    @property
    def url(self) -> str:
        """Where clients find it."""
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> "FaultyProxy":
        """Begin to listen."""
        self._thread.start()
        if not self._started.wait(10):
            raise TimeoutError("the proxy did not begin to listen")
        return self

    def stop(self) -> None:
        """End it."""
        if self._loop is not None and self._stopped is not None:
            self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(10)

    async def _run(self) -> None:
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connector = aiohttp.TCPConnector(ssl=context, limit=0)
        async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:
            app = web.Application(client_max_size=1 << 24)

            async def handle(request: web.Request) -> web.StreamResponse:
                return await self._handle(session, request)

            app.router.add_route("*", "/{path:.*}", handle)
            runner = web.AppRunner(app, shutdown_timeout=1.0)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", self._port).start()
            self._started.set()
            await self._stopped.wait()
            await runner.cleanup()

    async def _handle(self, session: aiohttp.ClientSession, request: web.Request) -> web.StreamResponse:
        if self.is_cut_off:
            await asyncio.sleep(3600)
        self._number += 1
        status = self.fault(request.method, request.path_qs, self._number)
        if status is not None:
            self.answered[status] += 1
            body = {
                "kind": "Status",
                "status": "Failure",
                "code": status,
                "reason": "Injected",
                "message": "by the test",
            }
            return web.json_response(body, status=status, headers={"Retry-After": "1"})
        if request.path in self.stand_ins:
            return web.json_response(self.stand_ins[request.path])
        headers = {key: value for key, value in request.headers.items() if key.lower() != "host"}
        async with session.request(
            request.method,
            self._upstream + request.path_qs,
            headers=headers,
            data=await request.read() or None,
            timeout=aiohttp.ClientTimeout(total=None),
        ) as upstream:
            kept = {"Content-Type": upstream.headers.get("Content-Type", "application/json")}
            response = web.StreamResponse(status=upstream.status, headers=kept)
            await response.prepare(request)
            try:
                async for chunk in upstream.content.iter_any():
                    if self.is_cut_off:
                        await asyncio.sleep(3600)
                    await response.write(chunk)
            except (ConnectionResetError, aiohttp.ClientError):
                return response
            await response.write_eof()
            return response
