"""The programs of the operator as processes of this machine, each with the token, and so the rights, of its account."""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import endpoints
from e2e.control_plane import NAMESPACE, ControlPlane, free_port, wait_until


@dataclass
class OperatorProcess:
    """One replica of the operator, as a process of this machine."""

    process: subprocess.Popen[bytes]
    log: Path
    name: str
    metrics_port: int

    def num_passes(self) -> int:
        """Passes over pools since its start."""
        metrics = endpoints.samples(endpoints.scrape(self.metrics_port))
        return int(metrics['kvoffload_operator_reconcile_duration_seconds_count{kind="pool"}'])

    def stop(self, sent: signal.Signals = signal.SIGTERM) -> None:
        """End it and wait."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.send_signal(sent)
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    @property
    def is_leader(self) -> bool:
        """Whether it says so."""
        return f"{self.name} is the leader" in self.log.read_text()


def operator_token(plane: ControlPlane, account: str = "kvoffload-operator", *, namespace: str = NAMESPACE) -> str:
    """A token of a chart's service account."""
    return plane.kubectl("create", "token", account, "-n", namespace, "--duration=4h").strip()


def start_operator(plane: ControlPlane, name: str = "operator-a", *, url: str = "", **settings: str) -> OperatorProcess:
    """Start a replica with the chart's permissions; `url` puts a proxy before the API server."""
    kubeconfig = plane.write_kubeconfig(name, operator_token(plane), url=url)
    log = plane.folder / f"{name}-{secrets.token_hex(3)}.log"
    port = free_port()
    settings = {"metrics_port": str(port), "release": "kvoffload", **settings}
    process = start_process(plane, "run", name, kubeconfig=kubeconfig, log=log, **settings)
    return OperatorProcess(process, log, name, port)


def start_process(
    plane: ControlPlane, command: str, name: str, *, kubeconfig: Path, log: Path, **settings: str
) -> subprocess.Popen[bytes]:
    """Start a program of the operator's image as a pod of this name; `log` is appended to."""
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("KVOFFLOAD_")},
        "KUBECONFIG": str(kubeconfig),
        "KVOFFLOAD_POD_NAME": name,
        **{f"KVOFFLOAD_{key.upper()}": value for key, value in settings.items()},
    }
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "kvoffload_operator", command],
            stdout=output,
            stderr=output,
            env=environment,
            cwd=plane.folder,
        )


def checked_metrics(port: int) -> dict[str, float]:
    """What a process of this machine exposes, by sample; promtool has to find no fault in it."""
    text = endpoints.scrape(port)
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"promtool: {done.stdout}{done.stderr}")
    return endpoints.samples(text)


def free_lease(plane: ControlPlane) -> None:
    """Nobody leads any more: for a successor of a replica that was killed, in the place of the wait for its end."""
    plane.kubectl("delete", "lease", "kvoffload-operator", "-n", NAMESPACE, "--ignore-not-found")


@contextlib.contextmanager
def running_operator(
    plane: ControlPlane, name: str = "operator-a", *, url: str = "", **settings: str
) -> Iterator[OperatorProcess]:
    """A replica that is the leader. Unless told otherwise it keeps its lease for longer than a busy machine may hold it
    up: a leader that has lost it ends, and here is no kubelet to start it again."""
    settings = {"lease_seconds": "30", "renew_deadline_seconds": "25", **settings}
    operator = start_operator(plane, name, url=url, **settings)
    try:
        wait_until(lambda: operator.is_leader, f"{name} to lead: {operator.log}", seconds=120)
        yield operator
    finally:
        operator.stop()
