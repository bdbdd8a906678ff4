"""The plugin on a stub of vLLM: whatever that vLLM is or does, it gets a configuration, and `register` never raises."""

import json
import logging
import os
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvoffload_engine import compat, plugin
from kvoffload_engine.environment import DECISION_VARIABLE


@dataclass
class StubArgs:
    """EngineArgs of a stub vLLM."""

    kv_transfer_config: Any = None
    fails_with_connector: bool = False
    flips_multimodal: bool = False
    calls: list[Any] = field(default_factory=list)
    executor: str = "mp"

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
                enable_prefix_caching=True, kv_offloading_size=None, use_replayssm=False, prefix_match_unit=None
            ),
            attention_config=SimpleNamespace(),
            parallel_config=SimpleNamespace(distributed_executor_backend=self.executor, nnodes_within_dp=1),
            device_config=SimpleNamespace(device_type="cpu"),
            kv_transfer_config=self.kv_transfer_config,
        )


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> type[StubArgs]:
    """A vLLM of version 0.32.0 that has every name."""
    args = type("EngineArgs", (StubArgs,), {})
    modules = {name: ModuleType(name) for name in ("vllm", "vllm.engine", "vllm.engine.arg_utils", "vllm.config")}
    modules["vllm"].__version__ = "0.32.0"
    modules["vllm.engine.arg_utils"].EngineArgs = args
    modules["vllm.config"].KVTransferConfig = lambda **fields: SimpleNamespace(**fields)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(compat, "require_names", lambda: None)
    monkeypatch.setenv("KVOFFLOAD_SOCKET", str(tmp_path / "nobody.sock"))
    # Set and deleted, so that what the plugin remembers there is undone after the test.
    monkeypatch.setenv(DECISION_VARIABLE, "")
    monkeypatch.delenv(DECISION_VARIABLE)
    return args


def test_a_plain_engine_gets_the_connector(stub: type[StubArgs]) -> None:
    plugin.register()
    config = stub().create_engine_config("usage")
    transfer = config.kv_transfer_config
    assert transfer.kv_connector == "KVOffloadConnector"
    assert transfer.kv_connector_module_path == "kvoffload_engine.connector"
    assert transfer.kv_load_failure_policy == "recompute"
    assert transfer.kv_connector_extra_config["spec_module_path"] == "kvoffload_engine.spec"
    assert config.usage_context == "usage"


