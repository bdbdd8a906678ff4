"""`kubectl kvoffload status`."""

import json
from collections.abc import Callable

import pytest
from rich.console import Console

from fixtures.cli.cluster import NOW, FixtureReader, ailing, healthy
from kvoffload.errors import InvalidSpec
from kvoffload_cli import status
from kvoffload_cli.observe import observe_pools


@pytest.mark.parametrize(("name", "objects"), [("healthy", healthy), ("ailing", ailing)])
def test_tables_are_the_golden_ones(
    name: str, objects: Callable[[], dict[str, object]], golden: Callable[[str, str], None]
) -> None:
    facts = observe_pools(FixtureReader(objects()), now=NOW)
    console = Console(width=160, highlight=False)
    with console.capture() as capture:
        status.render(console, facts, status.select(facts, ""))
    golden(f"status-{name}.txt", capture.get())


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
    facts = observe_pools(FixtureReader({}), now=NOW)
    console = Console(width=160)
    with console.capture() as capture:
        status.render(console, facts, [])
    assert "kubectl kvoffload plan" in capture.get()
