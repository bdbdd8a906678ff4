"""What a user's tools say while both servers of the demo run: every plugin command, all that the dashboard asks for."""

import json
import os
import re
import subprocess
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hack.cache import REPOSITORY
from hack.console import wait_until
from hack.demo.kubernetes import Kubernetes
from hack.demo.prometheus import Prometheus
from hack.demo.run import OUTPUT, POOL
from hack.demo.servers import Server, find_server
from hack.docs import screenshot
from hack.docs.dashboard import VARIABLES, VARIABLES_OF
from hack.docs.panels import dashboard_queries
from hack.vllm.models import ensure_model

Samples = list[tuple[dict[str, str], float]]


@dataclass(frozen=True)
class Done:
    """One run of the plugin."""

    status: int
    output: str
    errors: str

    @property
    def document(self) -> Any:
        """What `-o json` printed."""
        return json.loads(self.output)


@dataclass(frozen=True)
class ToolOutputs:
    """Everything, by name."""

    plugin: dict[str, Done]
    queries: list[tuple[str, str, Samples]]
    variables: dict[str, list[str]]
    """What the dashboard's variables offer, by name."""
    page: str
    """The page that the dashboard's picture is of."""
    picture: Path
    cached_by_hand: list[int]
    """Cached tokens of the answers of A and then B to a prompt that is sent as examples/README.md says."""
    block_tokens: int
    """Tokens in a GPU block, as the running server says."""


def run_plugin(kubernetes: Kubernetes, *arguments: str, program: str = "") -> Done:
    """Run `kubectl kvoffload` through kubectl itself, as a user does; `program`: `__complete`, as a shell does."""
    command = ["kubectl", *([program] if program else []), "kvoffload", *arguments]
    environment = plugin_environment(kubernetes)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    return Done(done.returncode, done.stdout, done.stderr)


def plugin_environment(kubernetes: Kubernetes) -> dict[str, str]:
    """Where kubectl and the plugin are found, and how wide they print."""
    return os.environ | {
        "KUBECONFIG": str(kubernetes.settings.kubeconfig),
        "PATH": f"{Path(sys.executable).parent}:{kubernetes.settings.binaries}:{os.environ['PATH']}",
        "COLUMNS": "160",
        "NO_COLOR": "1",
    }


def ask_by_hand(kubernetes: Kubernetes, server: str) -> int:
    """Run the shell function of examples/README.md; the answer's cached tokens."""
    function = re.search(
        r"^ask\(\) \{.*?^\}$", (REPOSITORY / "examples" / "README.md").read_text(), re.DOTALL | re.MULTILINE
    )
    assert function is not None
    environment = os.environ | {
        "KUBECONFIG": str(kubernetes.settings.kubeconfig),
        "PATH": f"{kubernetes.settings.binaries}:{os.environ['PATH']}",
    }
    command = ["bash", "-euc", f"{function[0]}\nask {server}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    details = json.loads(done.stdout)["usage"].get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)


def read_block_tokens(server: Server) -> int:
    """What a running vLLM says of itself on its own /metrics."""
    with urllib.request.urlopen(f"http://{server.address}:8000/metrics", timeout=10) as answer:
        found = re.search(r'^vllm:cache_config_info\{.*\bblock_size="(\d+)"', answer.read().decode(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def use_tools(kubernetes: Kubernetes, prometheus: Prometheus, pods: list[str]) -> ToolOutputs:
    """Run everything; `pods` are the servers' pods as NAMESPACE/NAME."""
    block_tokens = read_block_tokens(find_server(kubernetes, name="vllm-a"))
    plan = ["plan", "--model", str(ensure_model("tiny-deepseek")), "--tp", "2", "--kv-dtype", "float32"]
    plan += ["--capacity", kubernetes.get("kvpool", POOL)["spec"]["capacity"], "--block-size", str(block_tokens)]
    commands = {
        "plan": plan,
        "plan json": [*plan, "-o", "json"],
        "status": ["status"],
        "status json": ["status", POOL, "-o", "json"],
        "doctor": ["doctor"],
        "doctor json": ["doctor", "-o", "json"],
        "top": ["top", "--iterations", "2", "--interval", "1"],
        **{f"explain {pod}": ["explain", "pod", pod, "-o", "json"] for pod in pods},
        "explain": ["explain", "pod", pods[0]],
    }
    plugin = {name: run_plugin(kubernetes, *arguments) for name, arguments in commands.items()}
    prometheus.wait_scraped()
    queries = [(title, query, prometheus.query(query)) for title, query in dashboard_queries()]
    variables = {name: prometheus.label_values(VARIABLES_OF, name) for name in VARIABLES}
    cached = [ask_by_hand(kubernetes, "vllm-a")]
    wait_until("B to find what A was asked by hand", lambda: ask_by_hand(kubernetes, "vllm-b") > 0, timeout_seconds=120)
    cached.append(ask_by_hand(kubernetes, "vllm-b"))
    picture = OUTPUT / "dashboard.png"
    screenshot.main([prometheus.address, "--minutes", "5", "--out", str(picture)])
    return ToolOutputs(
        plugin=plugin,
        queries=queries,
        variables=variables,
        page=screenshot.page_of(picture).read_text(),
        picture=picture,
        cached_by_hand=cached,
        block_tokens=block_tokens,
    )
