"""On whom a smaller capacity waits: engines that lease, write, or have not let go, named and counted."""

from types import SimpleNamespace

from kvoffload_node.session.engines import SCHEDULER, Engine, Pod, Session
from kvoffload_node.session.holders import describe_holders

EXTENT_BYTES = 100


def build_engine(name: str, *, leases: tuple[int, ...] = (), unmapping: tuple[int, ...] = ()) -> Engine:
    tenant = SimpleNamespace(index=SimpleNamespace(extent_bytes=EXTENT_BYTES, writes={}))
    pod = Pod(f"uid-{name}", "ns", name, "auto", tenant=tenant, account=None, turns=None)  # type: ignore[arg-type]
    engine = Engine(number=1, storer=1, world_size=1, pod=pod, engine_id="e", identity=b"")
    engine.sessions = {rank: Session(1, engine, rank, b"") for rank in (SCHEDULER, 0)}
    engine.sessions[SCHEDULER].holder = dict.fromkeys(leases, 1)
    engine.sessions[0].unmapping = dict.fromkeys(unmapping, object())
    return engine


def test_engines_that_hold_nothing_are_not_waited_for() -> None:
    assert describe_holders([build_engine("idle")]) == ""


def test_leases_writes_and_extents_that_are_still_mapped_count_by_extent() -> None:
    reader = build_engine("reader", leases=(0, 10, 110))
    mapper = build_engine("mapper", unmapping=(200, 300, 400))
    writer, other = build_engine("writer"), build_engine("other")
    writer.num_writes = 1
    writer.tenant.index.writes.update(
        {
            510: SimpleNamespace(owner=writer),
            610: SimpleNamespace(owner=other),
            710: SimpleNamespace(owner=other),
        }
    )
    assert describe_holders([reader, writer, mapper]) == (
        "3 engines: pod ns/mapper engine e (3 extents), pod ns/reader engine e (2 extents), "
        "pod ns/writer engine e (1 extent)"
    )


def test_an_engine_that_has_not_spoken_since_the_restart_is_waited_for() -> None:
    silent = build_engine("silent")
    silent.sessions[0].recovered = True
    assert describe_holders([silent]) == "1 engine: pod ns/silent engine e (has not said since the daemon's restart)"


def test_five_are_named_and_the_rest_is_counted() -> None:
    engines = [build_engine(f"p{number}", leases=tuple(range(0, 100 * number, 100))) for number in range(1, 9)]
    words = describe_holders(engines)
    assert words.startswith("8 engines: pod ns/p8 engine e (8 extents), pod ns/p7 ")
    assert words.endswith("pod ns/p4 engine e (4 extents), and 3 more")
