"""What a user's tools say while both servers of the demo run: every plugin command and every query of the dashboard."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hack.cache import REPOSITORY
from hack.console import wait_until
from hack.demo.kubernetes import Kubernetes
from hack.demo.prometheus import Prometheus
from hack.demo.run import OUTPUT, POOL
from hack.docs import screenshot
from hack.docs.panels import dashboard_queries

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
    picture: Path
    cached_by_hand: list[int]
    """Cached tokens of the answers of A and then B to a prompt that is sent as examples/README.md says."""


def run_plugin(kubernetes: Kubernetes, *arguments: str, program: str = "") -> Done:
    """Run `kubectl kvoffload` through kubectl itself, as a user does; `program`: `__complete`, as a shell does."""
    environment = os.environ | {
        "KUBECONFIG": str(kubernetes.settings.kubeconfig),
        "PATH": f"{Path(sys.executable).parent}:{kubernetes.settings.binaries}:{os.environ['PATH']}",
        "COLUMNS": "160",
        "NO_COLOR": "1",
    }
    command = ["kubectl", *([program] if program else []), "kvoffload", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    return Done(done.returncode, done.stdout, done.stderr)


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


def use_tools(kubernetes: Kubernetes, prometheus: Prometheus, pods: list[str]) -> ToolOutputs:
    """Run everything; `pods` are the servers' pods as NAMESPACE/NAME."""
    commands = {
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
    cached = [ask_by_hand(kubernetes, "vllm-a")]
    wait_until("B to find what A was asked by hand", lambda: ask_by_hand(kubernetes, "vllm-b") > 0, timeout_seconds=30)
    cached.append(ask_by_hand(kubernetes, "vllm-b"))
    picture = OUTPUT / "dashboard.png"
    screenshot.main([prometheus.address, "--minutes", "5", "--out", str(picture)])
    return ToolOutputs(plugin=plugin, queries=queries, picture=picture, cached_by_hand=cached)
