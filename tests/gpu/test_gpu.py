"""The device backend on a real GPU: `make test-gpu`. Needs a CUDA device and a Python with a CUDA build of vLLM.

`KVOFFLOAD_GPU_PYTHON` names that Python; without it, `python3` is asked whether it has one.
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CHECKS = re.findall(r"@check\ndef (\w+)\(", (HERE / "gpu_checks.py").read_text())
PROBE = (
    "import torch, vllm._custom_ops; assert torch.cuda.is_available(); assert torch.ops._C_cache_ops.swap_blocks_batch"
)


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, object]]:
    python = os.environ.get("KVOFFLOAD_GPU_PYTHON") or shutil.which("python3") or "python3"
    probe = subprocess.run([python, "-c", PROBE], capture_output=True, text=True)
    if probe.returncode:
        last = (probe.stderr.strip().splitlines() or ["no output"])[-1]
        pytest.skip(
            f"needs a CUDA device and vLLM's CUDA build; {python} says: {last} (KVOFFLOAD_GPU_PYTHON names another)"
        )
    done = subprocess.run(
        [python, str(HERE / "gpu_checks.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT / "agent")},
        capture_output=True,
        text=True,
        timeout=600,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULTS ")]
    assert lines, done.stderr[-4000:]
    return dict(json.loads(lines[0].removeprefix("RESULTS ")))


@pytest.mark.parametrize("name", CHECKS)
def test_on_a_gpu(results: dict[str, dict[str, object]], name: str) -> None:
    assert "ok" in results[name], results[name].get("error")
    print(name, results[name]["ok"])
