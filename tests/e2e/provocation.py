"""Causes of doctor's findings on the real node, each taken back at its end; and doctor itself, its remedies run there.

Used by `test_doctor_on_the_node.py`.
"""

import contextlib
import fnmatch
import json
import mmap
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from e2e.user_tools import run_plugin
from hack.cache import REPOSITORY
from hack.cluster import machine, processes
from hack.cluster.configuration import component_commands
from hack.cluster.settings import HUGEPAGE_BYTES, ClusterSettings
from hack.console import wait_until
from hack.demo.kubernetes import Kubernetes
from hack.shell import run

MAP_HUGETLB = 0x40000
Finding = dict[str, str]
Wanted = tuple[str, str] | tuple[str, str, str]
"""A check, a subject and a message, in which `*` stands for what a controller chose; without a message, any."""


class NoAnswer(Exception):
    """A busy machine's API server kept the plugin waiting for too long."""


@dataclass
class Doctor:
    """`kubectl kvoffload doctor -o json` on the cluster, what it found so far, and its remedies."""

    kubernetes: Kubernetes
    found: set[str] = field(default_factory=set)
    """Checks of findings that were waited for, and came."""

    def run(self, *arguments: str) -> list[Finding]:
        """All findings. The exit status is what they say it must be, and each has its remedy. Raises NoAnswer."""
        done = run_plugin(self.kubernetes, "doctor", "-o", "json", *arguments)
        if not done.output:
            raise NoAnswer(done.errors)
        findings: list[Finding] = done.document["findings"]
        if any(one["severity"] == "error" for one in findings):
            assert done.status == 1
        else:
            unread = any("kvoffloadpools" in sentence for sentence in done.document["notChecked"])
            assert done.status == (2 if unread else 0)
        assert all(one["remedy"] and one["message"] for one in findings)
        return findings

    def wait_found(self, *wanted: Wanted, arguments: Sequence[str] = ()) -> list[Finding]:
        """Wait until one run finds all of this, and return the findings in that order."""
        seen: list[Finding] = []

        def matching(one: Wanted) -> list[Finding]:
            check, subject, message = (*one, "*")[:3]
            return [
                got
                for got in seen
                if got["check"] == check
                and fnmatch.fnmatchcase(got["subject"], subject)
                and fnmatch.fnmatchcase(got["message"], message)
            ]

        def is_found() -> bool:
            try:
                seen[:] = self.run(*arguments)
            except NoAnswer:
                return False
            return all(map(matching, wanted))

        wait_until(
            f"doctor to find {', '.join(one[0] for one in wanted)}",
            is_found,
            timeout_seconds=120,
            explain=lambda: (
                f"missing: {[one for one in wanted if not matching(one)]}\nfound: {json.dumps(seen, indent=1)}"
            ),
        )
        self.found |= {one[0] for one in wanted}
        return [matching(one)[0] for one in wanted]

    def wait_gone(self, *checks: str, timeout_seconds: float = 120) -> None:
        """Wait until a run finds nothing of this; of nothing at all without a name."""
        left: list[Finding] = []

        def is_gone() -> bool:
            try:
                left[:] = [one for one in self.run() if not checks or one["check"] in checks]
            except NoAnswer:
                return False
            return not left

        wait_until(
            f"doctor to find no {', '.join(checks) or 'more'}",
            is_gone,
            timeout_seconds=timeout_seconds,
            explain=lambda: json.dumps(left, indent=1),
        )

    def follow(self, command: str) -> str:
        """Run a remedy's command as an administrator would, in a clone of this version; returns what it prints."""
        settings = self.kubernetes.settings
        environment = {
            "KUBECONFIG": str(settings.kubeconfig),
            "PATH": f"{settings.binaries}:{os.environ['PATH']}",
        }
        return run(["bash", "-euc", command], cwd=REPOSITORY, environment=environment, timeout_seconds=120)


def command_in(finding: Finding, pattern: str) -> str:
    """The part of a remedy that is a command to run."""
    found = re.search(pattern, finding["remedy"])
    assert found is not None, finding["remedy"]
    return found[0]


def allocatable_pages(kubernetes: Kubernetes) -> int:
    """Pages of 2 MiB that the node's kubelet knows of."""
    node = kubernetes.get("node", kubernetes.settings.node_name)
    amount: str = node["status"]["allocatable"]["hugepages-2Mi"]
    assert amount.endswith("Mi"), amount
    return int(amount.removesuffix("Mi")) // 2


@contextlib.contextmanager
def applied(kubernetes: Kubernetes, kind: str, name: str, manifest: str, *, namespace: str = "") -> Iterator[None]:
    """An object that is gone at the end."""
    kubernetes.apply(manifest)
    try:
        yield
    finally:
        kubernetes.delete(kind, name, namespace=namespace)


@contextlib.contextmanager
def pages_held(leaving: int) -> Iterator[None]:
    """A program outside of pods, this one, holds pages of 2 MiB, so that so many are left."""
    available = machine.read_hugepages("free") - machine.read_hugepages("resv")
    held_bytes = max(1, available - leaving) * HUGEPAGE_BYTES
    with mmap.mmap(-1, held_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_HUGETLB):
        yield


@contextlib.contextmanager
def hugetlbfs_covered() -> Iterator[None]:
    """Where new daemons look for their pages there is a plain folder, as on a node where nobody mounted a hugetlbfs."""
    with tempfile.TemporaryDirectory(prefix="kvo-plain-") as folder:
        subprocess.run(["mount", "--bind", folder, machine.HUGETLBFS], check=True)
        try:
            yield
        finally:
            subprocess.run(["umount", machine.HUGETLBFS], check=True)


@contextlib.contextmanager
def kubelet_away(settings: ClusterSettings) -> Iterator[None]:
    """No kubelet runs; pods go on."""
    processes.stop("kubelet", settings)
    try:
        yield
    finally:
        processes.start("kubelet", component_commands(settings)["kubelet"], settings)


@contextlib.contextmanager
def pod_network_away(settings: ClusterSettings) -> Iterator[None]:
    """The node has no configuration of a pod network: its kubelet says that it is not ready. Running pods go on."""
    path = settings.state / "cni" / "10-bridge.conflist"
    content = path.read_text()
    path.unlink()
    try:
        yield
    finally:
        path.write_text(content)  # containerd looks again when a file is written, not when one comes by another name


def write_kubeconfig(path: Path, *, server: str, token: str) -> Path:
    """A kubeconfig for the bearer of a token."""
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "x",
        "clusters": [{"name": "c", "cluster": {"server": server, "insecure-skip-tls-verify": True}}],
        "users": [{"name": "u", "user": {"token": token}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
    }
    path.write_text(json.dumps(content))
    return path
