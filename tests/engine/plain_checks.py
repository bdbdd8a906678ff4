"""Our classes beside those of this vLLM, and manager and workers with the real daemon. Run by `check_runner.py`."""

import inspect
import time
from types import SimpleNamespace
from typing import Any

from check_runner import check, run_checks
from toy_engine import ToyEngine, keys_of, wait_until
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.base import LookupResult, ReqContext
from vllm.v1.request import Request

from kvoffload_engine import compat
from kvoffload_engine.connector import KVOffloadConnector
from kvoffload_engine.manager import KVOffloadManager
from kvoffload_engine.spec import KVOffloadSpec
from kvoffload_engine.worker import KVOffloadWorker
from kvoffload_engine.worker_reports import KVOffloadWorkerMetadata


@check
def every_method_takes_what_vllm_passes(socket_path: str) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

    pairs = [
        (KVOffloadManager, base.OffloadingManager),
        (KVOffloadWorker, base.OffloadingWorker),
        (KVOffloadSpec, base.OffloadingSpec),
        (KVOffloadConnector, OffloadingConnector),
    ]
    for ours, theirs in pairs:
        assert not getattr(ours, "__abstractmethods__", None), ours.__abstractmethods__
        for name, method in vars(ours).items():
            parent = getattr(theirs, name, None)
            if name.startswith("__") or not inspect.isfunction(method) or not callable(parent):
                continue
            own = inspect.signature(method).parameters
            takes_any = any(one.kind is one.VAR_POSITIONAL for one in own.values())
            for parameter in inspect.signature(parent).parameters.values():
                if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                    assert parameter.name in own or takes_any, f"{ours.__name__}.{name} does not take {parameter.name}"


@check
def every_name_that_we_need_is_there_and_the_version_is_supported(socket_path: str) -> None:
    compat.require_names()
    compat.require_supported_version(compat.installed_version())


@check
def a_store_of_two_ranks_is_loaded_by_both(socket_path: str) -> None:
    with ToyEngine(socket_path) as engine:
        keys = keys_of(*range(100, 108))
        for index in range(8):
            engine.fill(index, 10 * index)
        assert engine.store("s", keys, list(range(8))) == keys
        wait_until(lambda: engine.is_hit(keys))
        assert engine.load("l", keys, list(range(20, 28))) == {}
        assert all(engine.holds(20 + index, 10 * index) for index in range(8))
        assert engine.store("again", keys, list(range(8))) == []


@check
def parts_of_ranks_do_not_meet(socket_path: str) -> None:
    with ToyEngine(socket_path, part="rank", identity=b"p" * 32) as engine:
        keys = keys_of(200, 201)
        for rank, cache in enumerate(engine.caches):
            for tensor in cache:
                tensor[0], tensor[1] = 1 + rank, 11 + rank
        engine.store("s", keys, [0, 1])
        wait_until(lambda: engine.is_hit(keys))
        assert engine.load("l", keys, [30, 31]) == {}
        for rank, cache in enumerate(engine.caches):
            assert all(bool((tensor[30] == 1 + rank).all() and (tensor[31] == 11 + rank).all()) for tensor in cache)


@check
def a_chunk_that_one_rank_has_not_written_is_a_miss(socket_path: str) -> None:
    with ToyEngine(socket_path) as engine:
        keys, later = keys_of(300), keys_of(301)
        engine.store("s", keys, [0], ranks=[0])
        engine.store("t", later, [1])
        wait_until(lambda: engine.is_hit(later))  # so the daemon has also heard all that came before
        assert not engine.is_hit(keys)


@check
def private_keys_are_seen_by_nobody_else(socket_path: str) -> None:
    with ToyEngine(socket_path) as one, ToyEngine(socket_path) as other:
        shared, private = keys_of(400), keys_of(401)
        one.store("shared", shared, [0])
        one.look_up("private", private, is_private=True)
        one.step()
        one.store("private", private, [1])
        wait_until(lambda: other.is_hit(shared))
        assert not other.is_hit(private)
        assert not one.is_hit(private)
        results = one.look_up("private-again", private, is_private=True)
        assert results == [LookupResult.HIT]


@check
def engines_with_another_hash_seed_share_nothing(socket_path: str) -> None:
    with ToyEngine(socket_path) as one, ToyEngine(socket_path, none_hash=b"other") as other:
        ours, theirs = keys_of(420), keys_of(421)
        one.store("s", ours, [0])
        other.store("s", theirs, [0])
        wait_until(lambda: one.is_hit(ours) and other.is_hit(theirs))
        assert not other.is_hit(ours)
        assert not one.is_hit(theirs)


@check
def until_every_rank_is_attached_everything_is_a_miss_and_nothing_is_stored(socket_path: str) -> None:
    with ToyEngine(socket_path) as engine:
        keys = keys_of(450)
        engine.store("s", keys, [0])
        wait_until(lambda: engine.is_hit(keys))
        engine.workers[1].link._connector.close()
        wait_until(lambda: engine.manager.link.poll() is not None and engine.manager.link.row is None)
        assert not engine.is_hit(keys)
        assert engine.store("t", keys_of(451), [1]) == []


