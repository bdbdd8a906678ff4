"""Tiny models that a real vLLM runs on the CPU: `tiny-deepseek` (latent attention), `tiny-llama` (grouped-query) and
`tiny-llava` (the same, with pictures)."""

import json
from pathlib import Path

from hack.cache import cache_root, content_hash, made_whole
from hack.console import StepError, step
from hack.shell import run
from hack.vllm.environment import TORCH_VERSION, ensure_torchvision, ensure_vllm_environment

CONFIGURATIONS = Path(__file__).parent / "configurations"
MAKER = Path(__file__).parent / "make_model.py"


def takes_images(name: str) -> bool:
    """Whether the model's processes need torchvision (`ensure_torchvision`)."""
    return "vision_config" in json.loads((CONFIGURATIONS / name / "config.json").read_text())


def ensure_model(name: str, *, python: Path | None = None) -> Path:
    """Return the folder of a model with real weights, making it the first time, by the Python of a vLLM environment
    (by default the CPU build's)."""
    configuration = CONFIGURATIONS / name
    if not configuration.is_dir():
        known = ", ".join(sorted(path.name for path in CONFIGURATIONS.iterdir()))
        raise StepError(f"there is no tiny model {name!r}; there are: {known}")
    folder = cache_root() / f"models-{content_hash([configuration, MAKER], TORCH_VERSION)}" / name
    if not folder.exists():
        python = python or ensure_vllm_environment() / "bin" / "python"
        paths = {"PYTHONPATH": str(ensure_torchvision())} if takes_images(name) else None
        log = cache_root() / "logs" / f"model-{name}.log"
        with step(f"Making the weights of {name} (log: {log})"), made_whole(folder) as unfinished:
            run([python, MAKER, configuration, unfinished], log=log, environment=paths)
            for file in unfinished.iterdir():
                file.chmod(0o644)  # pods read it under users of their own
    return folder
