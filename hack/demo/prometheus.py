"""A real Prometheus (Debian's) on this host, scraping the operator's and the daemons' pods as the PodMonitor would.

Debian builds it without the discovery of Kubernetes' pods: the targets are read from the API server here and written to
a file, which Prometheus watches.
"""

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hack.cluster import processes
from hack.console import StepError, wait_until
from hack.demo.installation import NAMESPACE
from hack.demo.kubernetes import Kubernetes


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A running Prometheus."""

    kubernetes: Kubernetes
    targets: Path
    log: Path
    port: int

    @property
    def address(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Return an instant query's samples: labels and value."""
        query = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"{self.address}/api/v1/query?{query}", timeout=10) as response:
            answer = json.load(response)
        return [(sample["metric"], float(sample["value"][1])) for sample in answer["data"]["result"]]

    def firing(self, alert: str) -> list[dict[str, str]]:
        """Return the labels of each firing alert of that name."""
        return [labels for labels, _ in self.query(f'ALERTS{{alertname="{alert}",alertstate="firing"}}')]

    def value(self, expression: str) -> float:
        """Return the one value of a query; wait for it to have one."""
        wait_until(
            f"Prometheus to answer {expression}",
            lambda: len(self.query(expression)) == 1,
            timeout_seconds=30,
            explain=lambda: f"it answers {self.query(expression)}",
            log=self.log,
        )
        return self.query(expression)[0][1]

    def wait_scraped(self) -> None:
        """Wait until every pod of ours that runs now has been scraped after now, so that queries see the present."""
        self.write_targets()
        now = time.time()
        wait_until(
            "Prometheus to scrape the operator and the daemon",
            lambda: self._is_scraped_since(now),
            timeout_seconds=60,
            explain=lambda: f"up is {self.query('up')}",
            log=self.log,
        )

    def write_targets(self) -> None:
        """Tell Prometheus which pods there are: those with a port named metrics, labelled as by the PodMonitor."""
        targets = []
        for pod in self.kubernetes.pods(namespace=NAMESPACE, selector="app.kubernetes.io/name=kvoffload"):
            labels = pod["metadata"]["labels"]
            ports = [port for container in pod["spec"]["containers"] for port in container.get("ports", [])]
            for port in ports:
                if port.get("name") == "metrics" and pod["status"].get("phase") == "Running":
                    described = {
                        "component": labels["app.kubernetes.io/component"],
                        "pool": labels.get("kvoffload.io/daemon-of", ""),
                        "node": pod["spec"]["nodeName"],
                    }
                    address = f"{pod['status']['podIP']}:{port['containerPort']}"
                    targets.append({"targets": [address], "labels": described})
        unfinished = self.targets.with_suffix(".tmp")
        unfinished.write_text(json.dumps(targets))
        unfinished.rename(self.targets)

    def _is_scraped_since(self, moment: float) -> bool:
        oldest = self.query('min by (component) (timestamp(up{job="kvoffload"} == 1))')
        components = {labels["component"] for labels, _ in oldest}
        return {"operator", "node"} <= components and all(value > moment for _, value in oldest)


@contextmanager
def running_prometheus(kubernetes: Kubernetes, folder: Path, *, rules: str = "") -> Iterator[Prometheus]:
    """Run Prometheus with its data in `folder` for as long as the block runs; `rules` is the text of a rule file."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder / "data", ignore_errors=True)  # a query looks five minutes back: into another run's pods
    configuration, log = folder / "prometheus.yaml", folder / "prometheus.log"
    prometheus = Prometheus(kubernetes=kubernetes, targets=folder / "targets.json", log=log, port=_find_free_port())
    prometheus.write_targets()
    rule_file = folder / "rules.yaml"
    rule_file.write_text(rules)
    configuration.write_text(_configuration(prometheus.targets, rule_file))
    with log.open("w") as sink:
        process = subprocess.Popen(
            # it ends with this process, however that ends: a leftover would keep the port and the data's lock
            ["setpriv", "--pdeathsig=TERM", "prometheus",
             f"--config.file={configuration}", f"--storage.tsdb.path={folder / 'data'}",
             f"--web.listen-address=127.0.0.1:{prometheus.port}", "--log.level=warn"],
            stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True,
        )  # fmt: skip
    try:

        def is_ready() -> bool:
            if process.poll() is not None:
                raise StepError(f"prometheus ended with status {process.returncode}: {log.read_text()}", log=log)
            return _is_answering(prometheus)

        wait_until("Prometheus to answer", is_ready, timeout_seconds=30, log=log)
        yield prometheus
    finally:
        processes.end_process(process.pid, patience_seconds=10)
        process.wait()


def _find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _is_answering(prometheus: Prometheus) -> bool:
    try:
        with urllib.request.urlopen(f"{prometheus.address}/-/ready", timeout=2):
            return True
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def _configuration(targets: Path, rule_file: Path) -> str:
    return f"""\
global:
  scrape_interval: 2s
  evaluation_interval: 2s
rule_files: [{rule_file}]
scrape_configs:
- job_name: kvoffload
  file_sd_configs:
  - files: [{targets}]
"""
