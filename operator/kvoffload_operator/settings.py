"""What the chart tells the operator and the webhook, by environment variables `KVOFFLOAD_<NAME>`.

Read once at start by `__main__`; everything else gets the object. `docs/reference/settings.md` is generated from the
descriptions.
"""

from enum import StrEnum
from typing import Annotated

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

Seconds = Annotated[float, Field(gt=0, le=86400)]
Port = Annotated[int, Field(ge=1, le=65535)]


class CertificateMode(StrEnum):
    """Where the webhook's serving certificate comes from."""

    SELF = "self"
    CERT_MANAGER = "cert-manager"
    PROVIDED = "provided"


class Settings(BaseSettings):
    """Settings of both processes; fields of one are ignored by the other."""

    model_config = SettingsConfigDict(env_prefix="KVOFFLOAD_", frozen=True, extra="ignore")

    namespace: str = Field(
        default="kvoffload-system", description="The release's namespace, where DaemonSets are made."
    )
    release: str = Field(default="kvoffload", description="Prefix of the chart's object names.")
    pod_name: str = Field(default="kvoffload-operator", description="Identity in the leader's Lease.")
    log_level: str = Field(default="INFO", description="Python's log level names.")

    node_image: str = Field(default="kvoffload/node:0.1.0", description="Image of daemon and attacher.")
    image_pull_policy: str = Field(default="IfNotPresent", description="Pull policy of the node image.")
    image_pull_secrets: list[str] = Field(default=[], description="Names of pull secrets, a JSON list.")
    kubelet_root_dir: str = Field(default="/var/lib/kubelet", description="The kubelet's root folder on the nodes.")
    hugetlbfs_path_2mi: str = Field(default="/dev/hugepages", description="The nodes' hugetlbfs mount for 2Mi pages.")
    hugetlbfs_path_1gi: str = Field(
        default="/dev/hugepages-1Gi", description="The nodes' hugetlbfs mount for 1Gi pages."
    )
    node_service_account: str = Field(default="kvoffload-node", description="Service account of the DaemonSets' pods.")
    node_priority_class: str = Field(default="", description="Priority class of the DaemonSets' pods; empty: none.")
    node_labels: dict[str, str] = Field(default={}, description="Labels of the DaemonSets and their pods, JSON.")
    node_pod_annotations: dict[str, str] = Field(default={}, description="Annotations of the DaemonSets' pods, JSON.")
    node_resources: dict[str, dict[str, str]] = Field(
        default={"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "1Gi"}},
        description="Requests and limits of the daemon container besides pages, JSON.",
    )

    metrics_port: Port = Field(default=9422, description="Port of /metrics, /healthz and /readyz.")
    lease_seconds: Seconds = Field(default=12.0, description="A lease not renewed for this long may be taken over.")
    renew_deadline_seconds: Seconds = Field(
        default=10.0, description="A leader that could not renew for this long stops writing and exits."
    )
    lease_retry_seconds: Seconds = Field(default=1.0, description="Pause between attempts to take or renew the lease.")
    resync_seconds: Seconds = Field(default=300.0, description="How often everything is listed anew.")
    daemon_silence_seconds: Seconds = Field(
        default=90.0, description="A node whose region is not Ready this long after its daemon started is NotReporting."
    )
    unattached_seconds: Seconds = Field(
        default=120.0, description="An injected pod that runs this long without an engine is reported as unattached."
    )
    apply_crds: bool = Field(default=True, description="Whether the leader applies its own version of the CRDs.")
    write_parallelism: Annotated[int, Field(ge=1, le=64)] = Field(
        default=16, description="Requests to the API server at once while many nodes change."
    )

    webhook_port: Port = Field(default=9443, description="Port of the admission server.")
    webhook_name: str = Field(
        default="kvoffload-webhook",
        description="Name of the webhook's Service for pools and of its ValidatingWebhookConfiguration; each replica's "
        "Deployment, Service and MutatingWebhookConfiguration are NAME-0, NAME-1 and so on.",
    )
    webhook_replicas: Annotated[int, Field(ge=0, le=3)] = Field(default=2, description="Replicas of the webhook.")
    certificate_mode: CertificateMode = Field(
        default=CertificateMode.SELF, description="self, cert-manager or provided."
    )
    certificate_secret: str = Field(default="kvoffload-webhook-tls", description="Secret with the serving certificate.")
    certificate_dir: str = Field(default="/tls", description="Where that Secret is mounted in the webhook's pods.")
    engine_step_deadline_seconds: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None,
        description="How long a scheduler's step may wait for the node daemon, injected into pods that do not say it "
        "themselves; absent: the engine's own 2 ms.",
    )
    certificate_days: Annotated[int, Field(ge=1, le=3650)] = Field(
        default=90, description="Days that a self-made certificate is valid; it is renewed after two thirds."
    )
