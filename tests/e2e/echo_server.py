"""The least that a webhook of aiohttp does: read a JSON body over TLS, answer a small one. Takes a port.

What latency is compared with on a machine that other tests share.
"""

import json
import sys
from datetime import UTC, datetime, timedelta

from aiohttp import web

from kvoffload_operator.webhook.certificates import load_context, make_certificate


async def echo(request: web.Request) -> web.Response:
    """Answer as an admission webhook that has nothing to say."""
    review = json.loads(await request.read())
    return web.json_response({"response": {"uid": review["request"]["uid"], "allowed": True, "patch": "-"}})


if __name__ == "__main__":
    pair = make_certificate(("echo",), now=datetime.now(UTC), lifetime=timedelta(days=1))
    app = web.Application(client_max_size=4 << 20)
    app.add_routes([web.post("/mutate-pods/0", echo)])
    context = load_context(pair["tls.crt"], pair["tls.key"])
    web.run_app(app, port=int(sys.argv[1]), ssl_context=context, access_log=None, print=None)
