"""helm and the chart's checkers, from the cache."""

import pytest

from hack.chart import ChartTools, find_chart_tools


@pytest.fixture(scope="session")
def tools() -> ChartTools:
    """helm, helm-unittest, kubeconform and Kubernetes' schemas."""
    found = find_chart_tools()
    if not found.are_there:
        pytest.skip("needs helm, helm-unittest and kubeconform: `python -m hack.chart` builds them")
    return found


@pytest.fixture(scope="session")
def helm(tools: ChartTools) -> str:
    """The path of helm."""
    return str(tools.helm)
