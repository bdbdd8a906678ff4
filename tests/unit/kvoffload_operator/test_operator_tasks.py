"""Tasks of the operator that meet what nobody expected: they count it, say it, try again, and no other work ends."""

import asyncio
from collections.abc import Awaitable
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import pytest

from kvoffload_operator import metrics
from kvoffload_operator import operator as operator_module
from kvoffload_operator.kube import ApiServerError
from kvoffload_operator.leader import NotLeader
from kvoffload_operator.operator import Key, Operator
from kvoffload_operator.settings import Settings


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch) -> Operator:
    monkeypatch.setattr(operator_module, "RETRY_SECONDS", 0.0)
    election: Any = SimpleNamespace(check=lambda: None)
    started = Operator(Settings(), SimpleNamespace(num_writes=0), election)  # type: ignore[arg-type]
    started._synced.set()
    return started


def num_unexpected(task: str) -> float:
    return metrics.unexpected_errors_total.labels(task=task)._value.get()


async def run_until(task: Awaitable[None], condition: asyncio.Event) -> None:
    running = asyncio.ensure_future(task)
    reached = asyncio.create_task(condition.wait())
    await asyncio.wait({running, reached}, timeout=30, return_when=asyncio.FIRST_COMPLETED)
    ended = running.done()
    running.cancel()
    reached.cancel()
    assert not ended, "the task goes on"
    assert condition.is_set()


async def test_an_object_that_fails_is_tried_again_and_holds_up_no_other(
    operator: Operator, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[str] = []
    both = asyncio.Event()

    async def reconcile(name: str, _: datetime) -> None:
        seen.append(name)
        if len(seen) == 4:
            both.set()
        if name == "odd":
            raise ZeroDivisionError("division by zero")

    before = num_unexpected("pool")
    for name in ("odd", "good"):
        operator._pools.add(Key("pool", name))
    await run_until(operator._work(operator._pools, reconcile), both)
    assert seen == ["odd", "good", "odd", "odd"]
    assert num_unexpected("pool") >= before + 2
    assert "pool odd: unexpected ZeroDivisionError: division by zero; again in 0.5 s" in caplog.text
    assert "Traceback" in caplog.text


async def test_a_step_that_fails_is_taken_again(operator: Operator, caplog: pytest.LogCaptureFixture) -> None:
    num_taken, again = 0, asyncio.Event()

    async def step() -> float:
        nonlocal num_taken
        num_taken += 1
        if num_taken == 1:
            raise KeyError("webhooks")
        again.set()
        return 60.0

    before, failed = num_unexpected("sweep"), metrics.reconcile_errors_total.labels(kind="sweep")
    failed_before = failed._value.get()
    await run_until(operator._repeat("sweep", step), again)
    assert num_unexpected("sweep") == before + 1
    assert failed._value.get() == failed_before + 1
    assert "sweep: unexpected KeyError: 'webhooks'; again in 0.0 s" in caplog.text


async def test_who_lost_the_lease_tries_nothing_again(operator: Operator) -> None:
    async def step(*_: object) -> float:
        raise NotLeader("lost")

    operator._pools.add(Key("pool", "a"))
    for task in (operator._repeat("sweep", step), operator._work(operator._pools, step)):
        with pytest.raises(NotLeader):
            await asyncio.wait_for(task, 30)


async def test_an_api_server_that_does_not_answer_is_no_news_of_the_webhook(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, again = 0, asyncio.Event()

    async def look(*_: object) -> None:
        nonlocal asked
        asked += 1
        if asked == 2:
            again.set()
        raise ApiServerError(503, "ServiceUnavailable", "etcd")

    monkeypatch.setattr(operator_module, "look_after_webhook", look)
    pools = SimpleNamespace(injection=None)
    await run_until(operator._look_after_webhook(pools, {}), again)  # type: ignore[arg-type]
    assert pools.injection is None


async def test_a_webhook_that_cannot_be_looked_at_is_said_in_the_pools(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = asyncio.Event()

    async def look(*_: object) -> None:
        if pools.injection is not None:
            said.set()
        raise TypeError("no such thing")

    monkeypatch.setattr(operator_module, "look_after_webhook", look)
    pools = SimpleNamespace(injection=None)
    await run_until(operator._look_after_webhook(pools, {}), said)  # type: ignore[arg-type]
    assert pools.injection is not None
    assert pools.injection.reason == "WebhookUnknown"
    assert "TypeError: no such thing" in pools.injection.message
    assert metrics.injection_ready._value.get() == 0
