"""What is in the bundle. Called by `report`; a part that cannot be read is a failure, and the rest goes on.

Everything is bounded: objects of a kind, pods whose logs are read, lines and bytes of each log. What was left out by
that is said in `summary.json`, what could not be read in `not-read.json`.
"""

import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from importlib import metadata
from typing import Any, TypeVar

from kvoffload.api import keys
from kvoffload.api.schema import build_crds
from kvoffload_cli import doctor
from kvoffload_cli.bundle import kept
from kvoffload_cli.bundle.once import OnceReader
from kvoffload_cli.bundle.parts import Bundle
from kvoffload_cli.bundle.pseudonyms import Pseudonyms
from kvoffload_cli.bundle.texts import add_texts, urgency
from kvoffload_cli.checks import run_checks
from kvoffload_cli.facts import ClusterFacts
from kvoffload_cli.kube import Reader
from kvoffload_cli.observation import POOLS, REGIONS
from kvoffload_cli.observe import ADMISSION, CRDS, DAEMONSETS, NODES, PODS, observe_cluster
from kvoffload_cli.observe_pods import Manifest, labels_of
from kvoffload_cli.observe_rights import DEPLOYMENTS, OURS
from kvoffload_cli.observe_workloads import happened_at

EVENTS, OF_OPERATOR = "/api/v1/events", "reportingComponent=kvoffload.io/operator"
KEPT_NAMESPACES = frozenset({"default", "kube-system", "kube-public", "kube-node-lease"})
"""Every cluster has them; --redact leaves them and the release's own."""

_T = TypeVar("_T")


def gather(
    reader: Reader, *, now: datetime, with_logs: bool = True, since_seconds: int = 0, redacts: bool = False
) -> Bundle:
    """Read the cluster.

    Raises:
        ClusterUnavailable: the API server does not answer at all.
    """
    once, bundle = OnceReader(reader), Bundle()
    facts = observe_cluster(once, now=now)
    add_findings(bundle, facts)
    pods = read_list(bundle, once, PODS)
    namespaces = facts.release_namespaces
    ours = [pod for pod in pods if pod["metadata"]["namespace"] in namespaces and is_of_release(pod)]
    workloads = [one for path in (DEPLOYMENTS, DAEMONSETS) for one in read_list(bundle, once, path, labels=OURS)]
    add_resources(bundle, once, facts)
    add_list(bundle, "workloads", workloads, kept.kept_workload)
    add_list(bundle, "pods", sorted(ours, key=urgency), kept.kept_pod)
    add_list(bundle, "engine pods", (pod for pod in pods if labels_of(pod).get(keys.POOL_LABEL)), kept.kept_engine_pod)
    add_events(bundle, once, [*workloads, *ours])
    add_texts(bundle, once, ours, with_logs=with_logs, since_seconds=since_seconds)
    failures = [{"what": what, "reason": reason} for what, reason in bundle.failures]
    bundle.add("not-read.json", failures, f"{len(failures)} failures")
    summary = {
        "plugin": metadata.version("kvoffload"),
        "createdAt": now,
        "kubernetes": ".".join(map(str, facts.server_version)),
        "logs": "left out" if not with_logs else f"of the last {since_seconds} s" if since_seconds else "of any age",
        "redacted": redacts,
        "leftOut": list(bundle.left_out),
        "files": dict(bundle.holds),
    }
    bundle.add("summary.json", summary, "when, by what, what was left out")
    if redacts:
        rename_all(bundle, facts, all_namespaces={pod["metadata"]["namespace"] for pod in pods})
    return bundle


OF_TENANT = re.compile(r"\bnamespace/([a-z0-9][-a-z0-9]*)|\bpod ([a-z0-9][-a-z0-9]*)/")
"""A namespace in metrics, as a tenant, and in the daemons' logs, as a tenant or before a pod's name."""


def is_of_release(manifest: Manifest) -> bool:
    """Whether the chart or the operator made it."""
    return labels_of(manifest).get("app.kubernetes.io/name") == "kvoffload"


def read_list(bundle: Bundle, reader: Reader, path: str, *, labels: str = "", fields: str = "") -> list[dict[str, Any]]:
    """A collection; empty, and a failure, where it could not be read."""
    what = path + (f"?fieldSelector={fields}" if fields else "")
    return bundle.attempt(what, lambda: reader.list_objects(path, labels=labels, fields=fields), [])


