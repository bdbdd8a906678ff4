"""One look-up for a request and step, beside the keys that vLLM's own scheduler side then asks for: our connector in
its scheduler role, vLLM's requests, the real daemon. Run by `check_runner.py`."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from check_runner import check, run_checks
from toy_engine import END, ToyEngine, wait_until
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.kv_offload.base import ReqContext
from vllm.v1.request import Request

from kvoffload.protocol.messages import Lookup
from kvoffload_engine.connector import KVOffloadConnector
from kvoffload_engine.plugin import CONNECTOR, CONNECTOR_MODULE, SPEC, SPEC_MODULE

MODEL = Path(__file__).parents[2] / "hack" / "vllm" / "configurations" / "tiny-llama"
BLOCK_TOKENS, PROMPT_TOKENS, WINDOW_TOKENS = 16, 200, 32
NUM_CHUNKS = PROMPT_TOKENS // BLOCK_TOKENS
WINDOW_CHUNKS = WINDOW_TOKENS // BLOCK_TOKENS
SHAPE: dict[str, Any] = {"block_size": BLOCK_TOKENS, "num_kv_heads": 2, "head_size": 16, "dtype": torch.float32}


def build_connector(*, windows: bool) -> KVOffloadConnector:
    """As the engine core builds it for this model, with a group of sliding windows beside full attention on demand."""
    config = VllmConfig(
        model_config=ModelConfig(model=str(MODEL), tokenizer=str(MODEL), skip_tokenizer_init=True),
        cache_config=CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=True),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(
            kv_connector=CONNECTOR,
            kv_connector_module_path=CONNECTOR_MODULE,
            kv_role="kv_both",
            engine_id="lookups",
            kv_connector_extra_config={"spec_name": SPEC, "spec_module_path": SPEC_MODULE, "blocks_per_chunk": 1},
        ),
    )
    groups = [KVCacheGroupSpec(["full"], FullAttentionSpec(**SHAPE))]
    if windows:
        groups.append(KVCacheGroupSpec(["window"], SlidingWindowSpec(sliding_window=WINDOW_TOKENS, **SHAPE)))
    kv_cache_config = KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=groups)
    connector = KVOffloadConnector(config, KVConnectorRole.SCHEDULER, kv_cache_config)
    assert not connector._inert_because, connector._inert_because
    return connector


class Watched:
    """A toy engine's manager behind our real connector, and what goes through both."""

    def __init__(self, engine: ToyEngine, *, windows: bool) -> None:
        self.engine, self.manager = engine, engine.manager
        self.connector = build_connector(windows=windows)
        self.connector.connector_scheduler.manager = self.manager
        self.asked: list[bytes] = []
        """Keys of each Lookup message, packed as they are sent."""
        self.looked_up: list[bytes] = []
        """Keys that vLLM looked up, in its order."""
        send, lookup, link = self.manager.link._send, self.manager.lookup, self.manager.link

        def watched_send(session: Any, *messages: Any) -> bool:
            self.asked += [message.keys for message in messages if isinstance(message, Lookup)]
            return bool(send(session, *messages))

        def watched_lookup(key: Any, context: ReqContext) -> Any:
            self.looked_up.append(bytes(key))
            return lookup(key, context)

        link._send, self.manager.lookup = watched_send, watched_lookup

    def arrive(self, name: str, first_token: int, **sampling: Any) -> Request:
        """A new request of PROMPT_TOKENS tokens."""
        hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        tokens = list(range(first_token, first_token + PROMPT_TOKENS))
        request = Request(name, tokens, SamplingParams(max_tokens=100, **sampling), None, block_hasher=hasher)
        self.connector.on_new_request(request)
        return request

    def keys_of(self, request: Request) -> list[list[bytes]]:
        """All keys of the request, by group, as vLLM makes them."""
        state = self.connector.connector_scheduler._req_status[request.request_id]
        state.update_offload_keys()
        return [[bytes(key) for key in group.offload_keys] for group in state.group_states]

    def schedule(self, request: Request, num_computed_tokens: int) -> tuple[int | None, list[bytes], list[bytes]]:
        """One step that looks at this request: tokens to load, the keys of its one Lookup, the keys that vLLM looked
        up."""
        self.asked.clear()
        self.looked_up.clear()
        found, _ = self.connector.get_num_new_matched_tokens(request, num_computed_tokens)
        self.manager.on_schedule_end(END)
        self.manager.end_step()
        assert len(self.asked) <= 1, f"{len(self.asked)} Lookup messages in one step"
        packed, size = b"".join(self.asked), len(self.keys_of(request)[0][0])
        return found, [packed[at : at + size] for at in range(0, len(packed), size)], list(self.looked_up)

    def store(self, request: Request, keys: list[bytes]) -> None:
        """Put these keys into the region, by a request of the toy engine's own."""
        for begin in range(0, len(keys), 16):
            part = keys[begin : begin + 16]
            self.engine.store(f"{request.request_id}-{begin}-{time.monotonic_ns()}", part, list(range(len(part))))
        wait_until(lambda: self.engine.is_hit(keys))


