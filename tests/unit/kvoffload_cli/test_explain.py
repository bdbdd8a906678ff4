"""`kubectl kvoffload explain pod`."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from fixtures.cli.cluster import NOW, FixtureReader, ailing, engine, healthy, pod, pool
from kvoffload.api.keys import SkipReason
from kvoffload.errors import InvalidSpec
from kvoffload_cli.explain import as_document, explain_pod, render
from kvoffload_cli.kube import ClusterReader
from kvoffload_cli.observe import POOLS, REGIONS, observe_pod
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


def test_pod_without_the_label_is_told_how_to_opt_in() -> None:
    facts = observe_pod(FixtureReader(healthy()), namespace="team-a", name="nothing", now=NOW)
    with pytest.raises(InvalidSpec, match=r"kvoffload\.io/pool: <pool>"):
        explain_pod(facts, namespace="team-a", name="nothing")


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