@check
def reports_of_two_workers_are_one(socket_path: str) -> None:
    one = KVOffloadWorkerMetadata(completed_jobs={1: 1, 2: 1}, failed_loads={"a": False, "b": True})
    other = KVOffloadWorkerMetadata(completed_jobs={2: 1}, failed_loads={"a": True}, pageable=True)
    merged = one.aggregate(other)
    assert merged.completed_jobs == {1: 1, 2: 2}
    assert merged.failed_loads == {"a": True, "b": True}
    assert merged.pageable


@check
def a_load_that_cannot_be_done_fails_and_its_keys_are_a_miss_from_then_on(socket_path: str) -> None:
    with ToyEngine(socket_path) as engine:
        keys = keys_of(500, 501)
        engine.store("s", keys, [0, 1])
        wait_until(lambda: engine.is_hit(keys))
        engine.workers[1].link.mapping.epochs.clear()
        assert engine.load("l", keys, [2, 3]) != {}
        assert not engine.is_hit(keys)
        assert engine.store("again", keys, [0, 1]) == []


@check
def a_slot_with_wrong_bytes_is_dropped_for_every_engine_and_the_session_goes_on(socket_path: str) -> None:
    with ToyEngine(socket_path) as engine, ToyEngine(socket_path) as other:
        wrong, right = keys_of(550), keys_of(551)
        engine.store("s", wrong + right, [0, 1])
        wait_until(lambda: other.is_hit(wrong + right))
        engine.prepare_load("l", wrong)
        engine.step()
        engine.manager.load_failed("l", bytes_are_wrong=True)
        engine.manager.receives_finished(["l"])
        wait_until(lambda: not other.is_hit(wrong))
        session = engine.manager.link.session
        assert engine.is_hit(right)
        assert engine.manager.link.session is session
        other.store("again", wrong, [0])
        wait_until(lambda: other.is_hit(wrong))


@check
def a_reset_forgets_what_this_engine_stored_and_keeps_what_others_stored(socket_path: str) -> None:
    with ToyEngine(socket_path) as one, ToyEngine(socket_path) as other:
        mine, theirs = keys_of(600), keys_of(601)
        one.store("s", mine, [0])
        other.store("s", theirs, [0])
        wait_until(lambda: one.is_hit(mine + theirs) and other.is_hit(mine + theirs))
        one.manager.reset_cache()
        assert not one.is_hit(mine)
        assert one.is_hit(theirs)
        assert other.is_hit(mine + theirs)


@check
def a_request_that_was_there_when_the_weights_changed_stores_nothing_any_more(socket_path: str) -> None:
    with ToyEngine(socket_path) as engine:
        before, after = keys_of(650), keys_of(651)
        engine.look_up("old", before)
        engine.step()
        engine.manager.weights_changed()
        assert engine.store("old", before, [0]) == []
        assert engine.store("new", after, [0]) == after
        wait_until(lambda: engine.is_hit(after))
        assert not engine.is_hit(before)


def is_hit_as_request(toy: ToyEngine, name: str, keys: list[bytes], **fields: Any) -> bool:
    """Whether a request of vLLM's, with these fields, finds the keys."""
    name = f"{name}-{time.monotonic_ns()}"
    connector_of(toy).on_new_request(request_of(name, **fields))
    results = toy.look_up(name, keys)
    toy.step()
    toy.manager.on_request_finished(ReqContext(req_id=name))
    return results == [LookupResult.HIT] * len(keys)


def check_kept_apart(socket_path: str, keys: list[bytes], **fields: Any) -> None:
    """What a request with these fields stores is found by such requests of the same engine, and by nobody else."""
    with ToyEngine(socket_path) as engine, ToyEngine(socket_path) as other:
        connector_of(engine).on_new_request(request_of("storing", **fields))
        assert engine.store("storing", keys, [0]) == keys
        wait_until(lambda: is_hit_as_request(engine, "same", keys, **fields))
        assert not is_hit_as_request(engine, "plain", keys)
        assert not is_hit_as_request(other, "same", keys, **fields)
        assert not is_hit_as_request(other, "plain", keys)


@check
def requests_with_an_image_are_kept_apart(socket_path: str) -> None:
    image = MultiModalFeatureSpec(None, "image", "chosen-by-the-caller", PlaceholderRange(offset=0, length=2))
    check_kept_apart(socket_path, keys_of(700), mm_features=[image])


@check
def requests_with_an_adapter_are_kept_apart(socket_path: str) -> None:
    check_kept_apart(socket_path, keys_of(701), lora_request=LoRARequest("adapter", 1, "/adapters/one"))


def request_of(name: str, **fields: Any) -> Request:
    return Request(name, [1, 2, 3, 4], SamplingParams(max_tokens=1), None, **fields)


def connector_of(toy: ToyEngine) -> KVOffloadConnector:
    """The scheduler's connector of a toy engine, as far as it needs no model."""
    connector = object.__new__(KVOffloadConnector)
    connector._inert_because = ""
    connector.connector_scheduler = SimpleNamespace(manager=toy.manager, on_new_request=lambda request: None)
    return connector


if __name__ == "__main__":
    run_checks(with_control=False)
