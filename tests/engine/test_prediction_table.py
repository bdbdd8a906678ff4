"""The webhook's table of architectures against vLLM's own `use_mla`, for every architecture that vLLM registers."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hack.vllm.environment import ensure_vllm_environment
from kvoffload_operator.webhook.model_table import (
    HEAD_ARCHITECTURES,
    MLA_ARCHITECTURES,
    Attention,
    attention_of,
)

pytestmark = pytest.mark.engine

DRAFTS = re.compile(r"MTP|Eagle|EAGLE|DSpark|Draft|Medusa")
"""Draft models are never the model that a server is started with."""
SHARED_MODULES = {"DeepseekForCausalLM", "PanguEmbeddedForCausalLM", "PanguProMoEV2ForCausalLM", "SarvamMoEForCausalLM"}
"""Stand in one module with a model that has MLA, and have none."""
NOT_IN_USE_MLA = {"SarvamMLAForCausalLM"}
"""Latent attention of its own, which `use_mla` does not count: left to the engine."""


@pytest.fixture(scope="module")
def registered() -> dict[str, dict[str, Any]]:
    probe = Path(__file__).with_name("architecture_probe.py")
    python = ensure_vllm_environment() / "bin" / "python"
    done = subprocess.run([python, probe], capture_output=True, text=True, timeout=600, check=True)
    answer: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_the_probe_sees_vllm_s_registry(registered: dict[str, Any]) -> None:
    assert len(registered) > 300
    assert sum(one["always"] is not None for one in registered.values()) > 150
    assert registered["DeepseekV3ForCausalLM"]["always"] is True
    assert registered["LlamaForCausalLM"] == {"always": False, "possible": False, "source": False}


def test_every_architecture_of_the_table_is_one_that_vllm_registers(registered: dict[str, Any]) -> None:
    assert {*MLA_ARCHITECTURES, *HEAD_ARCHITECTURES} <= set(registered)


def test_what_the_table_calls_mla_is_what_use_mla_calls_so(registered: dict[str, Any]) -> None:
    wrong = [
        name
        for name, attention in MLA_ARCHITECTURES.items()
        if attention is not Attention.DEPENDS and registered[name]["possible"] is False
    ]
    assert wrong == []


def test_what_the_table_says_divides_heads_never_uses_mla(registered: dict[str, Any]) -> None:
    assert [name for name in sorted(HEAD_ARCHITECTURES) if registered[name]["possible"]] == []


def test_no_architecture_with_mla_is_missing_from_the_table(registered: dict[str, Any]) -> None:
    missing = [
        name
        for name, found in registered.items()
        if (found["possible"] or found["source"]) and not DRAFTS.search(name) and attention_of(name) is None
    ]
    assert set(missing) <= SHARED_MODULES | NOT_IN_USE_MLA
