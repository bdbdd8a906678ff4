"""The region's status as the daemon builds it, and namespace selectors as the attacher reads them."""

from datetime import UTC, datetime, timedelta

from kvoffload.api.conditions import Condition
from kvoffload_node.findings import Finding
from kvoffload_node.region.figures import Figures
from kvoffload_node.session.engines import SCHEDULER, Engine, Pod, Session
from kvoffload_node.status import build_status

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
FIGURES = Figures(
    capacity_bytes=100,
    allocated_bytes=60,
    used_by_tenant={"a": 20, "b": 10},
    free_bytes=70,
    saved_bytes=90,
    waste_bytes=0,
    slots={},
    evicted_bytes={},
)


def test_used_bytes_are_those_of_all_tenants() -> None:
    status = build_status(previous=[], generation=3, figures=FIGURES, findings=[], engines=[], epoch=2, now=NOW)
    assert (status.capacity_bytes, status.used_bytes, status.free_bytes, status.saved_bytes) == (100, 30, 70, 90)
    assert (status.epoch, status.observed_generation) == (2, 3)


def build_ready(previous: list[Condition], *, holds: bool, now: datetime) -> Condition:
    finding = Finding("Ready", holds, "Serving" if holds else "Draining", "words")
    status = build_status(
        previous=previous, generation=1, figures=None, findings=[finding], engines=[], epoch=1, now=now
    )
    return status.conditions[0]


def test_a_transition_time_moves_with_the_status_only() -> None:
    first = build_ready([], holds=True, now=NOW)
    again = build_ready([first], holds=True, now=NOW + timedelta(minutes=1))
    changed = build_ready([again], holds=False, now=NOW + timedelta(minutes=2))
    assert again.last_transition_time == NOW
    assert changed.last_transition_time == NOW + timedelta(minutes=2)


def test_conditions_of_others_are_not_written() -> None:
    other = Condition(type="NodeReady", status="True", reason="DaemonRunning", message="", last_transition_time=NOW)
    finding = Finding("Ready", True, "Serving", "")
    status = build_status(
        previous=[other], generation=1, figures=None, findings=[finding], engines=[], epoch=1, now=NOW
    )
    assert [condition.type for condition in status.conditions] == ["Ready"]


def build_engine(engine_id: str, *, rank: int, note: str = "") -> Engine:
    """One whose only session is that of this rank."""
    pod = Pod("uid", "ns", "pod", "auto", tenant=None, account=None, turns=None)  # type: ignore[arg-type]
    engine = Engine(number=1, storer=1, world_size=1, pod=pod, engine_id=engine_id, identity=b"", note=note)
    engine.sessions[rank] = Session(1, engine, rank, b"", connection=object())  # type: ignore[arg-type]
    return engine


def test_an_engine_that_is_left_alone_is_listed_last_with_its_reason_and_not_counted() -> None:
    alone = build_engine("without-1", rank=SCHEDULER, note="MultiNode: two nodes")
    alone.sessions[SCHEDULER].reason, alone.sessions[SCHEDULER].message = "MultiNode", "two nodes"
    engines = [alone, build_engine("real", rank=0)]
    status = build_status(previous=[], generation=1, figures=FIGURES, findings=[], engines=engines, epoch=1, now=NOW)
    assert status.engines_attached == 1
    assert [engine.engine_id for engine in status.engines] == ["real", "without-1"]
    told = status.engines[1]
    assert (told.confirmed_layout, told.reason, told.message) == ("left-alone", "MultiNode", "MultiNode: two nodes")
    assert status.engines[0].confirmed_layout == ""
