"""A stub of vLLM for tests of the plugin: whatever its version and its names are, nothing of the real one is loaded."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvoffload_engine import compat
from kvoffload_engine.environment import DECISION_VARIABLE, SOCKET_VARIABLE


@dataclass
class StubArgs:
    """EngineArgs of a stub vLLM."""

    kv_transfer_config: Any = None
    fails_with_connector: bool = False
    flips_multimodal: bool = False
    calls: list[Any] = field(default_factory=list)
    executor: str = "mp"
    prefix_caching: bool = True

    def create_engine_config(self, usage_context: Any = None) -> SimpleNamespace:
        self.calls.append(self.kv_transfer_config)
        if self.kv_transfer_config is not None and self.fails_with_connector:
            raise ValueError("this setting does not go with a connector")
        flipped = self.flips_multimodal and self.kv_transfer_config is not None
        return SimpleNamespace(
            usage_context=usage_context,
            model_config=SimpleNamespace(
                is_encoder_decoder=False,
                runner_type="generate",
                model="stub",
                enable_cumem_allocator=False,
                multimodal_config=SimpleNamespace(enable_mm_embeds=flipped, allow_missing_mm_embeddings=flipped),
            ),
            cache_config=SimpleNamespace(
                enable_prefix_caching=self.prefix_caching,
                kv_offloading_size=None,
                use_replayssm=False,
                prefix_match_unit=None,
            ),
            attention_config=SimpleNamespace(),
            parallel_config=SimpleNamespace(distributed_executor_backend=self.executor, nnodes_within_dp=1),
            device_config=SimpleNamespace(device_type="cpu"),
            kv_transfer_config=self.kv_transfer_config,
        )


def install(monkeypatch: pytest.MonkeyPatch, socket: Path) -> type[StubArgs]:
    """A vLLM of version 0.32.0 that has every name that we need, in a pod whose pool listens there."""
    args = type("EngineArgs", (StubArgs,), {})
    names = {"vllm", "vllm.engine", "vllm.config", *compat.REQUIRED}
    modules = {name: ModuleType(name) for name in names}
    modules["vllm"].__version__ = "0.32.0"
    modules["vllm.engine.arg_utils"].EngineArgs = args
    modules["vllm.config"].KVTransferConfig = lambda **fields: SimpleNamespace(**fields)
    for name, paths in compat.REQUIRED.items():
        for path in paths:
            add(modules[name], path)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv(SOCKET_VARIABLE, str(socket))
    # Set and deleted, so that what the plugin remembers there is undone after the test.
    monkeypatch.setenv(DECISION_VARIABLE, "")
    monkeypatch.delenv(DECISION_VARIABLE)
    return args


def add(module: ModuleType, path: str) -> None:
    """A name of a module, or of a class in it, where it is not there yet."""
    found: Any = module
    for name in path.split("."):
        if not hasattr(found, name):
            setattr(found, name, type(name, (), {}))
        found = getattr(found, name)