def test_without_a_socket_nothing_is_wrapped(stub: type[StubArgs], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVOFFLOAD_SOCKET")
    plugin.register()
    assert stub.create_engine_config is StubArgs.create_engine_config


def test_registering_twice_wraps_once(stub: type[StubArgs]) -> None:
    plugin.register()
    once = stub.create_engine_config
    plugin.register()
    assert stub.create_engine_config is once


def test_processes_that_come_later_take_the_same_decision_and_engine_id(stub: type[StubArgs]) -> None:
    plugin.register()
    first = stub().create_engine_config()
    second = stub().create_engine_config()
    assert first.kv_transfer_config.engine_id == second.kv_transfer_config.engine_id


def test_a_remembered_refusal_holds_for_later_processes(stub: type[StubArgs], monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = {"attach": False, "reason": "X", "message": "", "engine_id": "", "model": "stub"}
    monkeypatch.setenv(DECISION_VARIABLE, json.dumps(refusal))
    plugin.register()
    assert stub().create_engine_config().kv_transfer_config is None


def test_another_model_of_the_same_process_gets_a_decision_of_its_own(
    stub: type[StubArgs], monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = {"attach": False, "reason": "X", "message": "", "engine_id": "", "model": "an encoder"}
    monkeypatch.setenv(DECISION_VARIABLE, json.dumps(refusal))
    plugin.register()
    assert stub().create_engine_config().kv_transfer_config is not None


def one_line(records: list[logging.LogRecord]) -> str:
    lines = [record.getMessage() for record in records if "runs without offload" in record.getMessage()]
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize("version", ["0.27.9", "0.34.0", "1.0.0", "dev"])
def test_an_unknown_version_runs_without_us_and_says_so_once(
    stub: type[StubArgs], version: str, caplog: pytest.LogCaptureFixture
) -> None:
    sys.modules["vllm"].__version__ = version
    plugin.register()
    with caplog.at_level(logging.WARNING, "vllm.kvoffload"):
        config = stub().create_engine_config()
    assert config.kv_transfer_config is None
    assert "UnsupportedVersion" in one_line(caplog.records)


def test_what_a_vllm_lacks_is_said_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.some_module", SimpleNamespace(Thing=SimpleNamespace(kept=1)))
    compat.require_names({"vllm.some_module": ("Thing.kept",)})
    with pytest.raises(compat.UnsupportedEngine, match=r"vllm\.some_module\.Thing\.gone"):
        compat.require_names({"vllm.some_module": ("Thing.gone",)})
    with pytest.raises(compat.UnsupportedEngine, match=r"no vllm\.no_such_module"):
        compat.require_names({"vllm.no_such_module": ()})


def test_a_missing_name_is_reported_as_a_decision(
    stub: type[StubArgs], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lacks() -> None:
        raise compat.UnsupportedEngine("this vLLM has no Thing.gone")

    monkeypatch.setattr(compat, "require_names", lacks)
    plugin.register()
    with caplog.at_level(logging.WARNING, "vllm.kvoffload"):
        assert stub().create_engine_config().kv_transfer_config is None
    assert "MissingName" in one_line(caplog.records)


def test_a_setting_that_vllm_refuses_with_a_connector_runs_without_us(
    stub: type[StubArgs], caplog: pytest.LogCaptureFixture
) -> None:
    plugin.register()
    args = stub(fails_with_connector=True)
    with caplog.at_level(logging.WARNING, "vllm.kvoffload"):
        config = args.create_engine_config()
    assert config.kv_transfer_config is None
    assert args.kv_transfer_config is None
    assert "ConfigurationFailed" in one_line(caplog.records)
    assert stub(fails_with_connector=True).create_engine_config().kv_transfer_config is None


def test_a_bug_of_ours_runs_without_us(
    stub: type[StubArgs], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvoffload_engine.plugin.observe_engine", lambda config: 1 / 0)
    plugin.register()
    with caplog.at_level(logging.WARNING, "vllm.kvoffload"):
        assert stub().create_engine_config().kv_transfer_config is None
    assert "ZeroDivisionError" in one_line(caplog.records)


@pytest.mark.parametrize(
    "text",
    ["[" * 50_000, "[1]", '{"attach": "no", "reason": 1, "message": 2, "engine_id": [], "model": "stub"}'],
    ids=["deep", "a list", "other types"],
)
def test_a_decision_that_nobody_took_is_taken_anew(
    stub: type[StubArgs], monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("KVOFFLOAD_DECISION", text)
    plugin.register()
    assert stub().create_engine_config().kv_transfer_config is not None
    assert json.loads(os.environ["KVOFFLOAD_DECISION"])["attach"] is True


@pytest.mark.parametrize(("text", "blocks"), [("", 1), ("4", 4), ("64", 64)])
def test_chunks_have_the_blocks_that_the_user_asks_for(
    stub: type[StubArgs], monkeypatch: pytest.MonkeyPatch, text: str, blocks: int
) -> None:
    monkeypatch.setenv("KVOFFLOAD_BLOCKS_PER_CHUNK", text)
    plugin.register()
    extra = stub().create_engine_config().kv_transfer_config.kv_connector_extra_config
    assert extra["blocks_per_chunk"] == blocks


@pytest.mark.parametrize("text", ["0", "65", "-1", "1.5", "many", "\u00b2", "9" * 5000], ids=lambda text: text[:8])
def test_chunks_of_no_such_number_of_blocks_are_of_one_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture, text: str
) -> None:
    assert plugin.blocks_per_chunk({"KVOFFLOAD_BLOCKS_PER_CHUNK": text}) == 1
    assert "needed a whole number from 1 to 64: 1 is used" in caplog.text


def test_a_vllm_without_engine_args_does_not_make_register_raise(
    stub: type[StubArgs], caplog: pytest.LogCaptureFixture
) -> None:
    del sys.modules["vllm.engine.arg_utils"].EngineArgs
    with caplog.at_level(logging.WARNING, "vllm.kvoffload"):
        plugin.register()
    assert "PluginError" in one_line(caplog.records)


def test_an_error_of_the_users_own_is_passed_on_as_it_is(stub: type[StubArgs]) -> None:
    plugin.register()
    theirs = SimpleNamespace(kv_connector="TheirConnector")
    with pytest.raises(ValueError, match="does not go with a connector"):
        stub(kv_transfer_config=theirs, fails_with_connector=True).create_engine_config()


def test_the_users_connector_is_left_alone(stub: type[StubArgs], caplog: pytest.LogCaptureFixture) -> None:
    plugin.register()
    theirs = SimpleNamespace(kv_connector="TheirConnector")
    with caplog.at_level(logging.WARNING, "vllm.kvoffload"):
        assert stub(kv_transfer_config=theirs).create_engine_config().kv_transfer_config is theirs
    assert "OtherConnector" in one_line(caplog.records)


def test_an_engine_with_another_executor_is_left_alone(stub: type[StubArgs], caplog: pytest.LogCaptureFixture) -> None:
    plugin.register()
    with caplog.at_level(logging.WARNING, "vllm.kvoffload"):
        assert stub(executor="ray").create_engine_config().kv_transfer_config is None
    assert "ExecutorUnsupported" in one_line(caplog.records)


def test_multimodal_inputs_that_a_connector_opens_are_closed_again(stub: type[StubArgs]) -> None:
    plugin.register()
    config = stub(flips_multimodal=True).create_engine_config()
    assert config.kv_transfer_config is not None
    multimodal = config.model_config.multimodal_config
    assert (multimodal.enable_mm_embeds, multimodal.allow_missing_mm_embeddings) == (False, False)
