"""`kubectl kvoffload explain pod`."""

from collections.abc import Callable

import pytest
from rich.console import Console

from fixtures.cli.cluster import NOW, FixtureReader, ailing, engine, healthy, pod, pool
from kvoffload.api.keys import SkipReason
from kvoffload.errors import InvalidSpec
from kvoffload_cli.explain import as_document, explain_pod, render
from kvoffload_cli.observe import POOLS, REGIONS, observe_cluster
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
    facts = observe_cluster(FixtureReader(CLUSTERS[cluster]()), now=NOW)
    namespace, _, pod_name = name.partition("/")
    console = Console(width=160, highlight=False)
    with console.capture() as capture:
        render(console, explain_pod(facts, namespace=namespace, name=pod_name))
    golden(f"explain-{cluster}-{pod_name}.txt", capture.get())


def test_every_skip_reason_has_a_remedy() -> None:
    assert set(SKIP_REMEDIES) == set(SkipReason)


def test_pod_without_the_label_is_told_how_to_opt_in() -> None:
    facts = observe_cluster(FixtureReader(healthy()), now=NOW)
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
    facts = observe_cluster(FixtureReader(objects), now=NOW)
    assert as_document(explain_pod(facts, namespace="team-a", name="vllm-a"))["sharing"][-1:] == expected


def test_unknown_skip_reason_of_a_newer_webhook_is_shown_as_it_is() -> None:
    objects = healthy()
    annotations = {"kvoffload.io/skip-reason": "FullMoon"}
    objects["/api/v1/pods"] = [pod("later", injected=False, annotations=annotations)]
    facts = observe_cluster(FixtureReader(objects), now=NOW)
    assert "FullMoon" in as_document(explain_pod(facts, namespace="team-a", name="later"))["injected"][0]
