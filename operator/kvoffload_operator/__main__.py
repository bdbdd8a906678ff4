"""Starts a process of the control plane: `python -m kvoffload_operator run` (operator) or `webhook` (admission)."""

import os
import signal

if __name__ == "__main__":
    # A container's first process gets only the signals that it handles, and what is imported below takes a second: one
    # that is told to stop meanwhile would not hear it, and hold its pod up until the kubelet kills it.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))

import argparse
import asyncio
import contextlib
import logging
import ssl
import sys
import threading
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from aiohttp import web

from kvoffload.api.keys import CERTIFICATE_PATH
from kvoffload_operator import metrics
from kvoffload_operator.kube import KubeClient
from kvoffload_operator.operator import run_operator
from kvoffload_operator.settings import CertificateMode, Settings
from kvoffload_operator.webhook.certificates import CertificateWatch, FolderSource, SecretSource, utc_now
from kvoffload_operator.webhook.server import AdmissionServer

logger = logging.getLogger(__name__)

DRAIN_SECONDS = 3.0


async def serve_metrics(
    port: int, *, is_ready: Callable[[], bool], others: Iterable[web.RouteDef] = ()
) -> web.AppRunner:
    """`/metrics`, `/healthz` (the loop turns), `/readyz`, and what else a process tells everybody."""

    async def metrics_handler(_: web.Request) -> web.Response:
        return web.Response(body=metrics.render(), content_type="text/plain", charset="utf-8")

    async def healthy(_: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def ready(_: web.Request) -> web.Response:
        return web.Response(text="ok") if is_ready() else web.Response(status=503, text="not ready")

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics_handler), web.get("/healthz", healthy), web.get("/readyz", ready)])
    app.add_routes(others)
    return await _serve(app, port)


async def _serve(app: web.Application, port: int, context: ssl.SSLContext | None = None) -> web.AppRunner:
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, None, port, ssl_context=context, backlog=1024).start()
    return runner


async def run_webhook(settings: Settings, stop: asyncio.Event) -> int:
    """Serve admission until told to stop; requests in flight are answered."""
    kube = await KubeClient.connect(
        user_agent=f"kvoffload-webhook/{settings.pod_name}", timeout_seconds=2.0, attempts=2
    )
    source = (
        SecretSource(kube, namespace=settings.namespace, name=settings.certificate_secret)
        if settings.certificate_mode is CertificateMode.SELF
        else FolderSource(Path(settings.certificate_dir))
    )
    watch = CertificateWatch(source)
    serving = False

    async def certificate(_: web.Request) -> web.Response:
        """What is served now, for `kubectl kvoffload doctor`: its users need no right to the Secret with the key."""
        served = watch.certificate
        return web.Response(status=503, text="none yet") if served is None else web.Response(body=served)

    metrics.begin_injections()
    runners = [
        await serve_metrics(
            settings.metrics_port,
            is_ready=lambda: serving and not watch.has_expired(utc_now()),
            others=[web.get(CERTIFICATE_PATH, certificate)],
        )
    ]
    follow: asyncio.Task[None] | None = None
    try:
        first = asyncio.create_task(watch.wait())
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait({first, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not first.done():
            first.cancel()
            return 0
        context = first.result()
        server = AdmissionServer(
            kube,
            operator_namespace=settings.namespace,
            step_deadline_seconds=settings.engine_step_deadline_seconds,
        )
        runners.append(await _serve(server.build_app(), settings.webhook_port, context))
        serving = True
        logger.info("serving admission on port %d", settings.webhook_port)
        follow = asyncio.create_task(watch.follow(context))
        await stop.wait()
        # API servers keep their connections after the endpoint is gone: close each with an answer, none with a request
        serving, server.is_draining = False, True
        await asyncio.sleep(DRAIN_SECONDS)
    finally:
        if follow is not None:
            follow.cancel()
        for runner in reversed(runners):
            await runner.cleanup()  # waits for requests in flight
        await kube.close()
    return 0


async def _run_operator(settings: Settings, stop: asyncio.Event) -> int:
    metrics.begin_reconciliations()
    runner = await serve_metrics(settings.metrics_port, is_ready=lambda: True)
    work = asyncio.create_task(run_operator(settings))
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work
        return 0
    finally:
        stopped.cancel()
        await runner.cleanup()


def _hear(signals: Collection[signal.Signals], stop: asyncio.Event) -> None:
    """Set `stop` at the first of these signals. A thread waits for it, and nobody else gets it: kopf would put its own
    handlers in the place of ours, wait 5 s for tasks that are not its own, and hear nothing while it is begun again."""
    loop = asyncio.get_running_loop()
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # threads that are started later inherit it

    def wait() -> None:
        signal.sigwait(signals)
        loop.call_soon_threadsafe(stop.set)

    threading.Thread(target=wait, name="signals", daemon=True).start()


async def _main(command: str, settings: Settings) -> int:
    stop = asyncio.Event()
    _hear((signal.SIGTERM, signal.SIGINT), stop)
    return await (run_webhook if command == "webhook" else _run_operator)(settings, stop)


def main(arguments: list[str] | None = None) -> int:
    """Parse, set up logging, run."""
    parser = argparse.ArgumentParser(prog="python -m kvoffload_operator", description=__doc__)
    parser.add_argument("command", choices=("run", "webhook"))
    command = parser.parse_args(arguments).command
    settings = Settings()
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stdout
    )
    logging.getLogger("kopf").setLevel(logging.WARNING)
    return asyncio.run(_main(command, settings))


if __name__ == "__main__":
    sys.exit(main())
