"""Fixtures on the real local cluster: it is brought up, or a running one is used, and left running afterwards."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from e2e.control_plane import control_plane as control_plane
from e2e.daemon_pod import ContainerView, Roll, roll_under_load, view_containers
from e2e.troubles import alone as alone
from e2e.troubles import troubled as troubled
from e2e.user_tools import ToolOutputs, use_tools
from e2e.zeroing import zero_region_pages
from hack.cache import REPOSITORY
from hack.cluster.settings import ClusterSettings
from hack.demo import run as demo
from hack.demo.installation import install_chart
from hack.demo.kubernetes import Kubernetes
from hack.demo.prometheus import Prometheus
from hack.demo.run import SharedRun, Stage
from hack.demo.servers import demo_prompts, find_server
from hack.demo.summary import Summary


@pytest.fixture(scope="session")
def stage() -> Stage:
    """The running cluster with our images loaded and vLLM prepared."""
    return demo.prepare(ClusterSettings.from_environment())


@pytest.fixture(scope="session")
def kubernetes(stage: Stage) -> Kubernetes:
    """kubectl and helm on the cluster."""
    return stage.kubernetes


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What uses the local cluster comes first, since it is the longest chain; of that, what needs a cluster without the
    release before it, and what looks back on the whole run at its end."""

    def place(item: pytest.Item) -> tuple[bool, int]:
        within = bool(item.get_closest_marker("runs_last")) - bool(item.get_closest_marker("runs_first"))
        return item.get_closest_marker("cluster") is None, within

    items.sort(key=place)


class OneForTheCluster(LoadScopeScheduling):  # type: ignore[misc] # xdist has no types
    """Where several processes run the tests, one has every module that uses the local cluster; the others have a module
    at a time. They are given out in the order of `pytest_collection_modifyitems`."""

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.partition("::")[0]
        return "cluster" if "pytest.mark.cluster" in (REPOSITORY / module).read_text() else module


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OneForTheCluster:
    """Called by xdist, whatever `--dist` says."""
    return OneForTheCluster(config, log)


@pytest.fixture(scope="session")
def release_asked_at(stage: Stage) -> float:
    """When this run began to use the chart, seconds since the epoch."""
    return time.time()


@pytest.fixture(scope="session")
def release(stage: Stage, release_asked_at: float) -> Iterator[Stage]:
    """The chart installed; what the tests made is removed at the end."""
    demo.remove_leftovers(stage)
    install_chart(stage.kubernetes, stage.images)
    yield stage
    demo.clean(stage)


@dataclass
class DemoResult:
    """What the demo's steps showed, what its daemon's pod is and outlives, and what server B answered once the region's
    pages were zeroed."""

    summary: Summary
    shared: SharedRun
    containers: dict[str, ContainerView]
    roll: Roll
    zeroed_b: list[tuple[int, ...]]
    zeroed_cached_tokens: list[int]
    tools: ToolOutputs | Exception
    """What the plugin and the dashboard said while both servers ran, or what stopped them."""
    kubernetes: Kubernetes


@pytest.fixture(scope="session")
def demo_result(release: Stage) -> DemoResult:
    """The demo's steps, run once, with the control while both servers run."""
    zeroed_b: list[tuple[int, ...]] = []
    cached: list[int] = []
    tools: list[ToolOutputs | Exception] = []
    containers: dict[str, ContainerView] = {}
    roll: list[Roll] = []

    def zero_and_ask(stage: Stage, prometheus: Prometheus) -> None:
        pods = [find_server(stage.kubernetes, name=name).pod["metadata"] for name in ("vllm-a", "vllm-b")]
        try:
            tools.append(use_tools(stage.kubernetes, prometheus, [f"{pod['namespace']}/{pod['name']}" for pod in pods]))
        except Exception as error:  # noqa: BLE001 - the tests of the tools raise it; the demo's go on
            tools.append(error)
        containers.update(view_containers(stage.kubernetes))
        roll.append(roll_under_load(stage))
        zero_region_pages(demo.POOL)
        for answer in demo.ask(find_server(stage.kubernetes, name="vllm-b"), demo_prompts()):
            zeroed_b.append(answer.text_tokens)
            cached.append(answer.cached_tokens)

    summary, shared = demo.run(release.kubernetes.settings, while_shared=zero_and_ask)
    return DemoResult(
        summary=summary,
        shared=shared,
        containers=containers,
        roll=roll[0],
        zeroed_b=zeroed_b,
        zeroed_cached_tokens=cached,
        tools=tools[0],
        kubernetes=release.kubernetes,
    )


@pytest.fixture
def tools(demo_result: DemoResult) -> ToolOutputs:
    """What the plugin and the dashboard said while both servers ran."""
    if isinstance(demo_result.tools, Exception):
        raise demo_result.tools
    return demo_result.tools
