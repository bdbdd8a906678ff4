"""A real Prometheus (Debian's) on this host, scraping the operator's and the daemons' pods as the PodMonitor says.

Debian builds it without the discovery of Kubernetes' pods: what that would say of each pod is written to a file here,
which Prometheus watches. What becomes of it, `pool`, `node` and `component` of every series among that, is left to the
relabelings of the chart's PodMonitor, or of whichever job is given.
"""

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hack.cluster import processes
from hack.console import StepError, wait_until
from hack.demo.discovery import discover, pod_monitor_job
from hack.demo.installation import NAMESPACE, render_pod_monitor
from hack.demo.kubernetes import Kubernetes

INTERVAL = "2s"
"""Between two scrapes, and between two looks at the rules; users have more patience."""


@dataclass(frozen=True, slots=True)
class PrometheusServer:
    """A running Prometheus, which scrapes what its configuration says."""

    log: Path
    port: int

    @property
    def address(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Return an instant query's samples: labels and value."""
        answer = self._ask("query", query=expression)
        return [(sample["metric"], float(sample["value"][1])) for sample in answer["result"]]

    def label_values(self, metric: str, label: str) -> list[str]:
        """Return what a dashboard's variable `label_values(metric, label)` offers, of the last hour; asked as Grafana
        asks."""
        now = time.time()
        match = {"match[]": metric, "start": f"{now - 3600:.3f}", "end": f"{now:.3f}"}
        values: list[str] = self._ask(f"label/{label}/values", **match)
        return values

    def targets(self, state: str) -> list[dict[str, Any]]:
        """Return what was discovered and is scraped (`active`), or not (`dropped`)."""
        found: list[dict[str, Any]] = self._ask("targets", state=state)[f"{state}Targets"]
        return found

    def _ask(self, what: str, **parameters: str) -> Any:
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.address}/api/v1/{what}?{query}", timeout=10) as response:
            return json.load(response)["data"]

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


@dataclass(frozen=True, slots=True)
class Prometheus(PrometheusServer):
    """A running Prometheus whose targets are the pods of our namespace."""

    kubernetes: Kubernetes
    file: Path
    """Where it reads of the pods."""

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
        """Tell Prometheus which pods there are."""
        unfinished = self.file.with_suffix(".tmp")
        unfinished.write_text(json.dumps(discover(self.kubernetes.pods(namespace=NAMESPACE))))
        unfinished.rename(self.file)

    def _is_scraped_since(self, moment: float) -> bool:
        oldest = self.query("min by (component) (timestamp(up == 1))")
        components = {labels["component"] for labels, _ in oldest}
        return {"operator", "node"} <= components and all(value > moment for _, value in oldest)


@contextmanager
def running_prometheus(
    kubernetes: Kubernetes, folder: Path, *, rules: str = "", job: Mapping[str, Any] | None = None
) -> Iterator[Prometheus]:
    """Run Prometheus with its data in `folder` for as long as the block runs.

    `rules` is the text of a rule file; `job` the scrape job whose discovery ours replaces, by default the PodMonitor's.
    """
    job = pod_monitor_job(render_pod_monitor(kubernetes)) if job is None else job
    folder.mkdir(parents=True, exist_ok=True)
    targets, rule_file = folder / "targets.json", folder / "rules.yaml"
    rule_file.write_text(rules)
    targets.write_text("[]")
    with serving_prometheus(_configuration(job, targets, rule_file), folder) as server:
        prometheus = Prometheus(log=server.log, port=server.port, kubernetes=kubernetes, file=targets)
        prometheus.write_targets()
        yield prometheus


@contextmanager
def serving_prometheus(
    configuration: Mapping[str, Any], folder: Path, *, program: str | Path = "prometheus"
) -> Iterator[PrometheusServer]:
    """Run a program of Prometheus with its data in `folder` for as long as the block runs."""
    shutil.rmtree(folder / "data", ignore_errors=True)  # a query looks five minutes back: into another run's pods
    path, log = folder / "prometheus.yaml", folder / "prometheus.log"
    path.write_text(yaml.safe_dump(configuration))
    server = PrometheusServer(log=log, port=_find_free_port())
    with log.open("w") as sink:
        process = subprocess.Popen(
            # it ends with this process, however that ends: a leftover would keep the port and the data's lock
            ["setpriv", "--pdeathsig=TERM", program,
             f"--config.file={path}", f"--storage.tsdb.path={folder / 'data'}",
             f"--web.listen-address=127.0.0.1:{server.port}", "--log.level=warn"],
            stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True,
        )  # fmt: skip
    try:

        def is_ready() -> bool:
            if process.poll() is not None:
                raise StepError(f"prometheus ended with status {process.returncode}: {log.read_text()}", log=log)
            return _is_answering(server)

        wait_until("Prometheus to answer", is_ready, timeout_seconds=30, log=log)
        yield server
    finally:
        processes.end_process(process.pid, patience_seconds=10)
        process.wait()


def _find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _is_answering(prometheus: PrometheusServer) -> bool:
    try:
        with urllib.request.urlopen(f"{prometheus.address}/-/ready", timeout=2):
            return True
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def _configuration(job: Mapping[str, Any], targets: Path, rule_file: Path) -> dict[str, Any]:
    scraped = {key: value for key, value in job.items() if key != "kubernetes_sd_configs"}
    scraped |= {"file_sd_configs": [{"files": [str(targets)]}], "scrape_interval": INTERVAL}
    return {
        "global": {"evaluation_interval": INTERVAL},
        "rule_files": [str(rule_file)],
        "scrape_configs": [scraped],
    }
