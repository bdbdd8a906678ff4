"""The operator's first request: its own Deployment, which the API server may refuse for a while."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvoffload_operator import operator as operator_module
from kvoffload_operator.kube import ApiServerError
from kvoffload_operator.operator import Operator
from kvoffload_operator.settings import Settings


class Refusing:
    """An API server that refuses the first `num_refusals` requests."""

    def __init__(self, num_refusals: int) -> None:
        self.num_refusals = num_refusals

    async def get(self, *_: object) -> dict[str, Any]:
        self.num_refusals -= 1
        if self.num_refusals >= 0:
            raise ApiServerError(403, "Forbidden", "not yet")
        return {"metadata": {"uid": "uid-operator"}}


def operator(kube: Refusing) -> Operator:
    election: Any = SimpleNamespace(check=lambda: None)
    return Operator(Settings(), kube, election)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_module, "START_RETRY_SECONDS", 0.0)


async def test_a_refusal_that_passes_is_waited_for_and_said(caplog: pytest.LogCaptureFixture) -> None:
    options = await operator(Refusing(2))._daemonset_options()
    assert options.owner["uid"] == "uid-operator"
    assert caplog.text.count("not read, again in") == 2
    assert "not yet" in caplog.text


async def test_a_refusal_that_lasts_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_module, "START_SECONDS", 0.0)
    with pytest.raises(ApiServerError, match="not yet"):
        await operator(Refusing(1 << 30))._daemonset_options()
