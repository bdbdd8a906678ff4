"""What the daemon's pod may see and do on the real node, and what becomes of the cache when the DaemonSet is rolled.

Observed by `conftest.py` while the demo's servers run; asserted by `test_daemon_pod.py`.
"""

import itertools
import random
import re
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import endpoints
from hack.console import wait_until
from hack.demo import run as demo
from hack.demo.installation import DAEMON_SELECTOR, NAMESPACE
from hack.demo.kubernetes import Kubernetes
from hack.demo.run import POOL, SERVERS, Stage
from hack.demo.servers import Answer, Server, demo_prompts, find_pod_processes, find_server
from kvoffload.api.keys import DAEMON_METRICS_PORT

ROLL_SECONDS = 120
ATTACH_SECONDS = 30


@dataclass(frozen=True, slots=True)
class ContainerView:
    """One container's process as the kernel holds it."""

    mounts: dict[str, set[str]]
    """Mount point to its options."""
    status: dict[str, str]
    """Fields of /proc/<pid>/status."""


@dataclass
class Roll:
    """The daemon replaced while both servers answer."""

    ready_before: float = 0.0
    ready_after: float = 0.0
    hits_after: float = 0.0
    """Keys that the new daemon found, of those that the old one's engines had stored."""
    warm_after: list[Answer] = field(default_factory=list)
    answers_meanwhile: int = 0
    errors: list[str] = field(default_factory=list)


def daemon_pod(kubernetes: Kubernetes) -> dict[str, Any]:
    """The demo pool's daemon on the one node."""
    return kubernetes.wait_ready_pod(
        namespace=NAMESPACE, selector=f"{DAEMON_SELECTOR}={POOL}", timeout_seconds=ROLL_SECONDS
    )


def view_containers(kubernetes: Kubernetes) -> dict[str, ContainerView]:
    """The containers of the daemon's pod by what they run: `daemon` and `attacher`."""
    views = {}
    for pid, command in find_pod_processes(daemon_pod(kubernetes)).items():
        if "kvoffload_node" in command:
            folder = Path("/proc") / str(pid)
            lines = [line.split() for line in (folder / "mountinfo").read_text().splitlines()]
            status = dict(re.findall(r"^(\w+):\s*(.*)$", (folder / "status").read_text(), flags=re.MULTILINE))
            views[command.split()[-1]] = ContainerView({line[4]: set(line[5].split(",")) for line in lines}, status)
    return views


def roll_under_load(stage: Stage) -> Roll:
    """Restart the DaemonSet while server B gets prompts that it has to store; then ask for what was there before."""
    kubernetes, roll, enough = stage.kubernetes, Roll(), threading.Event()
    server = find_server(kubernetes, name="vllm-b")
    roll.ready_before = metrics(daemon_pod(kubernetes))['kvoffload_slots{state="ready"}']
    load = threading.Thread(target=_keep_asking, args=(server, roll, enough))
    load.start()
    try:
        kubernetes.kubectl("rollout", "restart", f"daemonset/kvoffload-{POOL}", f"--namespace={NAMESPACE}")
        kubernetes.kubectl(
            "rollout", "status", f"daemonset/kvoffload-{POOL}", f"--namespace={NAMESPACE}", f"--timeout={ROLL_SECONDS}s"
        )
        pod = daemon_pod(kubernetes)
        wait_until(
            "both engines to confirm their layout to the new daemon",
            lambda: metrics(pod)['kvoffload_engines{layout="replicated"}'] == len(SERVERS),
            timeout_seconds=ATTACH_SECONDS,
            explain=lambda: kubernetes.log_tail(pod),
        )
    finally:
        enough.set()
        load.join()
    hits_before = metrics(pod)['kvoffload_lookups_total{result="hit"}']
    roll.warm_after = demo.ask(server, demo_prompts())
    roll.hits_after = metrics(pod)['kvoffload_lookups_total{result="hit"}'] - hits_before
    roll.ready_after = metrics(pod)['kvoffload_slots{state="ready"}']
    return roll


def metrics(pod: dict[str, Any]) -> dict[str, float]:
    return endpoints.samples(endpoints.scrape(DAEMON_METRICS_PORT, pod["status"]["podIP"]))


def _keep_asking(server: Server, roll: Roll, enough: threading.Event) -> None:
    """Four prompts a second, which together fill a fifth of the pool and never fit into the server's own cache."""
    generator = random.Random(1)
    prompts = [[generator.randrange(2, 1000) for _ in range(300)] for _ in range(40)]
    for prompt in itertools.cycle(prompts):
        if enough.wait(0.25):
            return
        try:
            server.complete(prompt)
            roll.answers_meanwhile += 1
        except OSError as error:
            roll.errors.append(str(error))
            return
