"""The webhook's row: 50 pods at once, beside the least that a server of aiohttp does over TLS."""

import asyncio
import secrets
import ssl
import subprocess
import sys
import time

import aiohttp

from bench.rows import Measured, Row
from tests.operator_builders import pod_manifest

NUM_CONNECTIONS = 50
NUM_REQUESTS = 20
"""One after the other on each connection, as the API server calls."""
NUM_ROUNDS = 5
TARGET_MS = 50.0


def run() -> list[Row]:
    """The webhook's only row."""
    ours, bare = (_measure(kind) for kind in ("ours", "bare"))
    met = ours.median <= TARGET_MS
    name = f"admission, {NUM_CONNECTIONS} pods at once, p99"
    return [Row(name, "ms", ours, bare, "bare aiohttp server", f"under {TARGET_MS:g}", met=met)]


def _measure(kind: str) -> Measured:
    server = subprocess.Popen([sys.executable, "-m", "bench.admission", kind], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        return asyncio.run(_measure_p99(int(server.stdout.readline())))
    finally:
        server.kill()
        server.communicate()


async def _measure_p99(port: int) -> Measured:
    """p99 of each round, milliseconds."""
    command = ["vllm", "serve", "deepseek-ai/DeepSeek-V3", "-tp", "8"]
    review = {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {"uid": secrets.token_hex(8), "namespace": "default", "object": pod_manifest(command=command)},
    }
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    durations: list[float] = []

    async def call_in_turn(session: aiohttp.ClientSession) -> None:
        for _ in range(NUM_REQUESTS):
            begun = time.perf_counter()
            async with session.post(f"https://127.0.0.1:{port}/mutate-pods/0", json=review) as answer:
                assert (await answer.json())["response"]["patch"]
            durations.append(1000 * (time.perf_counter() - begun))

    rounds = []
    connector = aiohttp.TCPConnector(ssl=context, limit=NUM_CONNECTIONS)
    async with aiohttp.ClientSession(connector=connector) as session:
        for _ in range(1 + NUM_ROUNDS):
            durations.clear()
            await asyncio.gather(*(call_in_turn(session) for _ in range(NUM_CONNECTIONS)))
            rounds.append(sorted(durations)[int(len(durations) * 0.99)])
    return Measured.of(rounds[1:])  # in the first, connections are made and caches filled
