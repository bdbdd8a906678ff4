"""The device backend and a real engine on a real GPU: `make test-gpu`, under 10 minutes when vLLM is installed.

It needs a CUDA device, PyPI, and gcc (for Triton). The vLLM is the CUDA build of the version that all tests run,
installed from PyPI into the cache the first time (some 8 GB); `KVOFFLOAD_GPU_PYTHON` names the Python of another.
"""

import ctypes
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from gpu_engine import run_engine

from hack.vllm.environment import ensure_vllm_environment

pytestmark = pytest.mark.gpu
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CHECKS = re.findall(r"@check\ndef (\w+)\(", (HERE / "gpu_checks.py").read_text())
PROBE = (
    "import torch, vllm._custom_ops; assert torch.cuda.is_available(); assert torch.ops._C_cache_ops.swap_blocks_batch"
)


def no_device() -> str:
    """Why there is no CUDA device, by the driver itself; empty if there is one."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"no NVIDIA driver: {error}"
    count = ctypes.c_int()
    status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    return f"cuInit: {status}" if status else "" if count.value else "the driver has no device"


@pytest.fixture(scope="module")
def python() -> Path:
    """A Python with a CUDA build of vLLM that sees the device."""
    because = no_device()
    if because:
        pytest.skip(f"needs a CUDA device ({because}); vLLM's CUDA build is then installed from PyPI")
    named = os.environ.get("KVOFFLOAD_GPU_PYTHON")
    path = Path(named) if named else ensure_vllm_environment(gpu=True) / "bin" / "python"
    probe = subprocess.run([path, "-c", PROBE], capture_output=True, text=True)
    assert probe.returncode == 0, f"{path} has no CUDA build of vLLM that works here: {probe.stderr[-2000:]}"
    return path


@pytest.fixture(scope="module")
def results(python: Path) -> dict[str, dict[str, object]]:
    done = subprocess.run(
        [python, str(HERE / "gpu_checks.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT / "agent"), "VLLM_PLUGINS": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULTS ")]
    assert lines, done.stderr[-4000:]
    return dict(json.loads(lines[0].removeprefix("RESULTS ")))


@pytest.mark.parametrize("name", CHECKS)
def test_on_a_gpu(results: dict[str, dict[str, object]], name: str) -> None:
    assert "ok" in results[name], results[name].get("error")
    print(name, results[name]["ok"])


def check_figures(figures: dict[str, Any]) -> None:
    print("engine", figures)
    assert figures["wrong_pages"] == []
    assert figures["loaded_tokens"] >= 0.3 * figures["prompt_tokens"]
    assert figures["loaded_pages"] > 0
    assert figures["preemptions"] >= 3
    assert figures["evicted_bytes"] > 0
    assert figures["control_cached_tokens"] > 0
    assert figures["control_wrong_pages"] > 0, "the comparison finds nothing wrong where zeros are loaded"
    assert figures["control_tokens_differ"]


def test_a_real_engine_loads_what_it_stored_under_load_and_preemption(python: Path, tmp_path: Path) -> None:
    figures = run_engine(tmp_path, python)
    check_figures(figures)
    assert figures["registered_extents"] or figures["registration_refused"]
