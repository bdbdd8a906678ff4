"""Logs and metrics of our pods, those that fail first and each within its bounds. Called by `contents`."""

from collections.abc import Iterable, Mapping

from kvoffload.api import keys
from kvoffload_cli.bundle.parts import MAX_TEXT_BYTES, Bundle
from kvoffload_cli.kube import Reader
from kvoffload_cli.observe_pods import Manifest, labels_of, metrics_proxy, path_of
from kvoffload_cli.observe_release import has_condition

CONTAINERS = ("operator", "webhook", "daemon", "attacher", "mount-hugetlbfs")
"""Ours; what others put beside them into our pods keeps its log to itself."""
MAX_PODS = 30
"""Whose logs and metrics are read."""
LOG_LINES = (5000, 500, 50)
"""The last lines of a log; fewer where those are too many bytes."""


def add_texts(bundle: Bundle, reader: Reader, pods: Iterable[Manifest], *, with_logs: bool, since_seconds: int) -> None:
    """Read what the most urgent of these pods say."""
    started = [pod for pod in sorted(pods, key=urgency) if pod["spec"].get("nodeName")]
    if len(started) > MAX_PODS:
        what = "logs and metrics" if with_logs else "metrics"
        those = "daemons that are not ready or were restarted come first"
        bundle.left_out.append(f"{what}: of {MAX_PODS} of {len(started)} pods; {those}")
    for pod in started[:MAX_PODS]:
        add_metrics(bundle, reader, pod)
        if with_logs:
            add_logs(bundle, reader, pod, since_seconds=since_seconds)


def urgency(pod: Manifest) -> tuple[bool, bool, int, str]:
    """Operator and webhook come before the many daemons, then what is not ready, then what was restarted most."""
    status = pod.get("status", {})
    restarts = sum(one.get("restartCount", 0) for one in status.get("containerStatuses", []))
    is_daemon = keys.DAEMON_OF_LABEL in labels_of(pod)
    return is_daemon, has_condition(status, "Ready"), -restarts, pod["metadata"]["name"]


def add_metrics(bundle: Bundle, reader: Reader, pod: Manifest) -> None:
    """What a running pod of ours shows on its port `metrics`."""
    proxy = metrics_proxy(pod)
    if proxy is None:
        return
    name = f"metrics/{file_name(pod)}.txt"
    text = bundle.attempt_text(name, lambda: reader.text(f"{proxy}/metrics"))
    if text is not None:
        bundle.add_text(name, text)


def add_logs(bundle: Bundle, reader: Reader, pod: Manifest, *, since_seconds: int) -> None:
    """The log of each container of ours that has run, and of its run before the last restart."""
    status = pod.get("status", {})
    for container in (*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])):
        if container["name"] not in CONTAINERS:
            continue
        query = {"container": container["name"], "timestamps": "true"}
        if since_seconds:
            query["sinceSeconds"] = str(since_seconds)
        if "waiting" not in container.get("state", {}):
            add_log(bundle, reader, pod, query, container["name"])
        if container.get("restartCount", 0):
            add_log(bundle, reader, pod, {**query, "previous": "true"}, f"{container['name']}.previous")


def add_log(bundle: Bundle, reader: Reader, pod: Manifest, query: Mapping[str, str], run: str) -> None:
    """One log."""
    name = f"logs/{file_name(pod)}/{run}.log"
    tail = bundle.attempt_text(name, lambda: read_tail(reader, f"{path_of(pod)}/log", query))
    if tail is not None:
        text, num_lines = tail
        if text.count("\n") >= num_lines:
            bundle.left_out.append(f"{name}: all but the last {num_lines} lines")
        bundle.add_text(name, text)


def read_tail(reader: Reader, path: str, query: Mapping[str, str]) -> tuple[str, int]:
    """The last lines of a log, and how many were asked for: as many as its bound takes, for the API server would keep
    the first bytes of them."""
    text, num_lines = "", 0
    for num_lines in LOG_LINES:
        text = reader.text(path, query={**query, "tailLines": str(num_lines), "limitBytes": str(MAX_TEXT_BYTES)})
        if len(text.encode()) < MAX_TEXT_BYTES:
            break
    return text, num_lines


def file_name(pod: Manifest) -> str:
    """A pod's name in the bundle."""
    return f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