@contextmanager
def watched(socket_path: str, identity: bytes, *, windows: bool = False) -> Iterator[Watched]:
    init_none_hash(sha256)
    with ToyEngine(socket_path, ranks=1, identity=identity * 32) as engine:
        yield Watched(engine, windows=windows)


@check
def a_new_request_is_one_look_up_of_exactly_the_keys_that_vllm_looks_up(socket_path: str) -> None:
    with watched(socket_path, b"1") as side:
        request = side.arrive("new", 1000)
        (keys,) = side.keys_of(request)
        assert len(keys) == NUM_CHUNKS
        side.store(request, keys)
        assert side.schedule(request, 0) == (NUM_CHUNKS * BLOCK_TOKENS, keys, keys)


@check
def after_the_first_miss_vllm_looks_no_further_and_what_it_was_told_of_is_given_back(socket_path: str) -> None:
    with watched(socket_path, b"2") as side:
        request = side.arrive("gap", 2000)
        (keys,) = side.keys_of(request)
        side.store(request, keys[:3] + keys[5:])
        assert side.schedule(request, 0) == (3 * BLOCK_TOKENS, keys, keys[:4])
        assert side.manager._requests["gap"].answer is None


@check
def keys_of_tokens_that_the_engine_has_are_asked_for_the_stores_and_not_looked_up(socket_path: str) -> None:
    """vLLM offers every block of its own prefix cache for storing: the look-up says which of them the region has."""
    with watched(socket_path, b"3") as side:
        request = side.arrive("cached", 3000)
        (keys,) = side.keys_of(request)
        side.store(request, keys[:2] + keys[4:])
        assert side.schedule(request, 4 * BLOCK_TOKENS) == ((NUM_CHUNKS - 4) * BLOCK_TOKENS, keys, keys[4:])
        offered = side.manager.prepare_store(keys[:4], ReqContext(req_id="cached"))
        assert offered.keys_to_store == keys[2:4]


@check
def a_preempted_request_is_one_look_up_with_the_keys_of_its_own_tokens(socket_path: str) -> None:
    with watched(socket_path, b"4") as side:
        request = side.arrive("preempted", 4000)
        (prompt_keys,) = side.keys_of(request)
        assert side.schedule(request, 0) == (0, prompt_keys, prompt_keys[:1])
        request.append_output_token_ids(list(range(40)))
        (keys,) = side.keys_of(request)
        assert keys[:NUM_CHUNKS] == prompt_keys
        assert len(keys) == (PROMPT_TOKENS + 40) // BLOCK_TOKENS
        side.store(request, keys)
        assert side.schedule(request, 0) == (len(keys) * BLOCK_TOKENS, keys, keys)


@check
def a_request_with_a_group_of_sliding_windows_is_one_look_up_of_both_groups(socket_path: str) -> None:
    """Of the windows' group vLLM looks only at the end of what the other group has."""
    with watched(socket_path, b"5", windows=True) as side:
        request = side.arrive("windows", 5000)
        full, window = side.keys_of(request)
        side.store(request, full + window)
        found, asked, looked_up = side.schedule(request, 0)
        assert found
        assert asked == full + window
        assert set(looked_up) <= set(asked)
        assert looked_up[: len(full)] == full
        assert set(looked_up[len(full) :]) <= set(window[-WINDOW_CHUNKS - 1 :])


@check
def a_request_that_must_not_read_the_cache_and_one_with_a_transfer_under_way_ask_nothing(socket_path: str) -> None:
    with watched(socket_path, b"6") as side:
        request = side.arrive("apart", 6000, skip_reading_prefix_cache=True)
        assert request.skip_reading_prefix_cache
        side.keys_of(request)
        assert side.schedule(request, 0) == (0, [], [])
        busy = side.arrive("busy", 6000)
        side.connector.connector_scheduler._req_status["busy"].transfer_jobs.add(1)
        assert side.schedule(busy, 0) == (None, [], [])


@check
def a_request_looked_at_again_before_its_answer_is_not_asked_for_again(socket_path: str) -> None:
    with watched(socket_path, b"7") as side:
        request = side.arrive("late", 7000)
        (keys,) = side.keys_of(request)
        side.store(request, keys)
        wait_for, side.manager.link.wait_for = side.manager.link.wait_for, lambda answer: None
        poll, side.manager.link.poll = side.manager.link.poll, lambda *_: side.manager.link.session
        assert side.schedule(request, 0) == (None, keys, keys)
        side.manager.link.wait_for, side.manager.link.poll = wait_for, poll
        assert side.schedule(request, 0) == (NUM_CHUNKS * BLOCK_TOKENS, [], keys)


if __name__ == "__main__":
    run_checks(with_control=False)
