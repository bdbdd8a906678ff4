"""The queue: one pass a name at a time, none lost, failures later."""

import asyncio

from kvoffload_operator.workqueue import WorkQueue


async def test_a_name_waits_once_however_often_it_is_added() -> None:
    queue: WorkQueue[str] = WorkQueue()
    for name in ("a", "b", "a", "a"):
        queue.add(name)
    assert [await queue.get(), await queue.get()] == ["a", "b"]


async def test_a_name_added_during_its_pass_comes_again_after_it_and_not_beside_it() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add("a")
    assert await queue.get() == "a"
    queue.add("a")
    waiting = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    assert not waiting.done()
    queue.done("a")
    assert await waiting == "a"


async def test_failures_wait_longer_each_time_and_a_success_forgets_them() -> None:
    queue: WorkQueue[str] = WorkQueue(first_delay_seconds=1.0, max_delay_seconds=5.0)
    delays = []
    for _ in range(5):
        queue.add("a")
        await queue.get()
        delays.append(queue.failed("a"))
    assert delays == [1.0, 2.0, 4.0, 5.0, 5.0]
    queue.add("a")
    await queue.get()
    queue.done("a")
    queue.add("a")
    await queue.get()
    assert queue.failed("a") == 1.0


async def test_of_two_delays_the_earlier_holds_and_adding_now_overrules_both() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add_later("a", 3600.0)
    queue.add_later("a", 0.0)
    queue.add_later("a", 3600.0)
    assert await queue.get() == "a"
    queue.done("a")
    queue.add_later("b", 3600.0)
    queue.add("b")
    assert await queue.get() == "b"
