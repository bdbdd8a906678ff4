"""An admission server over TLS, in a process of its own: `python -m bench.admission ours|bare`. Prints its port.

`ours` is the webhook's application beside an API server that knows one pool; `bare` reads a JSON body and answers a
small one, the least that a webhook of aiohttp does.
"""

import asyncio
import json
import sys
from datetime import UTC, datetime, timedelta
from typing import Any, cast

from aiohttp import web

from kvoffload_operator.kube import POOLS, KubeClient, Resource
from kvoffload_operator.webhook.certificates import load_context, make_certificate
from kvoffload_operator.webhook.server import AdmissionServer
from tests.operator_builders import pool_manifest


class OnePool:
    """What the webhook asks an API server for."""

    async def get(self, resource: Resource, name: str) -> dict[str, Any] | None:
        """The pool, whatever its name."""
        return pool_manifest(name) if resource is POOLS else None


async def answer_nothing(request: web.Request) -> web.Response:
    """As a webhook that has nothing to say."""
    review = json.loads(await request.read())
    return web.json_response({"response": {"uid": review["request"]["uid"], "allowed": True, "patch": "-"}})


def build_app(kind: str) -> web.Application:
    """The application of that kind."""
    if kind == "ours":
        kube = cast(KubeClient, OnePool())
        return AdmissionServer(kube, operator_namespace="kvoffload-system").build_app()
    app = web.Application(client_max_size=4 << 20)
    app.add_routes([web.post("/mutate-pods/0", answer_nothing)])
    return app


async def main(kind: str) -> None:
    """Serve until killed."""
    pair = make_certificate(("bench",), now=datetime.now(UTC), lifetime=timedelta(days=1))
    runner = web.AppRunner(build_app(kind), access_log=None)
    await runner.setup()
    context = load_context(pair["tls.crt"], pair["tls.key"])
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context, backlog=1024).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


asyncio.run(main(sys.argv[1]))
