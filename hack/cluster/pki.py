"""Certificates and kubeconfigs of the local cluster, made by openssl; valid for one year, gone with `down`."""

from dataclasses import dataclass
from pathlib import Path

from hack.cluster.settings import KUBERNETES_SERVICE_ADDRESS, ClusterSettings
from hack.shell import run

NEW_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
AUTHORITIES = ("ca", "front-ca")
DAYS = "365"


@dataclass(frozen=True, slots=True)
class Leaf:
    """One certificate: its file name, subject, authority and, for servers, the names that it answers to."""

    name: str
    subject: str
    authority: str = "ca"
    alternative_names: str = ""
    has_kubeconfig: bool = False


def plan_leaves(settings: ClusterSettings) -> list[Leaf]:
    """Return every certificate that the cluster's programs present."""
    node = settings.node_name
    api_names = (
        "DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc,"
        f"IP:{KUBERNETES_SERVICE_ADDRESS},IP:127.0.0.1,IP:{settings.node_address}"
    )
    return [
        Leaf("apiserver", "/CN=kube-apiserver", alternative_names=api_names),
        Leaf("apiserver-kubelet", "/O=system:masters/CN=apiserver-kubelet"),
        Leaf("front-proxy", "/CN=front-proxy-client", authority="front-ca"),
        Leaf("admin", "/O=system:masters/CN=admin", has_kubeconfig=True),
        Leaf("controller-manager", "/CN=system:kube-controller-manager", has_kubeconfig=True),
        Leaf("scheduler", "/CN=system:kube-scheduler", has_kubeconfig=True),
        Leaf("proxy", "/CN=system:kube-proxy", has_kubeconfig=True),
        Leaf(
            "node",
            f"/O=system:nodes/CN=system:node:{node}",
            alternative_names=f"DNS:{node},IP:{settings.node_address}",
            has_kubeconfig=True,
        ),
    ]


def ensure_pki(settings: ClusterSettings) -> None:
    """Make what is missing; the marker is written last, so that a half-made folder is completed."""
    folder = settings.pki
    marker = folder / "complete"
    if marker.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    for authority in AUTHORITIES:
        files = ["-keyout", f"{authority}.key", "-out", f"{authority}.crt"]
        run(["openssl", "req", "-x509", *NEW_KEY, "-days", DAYS, "-subj", f"/CN={authority}", *files], cwd=folder)
    for leaf in plan_leaves(settings):
        _sign(leaf, folder)
        if leaf.has_kubeconfig:
            (folder / f"{leaf.name}.kubeconfig").write_text(_kubeconfig(leaf.name, settings))
    run(["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", "service-accounts.key"], cwd=folder)
    run(["openssl", "pkey", "-in", "service-accounts.key", "-pubout", "-out", "service-accounts.pub"], cwd=folder)
    marker.touch()


def _sign(leaf: Leaf, folder: Path) -> None:
    run(
        ["openssl", "req", *NEW_KEY, "-subj", leaf.subject, "-keyout", f"{leaf.name}.key", "-out", f"{leaf.name}.csr"],
        cwd=folder,
    )
    extensions = "keyUsage=digitalSignature\nextendedKeyUsage=serverAuth,clientAuth\n"
    if leaf.alternative_names:
        extensions += f"subjectAltName={leaf.alternative_names}\n"
    (folder / f"{leaf.name}.ext").write_text(extensions)
    files = ["-in", f"{leaf.name}.csr", "-out", f"{leaf.name}.crt", "-extfile", f"{leaf.name}.ext"]
    authority = ["-CA", f"{leaf.authority}.crt", "-CAkey", f"{leaf.authority}.key", "-CAcreateserial"]
    run(["openssl", "x509", "-req", "-days", DAYS, *files, *authority], cwd=folder)


def _kubeconfig(name: str, settings: ClusterSettings) -> str:
    folder = settings.pki
    return f"""\
apiVersion: v1
kind: Config
current-context: {settings.name}
clusters:
- name: {settings.name}
  cluster: {{server: "https://{settings.node_address}:6443", certificate-authority: {folder}/ca.crt}}
users:
- name: {name}
  user: {{client-certificate: {folder}/{name}.crt, client-key: {folder}/{name}.key}}
contexts:
- name: {settings.name}
  context: {{cluster: {settings.name}, user: {name}}}
"""