def add_list(bundle: Bundle, kind: str, found: Iterable[_T], keep: Callable[[_T], Any]) -> None:
    """A file with what is kept of each object."""
    name = f"{kind.lower().replace(' ', '-')}.json"
    content = [keep(one) for one in bundle.bounded(name, found)]
    bundle.add(name, content, f"{len(content)} {kind}")


def add_findings(bundle: Bundle, facts: ClusterFacts) -> None:
    """What doctor says."""
    findings = run_checks(facts)
    document = doctor.as_document(facts, bundle.bounded("doctor.json", findings))
    bundle.add("doctor.json", document, f"{len(findings)} findings")


def add_resources(bundle: Bundle, reader: Reader, facts: ClusterFacts) -> None:
    """What belongs to no namespace: pools, regions, nodes, and what the chart configures the API server with."""
    bundle.attempt("/version", lambda: reader.get("/version"), None)
    add_list(bundle, "pools", read_list(bundle, reader, POOLS), kept.kept_resource)
    add_list(bundle, "regions", read_list(bundle, reader, REGIONS), kept.kept_resource)
    read_list(bundle, reader, NODES)
    add_list(bundle, "nodes", facts.nodes, lambda node: kept.kept_node(node, facts.pools))
    paths = [f"{ADMISSION}/{kind}webhookconfigurations" for kind in ("mutating", "validating")]
    configurations = [one for path in paths for one in read_list(bundle, reader, path, labels=OURS)]
    add_list(bundle, "webhook configurations", configurations, kept.kept_configuration)
    paths = [f"{CRDS}/{crd['metadata']['name']}" for crd in build_crds().values()]
    found = [bundle.attempt(path, lambda path=path: reader.get(path), None) for path in paths]  # type: ignore[misc]
    add_list(bundle, "CRDs", [crd for crd in found if crd is not None], kept.kept_crd)


def add_events(bundle: Bundle, reader: Reader, objects: Sequence[Manifest]) -> None:
    """What anybody says of these objects, and the operator of pools, regions and users' pods; newest first."""
    names = {one["metadata"]["name"] for one in objects}
    namespaces = sorted({one["metadata"]["namespace"] for one in objects})
    of_release = [one for space in namespaces for one in read_list(bundle, reader, events_path(space))]
    events = [
        *(one for one in of_release if is_about(one, names)),
        *read_list(bundle, reader, EVENTS, fields=OF_OPERATOR),
    ]
    by_name = {(one["metadata"].get("namespace"), one["metadata"]["name"]): one for one in events}
    add_list(bundle, "events", sorted(by_name.values(), key=happened_at, reverse=True), kept.kept_event)


def events_path(namespace: str) -> str:
    """The events of a namespace."""
    return f"/api/v1/namespaces/{namespace}/events"


def is_about(event: Manifest, names: set[str]) -> bool:
    """Whether it is about one of these objects, or about what they made: a ReplicaSet, a pod that is gone."""
    about = event["involvedObject"].get("name", "")
    return about in names or any(about.startswith(f"{name}-") for name in names)


def rename_all(bundle: Bundle, facts: ClusterFacts, *, all_namespaces: set[str]) -> None:
    """Replace the names of users' namespaces and pods, and of nodes, in every file and every failure."""
    ours = facts.release_namespaces | KEPT_NAMESPACES
    engines = [engine for region in facts.regions for engine in region.status.engines]
    about = [event["involvedObject"] for event in bundle.entries["events.json"]]
    namespaces = {
        *all_namespaces,
        *(engine.pod_namespace for engine in engines),
        *(quota.namespace for pool in facts.pools for quota in pool.spec.quotas),
        *(one.get("namespace", "") for one in about),
    }
    names = Pseudonyms(secrets.token_bytes(16))
    names.add("namespace", namespaces - ours)
    names.add("node", (node.name for node in facts.nodes))
    names.add("node", (region.spec.node_name for region in facts.regions))
    names.add("pod", (pod.name for pod in facts.pods))
    names.add("pod", (engine.pod_name for engine in engines))
    names.add("pod", (one["name"] for one in about if one.get("kind") == "Pod" and one.get("namespace") not in ours))
    texts = [content for content in bundle.entries.values() if isinstance(content, str)]
    # a tenant outlives its pods, and a log its namespaces
    names.add("namespace", {one for text in texts for found in OF_TENANT.findall(text) for one in found} - ours - {""})
    for text in texts:
        names.learn(text)
    bundle.entries = {name: names.renamed(content) for name, content in bundle.entries.items()}
    bundle.failures = [(names.renamed(what), names.renamed(reason)) for what, reason in bundle.failures]
