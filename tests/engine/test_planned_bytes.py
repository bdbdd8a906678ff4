"""`kubectl kvoffload plan` and vLLM's own classes agree on the bytes of a page, for tiny and for published models."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hack.vllm.environment import ensure_vllm_environment
from hack.vllm.models import CONFIGURATIONS
from kvoffload.layout.model_bytes import plan_kv_bytes, read_shape
from kvoffload_cli.models import read_config

pytestmark = pytest.mark.engine

TINY = ["tiny-deepseek", "tiny-llama"]
PUBLISHED = [
    "deepseek-ai/DeepSeek-V3",
    "deepseek-ai/DeepSeek-V2-Lite",
    "meta-llama/Llama-3.1-8B-Instruct",
    "meta-llama/Llama-3.1-70B-Instruct",
    "Qwen/Qwen3-32B",
]


@pytest.fixture(scope="module")
def vllm_pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("models")
    paths = {}
    for name in [*TINY, *PUBLISHED]:
        config = CONFIGURATIONS / name / "config.json" if name in TINY else None
        text = config.read_text() if config else json.dumps(read_config(name)[0])
        paths[name] = folder / name.replace("/", "--")
        paths[name].mkdir()
        (paths[name] / "config.json").write_text(text)
    script = Path(__file__).with_name("page_sizes.py")
    command = [ensure_vllm_environment() / "bin" / "python", script, *paths.values()]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    (line,) = [one for one in done.stdout.splitlines() if one.startswith("PAGES ")] or [
        pytest.fail(done.stderr[-3000:])
    ]
    answers = json.loads(line.removeprefix("PAGES "))
    return {name: answers[str(path)] for name, path in paths.items()}


@pytest.mark.parametrize("name", [*TINY, *PUBLISHED])
def test_page_bytes_are_vllms(name: str, vllm_pages: dict[str, Any]) -> None:
    config = json.loads((CONFIGURATIONS / name / "config.json").read_text()) if name in TINY else read_config(name)[0]
    shape, expected = read_shape(config), vllm_pages[name]
    assert shape.is_mla == expected["use_mla"]
    assert shape.num_layers == expected["layers"]
    for num_ranks, page_bytes in expected["pages"].items():
        kv = plan_kv_bytes(shape, tensor_parallel=int(num_ranks), block_tokens=16)
        assert kv.bytes_per_token_layer * 16 == page_bytes
