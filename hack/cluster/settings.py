"""The local cluster's versions, addresses and folders, in one place.

```
$KVOFFLOAD_CACHE/programs/<name>-<version>/   built once, kept by `down`
/var/lib/kvoffload-cluster/<name>/            pki kubelet containerd etcd logs bin   (logs are kept by `down`)
/run/kvoffload-cluster/<name>/                pids, sockets, state.json (what `up` changed on this machine)
```
"""

import os
from dataclasses import dataclass
from pathlib import Path

KUBERNETES_VERSION = "1.37.2"
ETCD_VERSION = "3.6.16"
CONTAINERD_VERSION = "2.4.2"
HELM_VERSION = "3.22.0"

SERVICE_SUBNET = "10.96.0.0/16"
KUBERNETES_SERVICE_ADDRESS = "10.96.0.1"
PAUSE_IMAGE = "localhost/kvoffload/pause:1"
HUGEPAGE_BYTES = 2 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """One local cluster: a node in its own network namespace, reached from this host through a veth pair."""

    name: str = "kvo"
    node_name: str = "node0"
    node_subnet: str = "172.30.7"
    pod_subnet: str = "10.245.0"
    num_hugepages: int = 320
    state_parent: Path = Path("/var/lib/kvoffload-cluster")
    run_parent: Path = Path("/run/kvoffload-cluster")

    @property
    def node_address(self) -> str:
        """Address of the node, and of the API server, in the cluster's namespace."""
        return f"{self.node_subnet}.1"

    @property
    def host_address(self) -> str:
        """Address of this machine as the node sees it."""
        return f"{self.node_subnet}.254"

    @property
    def pod_cidr(self) -> str:
        """Range of the pods' addresses."""
        return f"{self.pod_subnet}.0/24"

    @property
    def state(self) -> Path:
        """Folder of what the cluster's programs store."""
        return self.state_parent / self.name

    @property
    def run(self) -> Path:
        """Folder of process ids, sockets and the record of what was changed on this machine."""
        return self.run_parent / self.name

    @property
    def logs(self) -> Path:
        """Folder of the programs' logs."""
        return self.state / "logs"

    @property
    def audit_log(self) -> Path:
        """The API server's audit log, one JSON event a line, level Metadata."""
        return self.logs / "audit.log"

    @property
    def binaries(self) -> Path:
        """Folder of links to every program, for PATH."""
        return self.state / "bin"

    @property
    def pki(self) -> Path:
        """Folder of certificates and kubeconfigs."""
        return self.state / "pki"

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        return self.pki / "admin.kubeconfig"

    @property
    def kubelet_root(self) -> Path:
        """The kubelet's root folder (the chart's `kubeletRootDir`)."""
        return self.state / "kubelet"

    @property
    def containerd_socket(self) -> Path:
        """The container runtime's socket."""
        return self.run / "containerd.sock"

    @property
    def registries(self) -> Path:
        """Folder that says how registries are reached: `<host>/hosts.toml`, read by containerd at each pull."""
        return self.state / "registries"

    @property
    def namespace_path(self) -> Path:
        """The node's network namespace."""
        return Path("/run/netns") / self.name

    @classmethod
    def from_environment(cls) -> "ClusterSettings":
        """Read KVOFFLOAD_CLUSTER_NAME and KVOFFLOAD_CLUSTER_HUGEPAGES (number of 2 MiB pages); absent: the defaults."""
        return cls(
            name=os.environ.get("KVOFFLOAD_CLUSTER_NAME", "kvo"),
            num_hugepages=int(os.environ.get("KVOFFLOAD_CLUSTER_HUGEPAGES", "320")),
        )
