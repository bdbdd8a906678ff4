"""Command lines and configuration files of the cluster's programs: pure text from the settings."""

import json
from collections.abc import Mapping

from hack.cluster.settings import PAUSE_IMAGE, SERVICE_SUBNET, ClusterSettings

AUDIT_POLICY = """\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: None
  nonResourceURLs: ["/healthz*", "/readyz*", "/livez*", "/version"]
- level: Metadata
"""

READERS = {"audit-policy.yaml": "apiserver", "containerd.toml": "containerd", "kubelet.yaml": "kubelet"}
"""Which program reads a file at its start, and only then."""


def component_commands(settings: ClusterSettings) -> Mapping[str, list[str]]:
    """Return the command line of each program, by the name that its log and its pid file have."""
    pki, state, run, binaries = settings.pki, settings.state, settings.run, settings.binaries
    return {
        "etcd": [f"{binaries}/etcd", f"--data-dir={state}/etcd", "--unsafe-no-fsync"],
        "apiserver": [
            f"{binaries}/kube-apiserver",
            "--etcd-servers=http://127.0.0.1:2379",
            f"--advertise-address={settings.node_address}",
            f"--service-cluster-ip-range={SERVICE_SUBNET}",
            f"--client-ca-file={pki}/ca.crt",
            f"--tls-cert-file={pki}/apiserver.crt",
            f"--tls-private-key-file={pki}/apiserver.key",
            f"--service-account-key-file={pki}/service-accounts.pub",
            f"--service-account-signing-key-file={pki}/service-accounts.key",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            # there is no DNS: webhooks are reached at the pods' own addresses
            "--enable-aggregator-routing=true",
            "--allow-privileged=true",
            f"--kubelet-client-certificate={pki}/apiserver-kubelet.crt",
            f"--kubelet-client-key={pki}/apiserver-kubelet.key",
            f"--kubelet-certificate-authority={pki}/ca.crt",
            "--kubelet-preferred-address-types=InternalIP",
            f"--requestheader-client-ca-file={pki}/front-ca.crt",
            "--requestheader-allowed-names=front-proxy-client",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-username-headers=X-Remote-User",
            f"--proxy-client-cert-file={pki}/front-proxy.crt",
            f"--proxy-client-key-file={pki}/front-proxy.key",
            f"--audit-policy-file={state}/audit-policy.yaml",
            f"--audit-log-path={settings.audit_log}",
            "--audit-log-maxsize=200",
            "--audit-log-maxbackup=2",
        ],
        "controller-manager": [
            f"{binaries}/kube-controller-manager",
            f"--kubeconfig={pki}/controller-manager.kubeconfig",
            f"--service-account-private-key-file={pki}/service-accounts.key",
            f"--root-ca-file={pki}/ca.crt",
            "--use-service-account-credentials=true",
            "--leader-elect=false",
            f"--cluster-signing-cert-file={pki}/ca.crt",
            f"--cluster-signing-key-file={pki}/ca.key",
        ],
        "scheduler": [
            f"{binaries}/kube-scheduler",
            f"--kubeconfig={pki}/scheduler.kubeconfig",
            "--leader-elect=false",
        ],
        "containerd": [f"{binaries}/containerd", f"--config={state}/containerd.toml"],
        "kubelet": [
            f"{binaries}/kubelet",
            f"--config={state}/kubelet.yaml",
            f"--kubeconfig={pki}/node.kubeconfig",
            f"--hostname-override={settings.node_name}",
            f"--node-ip={settings.node_address}",
            f"--root-dir={settings.kubelet_root}",
            f"--cert-dir={run}/kubelet-pki",
        ],
        "proxy": [
            f"{binaries}/kube-proxy",
            f"--kubeconfig={pki}/proxy.kubeconfig",
            "--proxy-mode=nftables",
            f"--cluster-cidr={settings.pod_cidr}",
            f"--hostname-override={settings.node_name}",
            "--conntrack-max-per-core=0",
        ],
    }


def configuration_files(settings: ClusterSettings) -> Mapping[str, str]:
    """Return the content of each configuration file, by its path below the cluster's state folder."""
    return {
        "audit-policy.yaml": AUDIT_POLICY,
        "containerd.toml": _containerd(settings),
        "kubelet.yaml": _kubelet(settings),
        "cni/10-bridge.conflist": _network(settings),
    }


def _containerd(settings: ClusterSettings) -> str:
    return f"""\
version = 3
root = "{settings.state}/containerd"
state = "{settings.run}/containerd"
[grpc]
  address = "{settings.containerd_socket}"
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "{PAUSE_IMAGE}"
[plugins."io.containerd.cri.v1.images".registry]
  config_path = "{settings.registries}"   # empty, but for a test's own registry
[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true   # root may lack CAP_SYS_RESOURCE
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["/usr/lib/cni"]
    conf_dir = "{settings.state}/cni"
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    runtime_path = "{settings.binaries}/containerd-shim-runc-v2"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
      Root = "{settings.run}/runc"
"""


def _kubelet(settings: ClusterSettings) -> str:
    return f"""\
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication:
  anonymous: {{enabled: false}}
  webhook: {{enabled: true}}
  x509: {{clientCAFile: {settings.pki}/ca.crt}}
authorization: {{mode: Webhook}}
cgroupDriver: cgroupfs
cgroupRoot: /{settings.name}
failCgroupV1: false
failSwapOn: false
enforceNodeAllocatable: []
containerRuntimeEndpoint: unix://{settings.containerd_socket}
podLogsDir: {settings.logs}/pods
tlsCertFile: {settings.pki}/node.crt
tlsPrivateKeyFile: {settings.pki}/node.key
evictionHard: {{memory.available: 100Mi, nodefs.available: 1%, imagefs.available: 1%}}
"""


def _network(settings: ClusterSettings) -> str:
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "ranges": [[{"subnet": settings.pod_cidr}]],
            "routes": [{"dst": "0.0.0.0/0"}],
            "dataDir": f"{settings.run}/cni",
        },
    }
    portmap = {"type": "portmap", "capabilities": {"portMappings": True}}
    return json.dumps({"cniVersion": "1.0.0", "name": settings.name, "plugins": [bridge, portmap]}, indent=1)
