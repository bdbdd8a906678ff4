"""`kubectl kvoffload status`."""

import json
from collections.abc import Callable

import pytest
from rich.console import Console

from fixtures.cli.cluster import ailing, healthy
from fixtures.cli.reader import FixtureReader
from fixtures.cli.release import deployment
from fixtures.cli.scene import NOW
from kvoffload.errors import InvalidSpec
from kvoffload_cli import status
from kvoffload_cli.kube import ClusterUnavailable
from kvoffload_cli.observation import API, POOLS, REGIONS
from kvoffload_cli.observe import observe_pools, observe_status
from kvoffload_cli.output import print_json


@pytest.mark.parametrize(("name", "objects"), [("healthy", healthy), ("ailing", ailing)])
def test_tables_are_the_golden_ones(
    name: str, objects: Callable[[], dict[str, object]], golden: Callable[[str, str], None]
) -> None:
    facts = observe_pools(FixtureReader(objects()), now=NOW)
    console = Console(width=160, highlight=False)
    with console.capture() as capture:
        status.render(console, facts, status.select(facts, ""))
    golden(f"status-{name}.txt", capture.get())
    with console.capture() as capture:
        print_json(console, status.as_document(facts, status.select(facts, "")))
    golden(f"status-{name}.json", capture.get())


def test_json_holds_the_objects_own_fields() -> None:
    facts = observe_pools(FixtureReader(healthy()), now=NOW)
    document = json.loads(json.dumps(status.as_document(facts, status.select(facts, "llm"))))
    (pool,) = document["pools"]
    assert pool["status"]["usedBytes"] == 36 << 30
    assert [region["node"] for region in pool["regions"]] == ["gpu-1", "gpu-2"]
    assert pool["regions"][0]["status"]["engines"][1]["podName"] == "vllm-b"


def test_unknown_pool_names_those_that_exist() -> None:
    facts = observe_pools(FixtureReader(healthy()), now=NOW)
    with pytest.raises(InvalidSpec, match="there are: llm"):
        status.select(facts, "lmm")


def test_no_pool_at_all_points_to_plan() -> None:
    facts = observe_status(FixtureReader({API: healthy()[API]}), now=NOW)
    status.require_pools(facts)
    console = Console(width=160)
    with console.capture() as capture:
        status.render(console, facts, [])
    assert "kubectl kvoffload plan" in capture.get()


def test_pools_that_may_not_be_read_are_not_taken_for_none() -> None:
    reader = FixtureReader(healthy(), denied=(POOLS, "/apis/apps/v1/deployments"))
    with pytest.raises(ClusterUnavailable, match=r"\(403\).*ask an administrator for the ClusterRole RELEASE-viewer"):
        status.require_pools(observe_status(reader, now=NOW))


def test_the_role_to_ask_for_is_named_after_the_release_that_is_there() -> None:
    objects = healthy()
    objects["/apis/apps/v1/deployments"] = [deployment("operator", release="kv")]
    with pytest.raises(ClusterUnavailable, match="ClusterRole kv-viewer,"):
        status.require_pools(observe_status(FixtureReader(objects, denied=(POOLS,)), now=NOW))


def test_a_list_that_fails_is_not_taken_for_an_empty_one() -> None:
    with pytest.raises(ClusterUnavailable, match=r"failed \(500\)"):
        status.require_pools(observe_status(FixtureReader(healthy(), failing=(POOLS,)), now=NOW))


@pytest.mark.parametrize(
    ("objects", "rights", "expected"),
    [
        (healthy(), {}, 0),
        (healthy(), {"denied": (REGIONS,)}, 1),
        (healthy(), {"failing": (REGIONS,)}, 1),
        (healthy(), {"denied": ("/apis/apps/v1/deployments",)}, 0),
        (ailing(), {}, 1),
    ],
)
def test_status_is_1_where_only_a_part_could_be_read(
    objects: dict[str, object], rights: dict[str, tuple[str, ...]], expected: int
) -> None:
    """The fixture's ailing cluster has a pool that this version does not know."""
    facts = observe_status(FixtureReader(objects, **rights), now=NOW)
    status.require_pools(facts)
    assert status.exit_status(facts) == expected


def test_absent_crds_are_said() -> None:
    with pytest.raises(ClusterUnavailable, match="CRDs are not installed"):
        status.require_pools(observe_status(FixtureReader({}), now=NOW))


def test_figures_that_nobody_keeps_up_to_date_say_of_when_they_are() -> None:
    facts = observe_status(FixtureReader(healthy() | {"/apis/apps/v1/deployments": []}), now=NOW)
    console = Console(width=160, highlight=False)
    with console.capture() as capture:
        status.render(console, facts, status.select(facts, ""))
    first, _, _, row, *_ = capture.get().splitlines()
    assert first == "no operator runs: nobody keeps this up to date, it is as of 2026-11-29 17:45:00 UTC"
    assert row.split()[:4] == ["llm", "Unknown", "(no", "operator)"]


def test_who_may_not_see_deployments_is_not_told_that_no_operator_runs() -> None:
    facts = observe_status(FixtureReader(healthy(), denied=("/apis/apps/v1/deployments",)), now=NOW)
    assert facts.operator_runs is None
    assert facts.unreadable == ()
