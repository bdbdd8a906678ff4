"""A real Prometheus (Debian's) on this host, scraping the operator's and the daemons' pods as the PodMonitor would."""

import json
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hack.cluster import processes
from hack.cluster.settings import ClusterSettings
from hack.console import StepError, wait_until

PORT = 19090
NAMESPACE = "kvoffload-system"


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A running Prometheus."""

    log: Path
    address: str = f"http://127.0.0.1:{PORT}"

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Return an instant query's samples: labels and value."""
        query = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"{self.address}/api/v1/query?{query}", timeout=10) as response:
            answer = json.load(response)
        return [(sample["metric"], float(sample["value"][1])) for sample in answer["data"]["result"]]

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
        """Wait until every target has been scraped after now, so that queries see the present."""
        now = float(self.query("time()")[0][1])
        wait_until(
            "Prometheus to scrape the operator and the daemon",
            lambda: self._is_scraped_since(now),
            timeout_seconds=60,
            explain=lambda: f"up is {self.query('up')}",
            log=self.log,
        )

    def _is_scraped_since(self, moment: float) -> bool:
        oldest = self.query('min by (component) (timestamp(up{job="kvoffload"} == 1))')
        components = {labels["component"] for labels, _ in oldest}
        return {"operator", "node"} <= components and all(value > moment for _, value in oldest)


@contextmanager
def running_prometheus(settings: ClusterSettings, folder: Path) -> Iterator[Prometheus]:
    """Run Prometheus with its data in `folder` for as long as the block runs."""
    folder.mkdir(parents=True, exist_ok=True)
    configuration, log = folder / "prometheus.yaml", folder / "prometheus.log"
    configuration.write_text(_configuration(settings))
    prometheus = Prometheus(log=log)
    if _is_answering(prometheus):
        raise StepError(f"something listens on port {PORT} already; the demo's Prometheus needs it")
    with log.open("w") as sink:
        process = subprocess.Popen(
            ["prometheus", f"--config.file={configuration}", f"--storage.tsdb.path={folder / 'data'}",
             f"--web.listen-address=127.0.0.1:{PORT}", "--log.level=warn"],
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


def _is_answering(prometheus: Prometheus) -> bool:
    try:
        with urllib.request.urlopen(f"{prometheus.address}/-/ready", timeout=2):
            return True
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def _configuration(settings: ClusterSettings) -> str:
    return f"""\
global:
  scrape_interval: 2s
scrape_configs:
- job_name: kvoffload
  kubernetes_sd_configs:
  - role: pod
    kubeconfig_file: {settings.kubeconfig}
    namespaces: {{names: [{NAMESPACE}]}}
    selectors: [{{role: pod, label: app.kubernetes.io/name=kvoffload}}]
  relabel_configs:
  - {{source_labels: [__meta_kubernetes_pod_container_port_name], regex: metrics, action: keep}}
  - {{source_labels: [__meta_kubernetes_pod_phase], regex: Running, action: keep}}
  - {{source_labels: [__meta_kubernetes_pod_label_app_kubernetes_io_component], target_label: component}}
  - {{source_labels: [__meta_kubernetes_pod_label_kvoffload_io_daemon_of], target_label: pool}}
  - {{source_labels: [__meta_kubernetes_pod_node_name], target_label: node}}
"""
