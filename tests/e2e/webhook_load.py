"""Many pods at once: what became of each, and how long the webhook took."""

import asyncio
import json
import ssl
from dataclasses import dataclass

import aiohttp

from e2e.control_plane import ControlPlane, wait_until
from e2e.webhook_replicas import DEEPSEEK, is_injected
from kvoffload.api.keys import WEBHOOK_REPLICA_ANNOTATION
from operator_builders import pod_manifest


@dataclass
class Load:
    """What many creations at once saw."""

    num_injected: int = 0
    num_missed: int = 0
    num_failed: int = 0
    num_by_second: int = 0
    """Of the injected, those that replica 1 answered."""

    @property
    def num_answers(self) -> int:
        return self.num_injected + self.num_missed + self.num_failed


async def wait_for_more(load: Load, number: int) -> None:
    """Until as many more answers came, whatever they were."""
    wanted = load.num_answers + number
    await asyncio.to_thread(wait_until, lambda: load.num_answers >= wanted, f"{number} more answers")


async def create_many(plane: ControlPlane, load: Load, *, until: asyncio.Event, at_least: int, parallel: int) -> None:
    """Create pods (dry run) until told to stop and `at_least` were made."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    url = f"{plane.url}/api/v1/namespaces/default/pods?dryRun=All"
    body = json.dumps({"apiVersion": "v1", "kind": "Pod", **pod_manifest(command=DEEPSEEK)})
    headers = {"Authorization": f"Bearer {plane.admin_token}", "Content-Type": "application/json"}

    async def worker(session: aiohttp.ClientSession) -> None:
        while not until.is_set() or load.num_answers < at_least:
            async with session.post(url, data=body, headers=headers) as answer:
                pod = await answer.json()
            if answer.status != 201:
                load.num_failed += 1
            elif is_injected(pod):
                load.num_injected += 1
                load.num_by_second += pod["metadata"]["annotations"].get(WEBHOOK_REPLICA_ANNOTATION) == "1"
            else:
                load.num_missed += 1

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context, limit=parallel)) as session:
        await asyncio.gather(*(worker(session) for _ in range(parallel)))
