"""The engine's modules without vLLM: empty classes in the place of its own, and a session that is only a list."""

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from kvoffload.protocol.framing import pack_frame
from kvoffload.protocol.messages import PROTOCOL_VERSION, FromDaemon, FromEngine, Message, Welcome
from kvoffload_engine.reassertion import Held

WELCOME = Welcome(protocol=PROTOCOL_VERSION, epoch=2, region_bytes=1 << 40, extent_bytes=1 << 26)
PLAIN = (
    *("GPULoadStoreSpec", "LoadStoreSpec", "OffloadingWorker", "TransferResult"),
    *("OffloadingManager", "OffloadKey", "PrepareStoreOutput", "ReqContext", "RequestOffloadingContext"),
    "ScheduleEndContext",
)
OURS = ("link", "slots", "worker", "worker_link", "manager")


class Recorder:
    """A session whose daemon decodes everything at once, and answers what the test puts into `answers`."""

    welcome = WELCOME
    is_open = True

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.answers: list[FromDaemon] = []

    def send(self, *messages: Message) -> None:
        decode = msgspec.msgpack.Decoder(FromEngine).decode
        for message in messages:
            payload = msgspec.msgpack.encode(message)
            pack_frame(payload)
            self.sent.append(decode(payload))

    def receive(self, _: float) -> list[FromDaemon]:
        answers, self.answers = self.answers, []
        return answers

    def take_descriptors(self) -> list[int]:
        return [os.open("/dev/null", os.O_RDONLY) for _ in range(self.num_descriptors)]

    num_descriptors = 1


@contextmanager
def engine_without_vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Our modules by their names."""
    names = ("vllm", "vllm.v1", "vllm.v1.kv_offload", "vllm.v1.kv_offload.base")
    modules = {name: ModuleType(name) for name in names}
    base: Any = modules["vllm.v1.kv_offload.base"]
    for name in PLAIN:
        setattr(base, name, type(name, (SimpleNamespace,), {}))
    base.LookupResult = Enum("LookupResult", ["HIT", "MISS", "RETRY"])
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    yield SimpleNamespace(**{name: importlib.import_module(f"kvoffload_engine.{name}") for name in OURS})
    for name in OURS:
        del sys.modules[f"kvoffload_engine.{name}"]


def packed(count: int) -> bytes:
    """So many offsets as they stand in messages."""
    return np.arange(count, dtype="<i8").tobytes()


def make_link(engine: SimpleNamespace, num_reads: int = 0, num_writes: int = 0) -> tuple[Any, Recorder]:
    """A link whose engine became ready, and that holds so much since epoch 1."""
    last = Recorder()
    reads, writes = [Held(packed(num_reads), 1, last)], [Held(packed(1), 1)] * num_writes
    link = engine.link.DaemonLink(step_seconds=0.0, holdings=lambda: (reads, writes))
    session = make_ready(engine, link)
    link._reassertion._last_session = last
    return link, session


def make_ready(engine: SimpleNamespace, link: Any) -> Recorder:
    """The link has this session from now on, and the daemon has told it the row of one rank."""
    session = Recorder()
    link._connector = SimpleNamespace(current=lambda: session)
    link.poll()
    link.row, link._is_bound = engine.slots.SlotRow(4096, (0,), (1,), (0,)), True
    return session
