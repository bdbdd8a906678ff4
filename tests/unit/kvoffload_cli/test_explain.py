"""`kubectl kvoffload explain pod`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fixtures.cli.cluster import ailing, healthy
from fixtures.cli.pods import pod
from fixtures.cli.pools import engine, pool
from fixtures.cli.reader import FixtureReader
from fixtures.cli.release import deployment
from fixtures.cli.scene import NOW, SYSTEM
from kvoffload.api.keys import SkipReason
from kvoffload.errors import InvalidSpec
from kvoffload_cli.explain import as_document, explain_pod, render
from kvoffload_cli.kube import ClusterReader
from kvoffload_cli.observation import API, POOLS, REGIONS
from kvoffload_cli.observe import observe_pod
from kvoffload_cli.output import print_json
from kvoffload_cli.remedies import SKIP_REMEDIES

PODS = [
    ("healthy", "team-a/vllm-a"),
    ("ailing", "team-a/vllm-a"),
    ("ailing", "team-b/vllm-b"),
    ("ailing", "team-b/old-vllm"),
    ("ailing", "team-a/no-pool"),
    ("ailing", "team-a/skipped"),
    ("ailing", "team-a/missed"),
    ("ailing", "team-a/elsewhere"),
    ("ailing", "team-a/starting"),
]
CLUSTERS = {"healthy": healthy, "ailing": ailing}


@pytest.mark.parametrize(("cluster", "name"), PODS)
def test_answers_are_the_golden_ones(cluster: str, name: str, golden: Callable[[str, str], None]) -> None:
    namespace, _, pod_name = name.partition("/")
    facts = observe_pod(FixtureReader(CLUSTERS[cluster]()), namespace=namespace, name=pod_name, now=NOW)
    console = Console(width=160, highlight=False)
    with console.capture() as capture:
        render(console, explain_pod(facts, namespace=namespace, name=pod_name))
    golden(f"explain-{cluster}-{pod_name}.txt", capture.get())


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_json_answers_are_the_golden_ones(cluster: str, golden: Callable[[str, str], None]) -> None:
    facts = observe_pod(FixtureReader(CLUSTERS[cluster]()), namespace="team-a", name="vllm-a", now=NOW)
    console = Console(width=160, highlight=False)
    with console.capture() as capture:
        print_json(console, as_document(explain_pod(facts, namespace="team-a", name="vllm-a")))
    golden(f"explain-{cluster}-vllm-a.json", capture.get())


@pytest.mark.parametrize(
    ("context", "namespace"), [(None, "team-a"), ("first", "team-a"), ("second", "team-b"), ("bare", "default")]
)
def test_a_pod_without_a_namespace_is_of_the_context_s(tmp_path: Path, context: str | None, namespace: str) -> None:
    contexts = {"first": {"namespace": "team-a"}, "second": {"namespace": "team-b"}, "bare": {}}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "first",
        "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": name, "context": {"cluster": "c", "user": "u", **of}} for name, of in contexts.items()],
    }
    (tmp_path / "config").write_text(json.dumps(config))
    assert ClusterReader(kubeconfig=str(tmp_path / "config"), context=context).namespace == namespace


def test_every_skip_reason_has_a_remedy() -> None:
    assert set(SKIP_REMEDIES) == set(SkipReason)


MAKER = {"metadata": {"name": "vllm"}, "spec": {"selector": {"matchLabels": {"kvoffload.io/pool": "llm"}}}}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nothing", r"there is no pod nothing in namespace team-a: kubectl get pods -n team-a -l kvoffload\.io/pool"),
        ("bare", r"pod team-a/bare does not have the label kvoffload\.io/pool, .*kvoffload\.io/pool: <pool>"),
        ("vllm", "team-a/vllm is a Deployment, not a pod; its pods are vllm-a, vllm-b$"),
        ("empty", "team-a/empty is a StatefulSet, not a pod; this StatefulSet has no pod now$"),
    ],
)
def test_a_name_that_is_no_labelled_pod_gets_a_text_of_its_own(name: str, expected: str) -> None:
    objects = healthy()
    objects["/api/v1/pods"].append(pod("bare", labels={"app": "vllm"}, injected=False))
    objects["/apis/apps/v1/namespaces/team-a/deployments/vllm"] = MAKER
    none = {"metadata": {"name": "empty"}, "spec": {"selector": {"matchLabels": {"app": "none"}}}}
    objects["/apis/apps/v1/namespaces/team-a/statefulsets/empty"] = none
    with pytest.raises(InvalidSpec, match=expected):
        observe_pod(FixtureReader(objects), namespace="team-a", name=name, now=NOW)


def test_who_may_not_read_deployments_is_told_that_there_is_no_such_pod() -> None:
    reader = FixtureReader(healthy(), denied=("/apis/apps/v1/namespaces/team-a/deployments/vllm",))
    with pytest.raises(InvalidSpec, match="there is no pod vllm"):
        observe_pod(reader, namespace="team-a", name="vllm", now=NOW)


def answers_about(one: dict[str, Any], **objects: Any) -> dict[str, list[str]]:
    """What explain says of a pod in the healthy cluster."""
    cluster = healthy() | objects
    cluster["/api/v1/pods"] = [one]
    name, namespace = one["metadata"]["name"], one["metadata"]["namespace"]
    facts = observe_pod(FixtureReader(cluster), namespace=namespace, name=name, now=NOW)
    return as_document(explain_pod(facts, namespace=namespace, name=name))


def with_label_of(manager: str, *, time: str, creates: bool) -> dict[str, Any]:
    one = pod("missed", injected=False)
    fields: dict[str, Any] = {"f:metadata": {"f:labels": {".": {}, "f:kvoffload.io/pool": {}}}}
    if creates:
        fields["f:spec"] = {"f:containers": {}}
    one["metadata"]["managedFields"] = [
        {"manager": manager, "operation": "Update", "time": time, "fieldsV1": fields},
        {"manager": "kubelet", "operation": "Update", "time": time, "fieldsV1": {"f:status": {}}},
    ]
    return one


@pytest.mark.parametrize(
    ("missed", "expected"),
    [
        (
            with_label_of("kubectl-label", time="2026-11-29T17:00:00Z", creates=False),
            "came after the pod was created, and",
        ),
        (with_label_of("kubectl-create", time="2026-11-29T16:00:00Z", creates=True), "no: no webhook answered"),
        (with_label_of("kubectl-apply", time="2026-11-29T17:00:00Z", creates=True), "or no webhook answered then"),
    ],
    ids=["a label later", "a label at creation", "the creator later"],
)
def test_the_webhook_is_not_blamed_for_a_label_that_came_later(missed: dict[str, Any], expected: str) -> None:
    assert expected in answers_about(missed)["injected"][0]


@pytest.mark.parametrize("namespace", ["kube-system", SYSTEM])
def test_the_webhook_is_not_blamed_where_it_is_never_asked(namespace: str) -> None:
    in_release = {f"/apis/apps/v1/namespaces/{SYSTEM}/deployments": [deployment("operator")]}
    answer = answers_about(pod("missed", injected=False, namespace=namespace), **in_release)["injected"]
    assert answer[0].startswith(f"no: the webhook is never asked about pods of namespace {namespace}")
    assert answer[1].startswith("run the pod in another namespace")


def test_a_missed_pod_of_a_pool_for_some_namespaces_is_told_what_its_namespace_needs_as_well() -> None:
    some = {POOLS: [pool("llm", namespaceSelector={"matchLabels": {"team": "a"}})]}
    (_, remedy) = answers_about(pod("missed", injected=False), **some)["injected"]
    assert remedy.endswith("; its namespace must have the labels of the namespaceSelector of pool llm")
    (_, remedy) = answers_about(pod("missed", injected=False))["injected"]
    assert "namespaceSelector" not in remedy


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (
            {
                "restartCount": 4,
                "state": {"waiting": {"reason": "CrashLoopBackOff"}},
                "lastState": {
                    "terminated": {"reason": "OOMKilled", "exitCode": 137, "finishedAt": "2026-11-29T17:59:00Z"}
                },
            },
            "no: the pod's containers were started again 4 times, ended last: vllm OOMKilled (exit code 137) at "
            "2026-11-29 17:59:00 UTC, now vllm CrashLoopBackOff",
        ),
        (
            {"restartCount": 0, "state": {"waiting": {"reason": "ImagePullBackOff"}}},
            "not yet: the pod waits: vllm ImagePull",
        ),
        ({"restartCount": 0, "state": {"running": {}}}, "not yet: an engine attaches when it has loaded its weights"),
    ],
)
def test_a_pod_that_restarts_is_not_told_to_wait_for_its_weights(state: dict[str, Any], expected: str) -> None:
    one = pod("starting", ready=False, containerStatuses=[{"name": "vllm", **state}])
    assert answers_about(one)["attached"][0].startswith(expected)


def test_an_engine_that_runs_without_offload_shares_with_nobody() -> None:
    alone = engine("team-a", "vllm-b", engineID="without-1", confirmed="left-alone")
    objects = healthy()
    objects[REGIONS][0]["status"]["engines"] = [engine("team-a", "vllm-a"), alone]
    facts = observe_pod(FixtureReader(objects), namespace="team-a", name="vllm-a", now=NOW)
    assert as_document(explain_pod(facts, namespace="team-a", name="vllm-a"))["sharing"][-1] == "attached now: no other"


def test_a_cluster_without_the_kind_is_not_taken_for_one_without_the_pool() -> None:
    assert "CRDs are not installed" in answers_about(pod("vllm-a"), **{POOLS: [], API: None})["pool"][0]


@pytest.mark.parametrize(
    ("sharing", "expected"),
    [
        ("Namespace", ["attached now: no other"]),
        ("Pool", ["attached now: team-b/vllm-b (deepseek-ai/DeepSeek-V3)"]),
        ("Pod", ["with nobody: the pool's sharing is Pod"]),
    ],
)
def test_sharing_follows_the_pool(sharing: str, expected: list[str]) -> None:
    objects = healthy()
    objects[POOLS] = [pool("llm", sharing=sharing)]
    objects[REGIONS][0]["status"]["engines"] = [engine("team-a", "vllm-a"), engine("team-b", "vllm-b")]
    facts = observe_pod(FixtureReader(objects), namespace="team-a", name="vllm-a", now=NOW)
    assert as_document(explain_pod(facts, namespace="team-a", name="vllm-a"))["sharing"][-1:] == expected


def test_unknown_skip_reason_of_a_newer_webhook_is_shown_as_it_is() -> None:
    objects = healthy()
    annotations = {"kvoffload.io/skip-reason": "FullMoon"}
    objects["/api/v1/pods"] = [pod("later", injected=False, annotations=annotations)]
    facts = observe_pod(FixtureReader(objects), namespace="team-a", name="later", now=NOW)
    assert "FullMoon" in as_document(explain_pod(facts, namespace="team-a", name="later"))["injected"][0]


def test_who_may_read_only_the_pod_learns_what_it_says_and_whom_to_ask(golden: Callable[[str, str], None]) -> None:
    reader = FixtureReader(healthy(), denied=(POOLS, REGIONS))
    facts = observe_pod(reader, namespace="team-a", name="vllm-a", now=NOW)
    console = Console(width=160, highlight=False)
    with console.capture() as capture:
        render(console, explain_pod(facts, namespace="team-a", name="vllm-a"))
    golden("explain-denied-vllm-a.txt", capture.get())


def test_nothing_is_read_that_belongs_to_other_namespaces() -> None:
    others = ("/api/v1/pods", "/api/v1/nodes", "/apis/apps/v1/deployments", "/version")
    facts = observe_pod(FixtureReader(healthy(), denied=others), namespace="team-a", name="vllm-a", now=NOW)
    assert facts.unreadable == ()
    assert "attached" in as_document(explain_pod(facts, namespace="team-a", name="vllm-a"))
