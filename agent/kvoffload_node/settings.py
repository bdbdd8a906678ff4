"""Settings of the daemon and the attacher, from environment variables; `docs/reference/settings.md` is made from this.

Read once by `__main__.py`. What the pool decides is not here: that comes with the region's spec.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from kvoffload.api.keys import ATTACHER_PORT, DAEMON_METRICS_PORT


class NodeSettings(BaseSettings):
    """Where things are and who we are. Every name has the prefix `KVOFFLOAD_`."""

    model_config = SettingsConfigDict(env_prefix="KVOFFLOAD_", frozen=True)

    pool: Annotated[str, Field(description="Name of the pool that this daemon serves.")]
    node_name: Annotated[str, Field(description="Name of the node, from the downward API.")]
    pod_name: Annotated[str, Field(description="Name of the daemon's own pod.")] = ""
    namespace: Annotated[str, Field(description="The operator's namespace, where the DaemonSet is.")] = ""
    daemonset: Annotated[str, Field(description="Name of the DaemonSet that this pod belongs to.")] = ""
    log_level: Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR"], Field(description="Least level logged.")] = (
        "INFO"
    )
    region_file: Annotated[
        Path | None,
        Field(
            description="Read the region's spec from this JSON file (its end is the region's) and speak to no API "
            "server: for tests and benches."
        ),
    ] = None
    hugepages: Annotated[Path, Field(description="Where the hugetlbfs (or tmpfs) is mounted.")] = Path("/hugepages")
    state: Annotated[Path, Field(description="Folder for journals, attachments and the last spec seen.")] = Path(
        "/state"
    )
    handoff: Annotated[Path, Field(description="Folder shared by daemon and attacher, for their socket.")] = Path(
        "/handoff"
    )
    kubelet_pods: Annotated[Path, Field(description="The kubelet's pods folder, in the attacher only.")] = Path(
        "/kubelet-pods"
    )
    engine_library: Annotated[Path, Field(description="The library that the attacher writes into pods.")] = Path(
        "/opt/kvoffload/engine/lib"
    )
    host_root: Annotated[Path, Field(description="Where /sys and /proc are found; another root in tests.")] = Path("/")
    metrics_port: Annotated[int, Field(ge=0, le=65535, description="Port of /metrics, /healthz and /readyz.")] = (
        DAEMON_METRICS_PORT
    )
    attacher_port: Annotated[int, Field(ge=0, le=65535, description="Port of the attacher's /healthz.")] = ATTACHER_PORT
    quarantine_seconds: Annotated[
        float, Field(ge=0, le=600, description="How long a dead writer's slots wait, as its DMA may still land.")
    ] = 10.0
    drain_seconds: Annotated[
        float, Field(ge=0, le=600, description="How long a stopping daemon waits for writes under way.")
    ] = 5.0

    @property
    def handoff_socket(self) -> Path:
        """Where the daemon listens for the attacher."""
        return self.handoff / "attach.sock"
