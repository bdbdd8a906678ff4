"""Order of a device's calls, by a device that writes them down; and registration of the region (case 14)."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from daemon_process import wait_until
from kvoffload_engine.transfer.cuda import DeviceTransfer
from kvoffload_engine.transfer.pinning import Pinning
from kvoffload_engine.transfer.plan import CopyPlan

EXTENT = 1 << 20
BASE = 1 << 40


def plan(num_pages: int = 2, offset: int = 0) -> CopyPlan:
    host = BASE + offset + np.arange(num_pages, dtype=np.int64) * 64
    return CopyPlan(host + (1 << 41), host, np.full(num_pages, 64), host)


class Recorder:
    """A device: every call is written down; events are done when the test says so."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.num_streams = self.num_events = 0
        self.done: set[str] = set()
        self.registered: dict[int, int] = {}
        self.refuse: Callable[[int], str] = lambda number: ""
        self.attempts = 0

    def current_stream(self) -> str:
        return "compute"

    def new_stream(self) -> SimpleNamespace:
        self.num_streams += 1
        name = f"stream{self.num_streams}"
        return SimpleNamespace(
            name=name,
            wait_stream=lambda other: self.calls.append((name, "waits for stream", other)),
            wait_event=lambda event: self.calls.append((name, "waits for event", event.name)),
        )

    def new_event(self) -> SimpleNamespace:
        self.num_events += 1
        name = f"event{self.num_events}"
        return SimpleNamespace(
            name=name,
            record=lambda stream: self.calls.append((stream.name, "records", name)),
            query=lambda: name in self.done,
            synchronize=lambda: (self.calls.append(("host", "synchronizes", name)), self.done.add(name)),
            elapsed_time=lambda other: 2.0,
        )

    def new_descriptors(self, num_copies: int) -> int:
        return num_copies

    def copy(self, stream: Any, descriptors: int, plan: CopyPlan, *, to_region: bool) -> None:
        self.calls.append((stream.name, "copies to region" if to_region else "copies from region", descriptors))

    def register(self, address: int, num_bytes: int) -> str:
        self.attempts += 1
        refusal = self.refuse(self.attempts)
        if not refusal:
            self.registered[address] = num_bytes
        return refusal

    def unregister(self, address: int) -> None:
        del self.registered[address]


@pytest.mark.parametrize("to_region", [True, False], ids=["store", "load"])
def test_a_transfer_waits_for_the_compute_stream_and_for_the_one_before_it(to_region: bool) -> None:
    device = Recorder()
    transfer = DeviceTransfer(device)
    transfer.start(1, plan(), to_region=to_region)
    transfer.start(2, plan(), to_region=to_region)
    copies = "copies to region" if to_region else "copies from region"
    assert device.calls == [
        ("stream1", "waits for stream", "compute"),
        ("stream1", "records", "event1"),
        ("stream1", copies, 2),
        ("stream1", "records", "event2"),
        ("stream2", "waits for stream", "compute"),
        ("stream2", "waits for event", "event2"),
        ("stream2", "records", "event3"),
        ("stream2", copies, 2),
        ("stream2", "records", "event4"),
    ]


def test_loads_do_not_queue_behind_stores() -> None:
    device = Recorder()
    transfer = DeviceTransfer(device)
    transfer.start(1, plan(), to_region=True)
    transfer.start(2, plan(), to_region=False)
    assert not [call for call in device.calls if call[1] == "waits for event"]


def test_a_job_is_finished_when_its_end_event_is_and_in_order_of_submission() -> None:
    device = Recorder()
    transfer = DeviceTransfer(device)
    transfer.start(1, plan(), to_region=True)
    transfer.start(2, plan(), to_region=True)
    assert transfer.finished() == []
    device.done.add("event4")
    assert transfer.finished() == []
    device.done.add("event2")
    assert transfer.finished() == [(1, 0.002), (2, 0.002)]
    assert transfer.finished() == []


