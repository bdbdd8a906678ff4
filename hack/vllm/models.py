"""Tiny models that a real vLLM runs on the CPU: `tiny-deepseek` (latent attention) and `tiny-llama` (grouped-query)."""

from pathlib import Path

from hack.cache import cache_root, content_hash, made_whole
from hack.console import StepError, step
from hack.shell import run
from hack.vllm.environment import TORCH_VERSION, ensure_vllm_environment

CONFIGURATIONS = Path(__file__).parent / "configurations"
MAKER = Path(__file__).parent / "make_model.py"


def ensure_model(name: str) -> Path:
    """Return the folder of a model with real weights, making it the first time."""
    configuration = CONFIGURATIONS / name
    if not configuration.is_dir():
        known = ", ".join(sorted(path.name for path in CONFIGURATIONS.iterdir()))
        raise StepError(f"there is no tiny model {name!r}; there are: {known}")
    folder = cache_root() / f"models-{content_hash([configuration, MAKER], TORCH_VERSION)}" / name
    if not folder.exists():
        environment = ensure_vllm_environment()
        log = cache_root() / "logs" / f"model-{name}.log"
        with step(f"Making the weights of {name} (log: {log})"), made_whole(folder) as unfinished:
            run([environment / "bin" / "python", MAKER, configuration, unfinished], log=log)
            for file in unfinished.iterdir():
                file.chmod(0o644)  # pods read it under users of their own
    return folder
