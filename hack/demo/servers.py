"""The demo's vLLM servers: their manifests, their answers, and what their workers map."""

import json
import random
import re
import string
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hack.cache import REPOSITORY, cache_root
from hack.demo.kubernetes import Kubernetes
from hack.vllm.environment import interpreter_folder

NAMESPACE = "demo"
EXAMPLES = REPOSITORY / "examples" / "vllm"
NUM_PROMPT_TOKENS = 300
NUM_PROMPTS = 3
START_TIMEOUT_SECONDS = 400
REGION_SUFFIX = ".region"  # of the daemon's files on hugetlbfs


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server answered to one prompt."""

    text_tokens: tuple[int, ...]
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class ServerFiles:
    """What the servers' pods mount from this machine, and the image that they run in."""

    image: str
    environment: Path
    model: Path

    def render(self, manifest: Path, *, pool: str) -> str:
        """Fill in a manifest of examples/vllm; one without names in braces stays as it is."""
        return string.Template(manifest.read_text()).substitute(
            POOL=pool,
            IMAGE=self.image,
            VENV=self.environment,
            PYTHON=interpreter_folder(self.environment),
            MODEL=self.model,
            CACHE=cache_root() / "vllm-cache",
        )


def write_manifests(files: ServerFiles, folder: Path, *, pool: str) -> None:
    """Write the pool and the servers as files that `kubectl apply -f` takes, for who wants to try by hand."""
    folder.mkdir(parents=True, exist_ok=True)
    for manifest in sorted(EXAMPLES.glob("*.yaml")):
        (folder / manifest.name).write_text(files.render(manifest, pool=pool))


def demo_prompts() -> list[list[int]]:
    """Return the demo's prompts as token ids (the servers run without a tokenizer), always the same."""
    generator = random.Random(0)
    return [[generator.randrange(2, 1000) for _ in range(NUM_PROMPT_TOKENS)] for _ in range(NUM_PROMPTS)]


@dataclass(frozen=True, slots=True)
class Server:
    """One running vLLM server: its Deployment's name and its pod."""

    name: str
    pod: dict[str, Any]

    @property
    def address(self) -> str:
        """The pod's address; the host has a route to it."""
        return str(self.pod["status"]["podIP"])

    def complete(self, prompt: list[int], *, num_tokens: int = 8) -> Answer:
        """Send one prompt greedily and return the tokens of the answer."""
        body = {
            "model": "/model", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True,
            "detokenize": False, "return_token_ids": True,
        }  # fmt: skip
        request = urllib.request.Request(
            f"http://{self.address}:8000/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            answer = json.load(response)
        details = answer["usage"].get("prompt_tokens_details") or {}
        return Answer(
            text_tokens=tuple(answer["choices"][0]["token_ids"]), cached_tokens=details.get("cached_tokens") or 0
        )


def start_servers(kubernetes: Kubernetes, files: ServerFiles, *, names: Sequence[str], pool: str) -> list[Server]:
    """Apply `examples/vllm/server-<last letter>.yaml` for each name, all at once, and wait until each serves."""
    for name in names:
        kubernetes.apply(files.render(EXAMPLES / f"server-{name[-1]}.yaml", pool=pool))
    return [wait_server(kubernetes, name=name) for name in names]


def wait_server(kubernetes: Kubernetes, *, name: str) -> Server:
    """Wait until the server's one pod is Ready."""
    pod = kubernetes.wait_ready_pod(namespace=NAMESPACE, selector=f"app={name}", timeout_seconds=START_TIMEOUT_SECONDS)
    return Server(name=name, pod=pod)


def find_server(kubernetes: Kubernetes, *, name: str) -> Server:
    """Return a running server."""
    (pod,) = kubernetes.pods(namespace=NAMESPACE, selector=f"app={name}")
    return Server(name=name, pod=pod)


def stop_servers(kubernetes: Kubernetes, *, names: Sequence[str]) -> None:
    """Delete the Deployments and wait until their pods are gone."""
    for name in names:
        kubernetes.delete("deployment", name, namespace=NAMESPACE)
    selector = f"--selector=app in ({','.join(names)})"
    kubernetes.kubectl("wait", "--for=delete", "pods", selector, f"--namespace={NAMESPACE}", "--timeout=60s")


def find_pod_processes(pod: dict[str, Any]) -> dict[int, str]:
    """Return the processes of a pod as this machine sees them: id -> command line."""
    uid = pod["metadata"]["uid"]
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if uid in (folder / "cgroup").read_text():
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


def read_region_page_sizes(pod: dict[str, Any]) -> dict[int, int]:
    """Return, for each process of the pod that maps a region of ours, the kernel's page size there, from its smaps."""
    sizes = {}
    for pid in find_pod_processes(pod):
        try:
            text = (Path("/proc") / str(pid) / "smaps").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        page_sizes = [
            int(mapping.partition("KernelPageSize:")[2].split()[0]) * 1024
            for mapping in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", text, flags=re.MULTILINE)
            if REGION_SUFFIX in mapping.partition("\n")[0]
        ]
        if page_sizes:
            sizes[pid] = min(page_sizes)
    return sizes