def test_waiting_synchronizes_only_what_is_waited_for() -> None:
    device = Recorder()
    transfer = DeviceTransfer(device)
    transfer.start(1, plan(), to_region=True)
    transfer.start(2, plan(), to_region=True)
    transfer.wait({2})
    assert [call for call in device.calls if call[0] == "host"] == [("host", "synchronizes", "event4")]


def test_a_rank_with_no_page_of_a_job_finishes_it_without_a_copy() -> None:
    device = Recorder()
    transfer = DeviceTransfer(device)
    transfer.start(1, plan(0), to_region=True)
    assert not [call for call in device.calls if "copies" in call[1]]
    device.done.add("event2")
    assert transfer.finished() == [(1, 0.002)]


def mapped(device: Recorder) -> DeviceTransfer:
    transfer = DeviceTransfer(device)
    transfer.region_mapped(SimpleNamespace(address=BASE, num_bytes=64 * EXTENT), EXTENT)  # type: ignore[arg-type]
    return transfer


def test_extents_are_registered_as_they_come_into_use_each_in_one_call() -> None:
    device = Recorder()
    transfer = mapped(device)
    transfer.start(1, plan(2, offset=3 * EXTENT - 64), to_region=True)
    transfer.start(2, plan(2, offset=3 * EXTENT - 64), to_region=False)
    wait_until(lambda: len(device.registered) == 2)
    assert device.registered == {BASE + 2 * EXTENT: EXTENT, BASE + 3 * EXTENT: EXTENT}
    transfer.shutdown()
    assert device.registered == {}


@pytest.mark.parametrize("refused_at", [1, 3], ids=["always", "the third piece"])
def test_a_refusal_undoes_what_was_registered_and_copies_go_on(refused_at: int) -> None:
    device = Recorder()
    device.refuse = lambda number: "not supported" if number >= refused_at else ""
    transfer = mapped(device)
    for job, extent in enumerate(range(5)):
        transfer.start(job, plan(1, offset=extent * EXTENT), to_region=True)
    wait_until(lambda: bool(transfer.registration_refused))
    assert device.registered == {}
    assert transfer.registration_refused == "not supported"
    transfer.start(9, plan(1, offset=9 * EXTENT), to_region=True)
    transfer.shutdown()
    assert device.attempts == refused_at


def test_when_another_rank_is_refused_this_one_undoes_its_registrations_after_its_copies() -> None:
    device = Recorder()
    transfer = mapped(device)
    transfer.start(1, plan(1), to_region=False)
    wait_until(lambda: len(device.registered) == 1)
    transfer.use_pageable()
    assert device.registered == {}
    assert ("host", "synchronizes", "event2") in device.calls
    transfer.start(2, plan(1, offset=EXTENT), to_region=False)
    transfer.shutdown()
    assert device.attempts == 1


def test_a_revoked_extent_is_unregistered_at_once_and_may_come_again() -> None:
    device = Recorder()
    transfer = mapped(device)
    transfer.start(1, plan(1, offset=4 * EXTENT), to_region=True)
    wait_until(lambda: len(device.registered) == 1)
    transfer.extents_revoked([4 * EXTENT, 5 * EXTENT])
    assert device.registered == {}
    transfer.start(2, plan(1, offset=4 * EXTENT), to_region=True)
    wait_until(lambda: len(device.registered) == 1)
    transfer.shutdown()


def test_an_extent_revoked_before_its_turn_is_not_registered() -> None:
    device = Recorder()
    begun, go_on = threading.Event(), threading.Event()

    def slow(number: int) -> str:
        begun.set()
        go_on.wait(10)
        return ""

    device.refuse = slow
    pinning = Pinning(base_address=BASE, extent_bytes=EXTENT, register=device.register, unregister=device.unregister)
    pinning.want({1, 2})
    begun.wait(10)
    revoker = threading.Thread(target=pinning.revoke, args=({2},))
    revoker.start()
    go_on.set()
    revoker.join()
    pinning.close()
    assert device.registered == {}
