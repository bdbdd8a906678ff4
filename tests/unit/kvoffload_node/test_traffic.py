"""What engines' words come to: reservations within their bounds, and what they report."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvoffload.api.pool import Sharing
from kvoffload.errors import RefusalReason
from kvoffload.protocol.messages import Report
from kvoffload_node.region.region import Region
from kvoffload_node.session.engines import Engine, Pod, Session
from kvoffload_node.session.traffic import MAX_WRITE_SHARE, MIN_WRITES, Traffic
from kvoffload_node.session.turns import Floor, Turns
from region_on_disk import give_extents, open_region

EXTENT_BYTES, NUM_EXTENTS = 1 << 20, 8


@pytest.fixture
def region(tmp_path: Path) -> Iterator[Region]:
    region = open_region(tmp_path, extent_bytes=EXTENT_BYTES, num_extents=NUM_EXTENTS, sharing=Sharing.POOL)
    give_extents(region.tenant_for("team", "uid"), NUM_EXTENTS)
    yield region
    region.abandon()


def engine_with(region: Region, slot_bytes: int) -> Engine:
    tenant = region.tenant_for("team", "uid")
    pod = Pod("uid", "team", "pod", "auto", tenant, region.account("team"), Turns(Floor()))
    slab = tenant.index.slab(slot_bytes)
    return Engine(number=1, storer=1, world_size=2, pod=pod, engine_id="e", identity=b"", slab=slab, ready=True)


@pytest.mark.parametrize(
    ("slot_bytes", "allowed"),
    [(4096, NUM_EXTENTS * EXTENT_BYTES // 4096 // MAX_WRITE_SHARE), (16384, MIN_WRITES)],
    ids=["a share of the capacity", "a few whatever their share"],
)
def test_one_engine_has_so_much_reserved_at_most_and_more_when_that_has_ended(
    region: Region, slot_bytes: int, allowed: int
) -> None:
    engine, traffic = engine_with(region, slot_bytes), Traffic(region)
    offsets, reason = traffic.reserve(engine, allowed - 1)
    assert (len(offsets), reason) == (allowed - 1, "")
    last, reason = traffic.reserve(engine, 2)
    assert (len(last), reason) == (1, RefusalReason.RATE)
    assert traffic.reserve(engine, 1) == ([], RefusalReason.RATE)
    engine.tenant.index.fail(engine, -1, offsets[:3])
    assert len(traffic.reserve(engine, 3)[0]) == 3
    assert traffic.short_reservations[RefusalReason.RATE] == 2


def test_an_engine_that_is_not_ready_and_a_pool_that_pauses_get_nothing(region: Region) -> None:
    engine, traffic = engine_with(region, 4096), Traffic(region)
    assert set(traffic.short_reservations.values()) == {0}, "each reason from the start"
    engine.ready = False
    assert traffic.reserve(engine, 1) == ([], RefusalReason.NOT_READY)
    engine.ready = True
    traffic.paused = "the daemon stops"
    assert traffic.reserve(engine, 1) == ([], RefusalReason.DRAINING)
    assert traffic.short_reservations.total() == 2
    assert engine.tenant.index.writes == {}


def test_what_processes_report_adds_up_by_rank_and_the_last_note_stays(region: Region) -> None:
    engine, traffic = engine_with(region, 4096), Traffic(region)
    sessions = [Session(rank, engine, rank, b"") for rank in (0, 1)]
    traffic.report(sessions[0], Report(stored_bytes=10, loaded_bytes=7, failed_loads=1, failed_stores=2, note="odd"))
    traffic.report(sessions[1], Report(stored_bytes=5, loaded_bytes=7, steps=9, missed_deadlines=4))
    traffic.report(sessions[1], Report(stored_bytes=5))
    counters = traffic.counters
    assert counters.copied_by_rank == {0: 10, 1: 10}
    assert (counters.loaded_bytes, engine.loaded_bytes) == (14, 14)
    assert (counters.failed_loads, counters.failed_stores) == (1, 2)
    assert (counters.steps, counters.missed_deadlines) == (9, 4)
    assert engine.note == "odd"
