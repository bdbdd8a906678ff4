"""A real vLLM in a process of its own, as a pod would start it: the library on PYTHONPATH, the socket in the
environment.

    with EngineProcess(folder, model="tiny-llama", socket=daemon.attach("pod-a")) as engine:
        engine.generate([prompt]).tokens
"""

import fcntl
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from daemon_process import DaemonProcess
from hack.vllm.environment import ensure_vllm_environment
from hack.vllm.models import ensure_model

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 240
ANSWER_SECONDS = 180
CHECKSUMS: dict[str, str | None] = {"KVOFFLOAD_CHECKSUM": "full"}
"""The engines with latent attention check every page, so that all their tests go that way too."""
DEADLINE_VARIABLE = "KVOFFLOAD_STEP_DEADLINE_SECONDS"
TEST_DEADLINE_SECONDS = 0.25
"""Tests share two cores with whatever else runs: what they ask is whether it works, not how fast."""
DEFAULT_DEADLINE: dict[str, str | None] = {DEADLINE_VARIABLE: None}
"""The deadline that users have: 2 ms."""
VLLM_LOCK = Path("/tmp/kvo-vllm.lock")
"""One vLLM at a time on this machine: each takes about 3 GB and both cores."""


@dataclass(frozen=True)
class Generated:
    """One answer to `generate`, by prompt."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    cached: list[int]
    seconds: float


def build_library(folder: Path) -> Path:
    """The tree that a pod gets, by the image's own script."""
    library = folder / "lib"
    subprocess.run([sys.executable, ROOT / "agent" / "build_engine_library.py", library], check=True)
    return library


def make_prompt(seed: int, num_tokens: int = 300) -> list[int]:
    """Random tokens, the same for the same seed."""
    numbers = random.Random(seed)
    return [numbers.randrange(2, 1000) for _ in range(num_tokens)]


def eventually(is_true: Callable[[], bool], seconds: float = 15.0) -> bool:
    """Whether it becomes true in time; each try is an action, so there is nothing to sleep for but a moment
    between."""
    deadline = time.monotonic() + seconds
    while not is_true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def wait_for_slots(daemon: DaemonProcess, state: str, number: int) -> bool:
    """Whether the daemon comes to count so many slots in a state."""
    return eventually(lambda: daemon.metrics()[f'kvoffload_slots{{state="{state}"}}'] == number)


class EngineProcess:
    """See the module's docstring. `options` are vLLM's own, over defaults for the tiny models; a variable that is
    None is not set. `python` is of another environment than that of the CPU build, `modules` a folder with a probe of
    the caller's own."""

    def __init__(
        self,
        folder: Path,
        *,
        model: str,
        socket: Path | None,
        overlay: Path | None = None,
        python: Path | None = None,
        modules: Path | None = None,
        environment: Mapping[str, str | None] | None = None,
        probe: bool = True,
        **options: Any,
    ) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.log_path = folder / "vllm.log"
        self.options = {
            "model": str(ensure_model(model, python=python)),
            "tensor_parallel_size": 2,
            "distributed_executor_backend": "mp",
            "dtype": "float32",
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "max_model_len": 512,
            "max_num_seqs": 4,
            "num_gpu_blocks_override": 160,
            "disable_log_stats": False,
            **({"worker_extension_cls": "engine_probe.Probe"} if probe and socket else {}),
            **options,
        }
        self.has_probe = probe and socket is not None
        self._python = python
        variables: dict[str, str | None] = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                str(path)
                for path in (build_library(folder), Path(__file__).parent, modules, overlay)
                if path is not None
            ),
            "PYTHONHASHSEED": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "0|1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "TORCH_COMPILE_DISABLE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            DEADLINE_VARIABLE: str(TEST_DEADLINE_SECONDS),
            **({"KVOFFLOAD_SOCKET": str(socket), "KVOFFLOAD_POOL": "test"} if socket else {}),
            **(environment or {}),
        }
        self._environment = {name: value for name, value in variables.items() if value is not None}
        self._process: subprocess.Popen[str] | None = None
        self.exit_status: int | None = None
        """Of the process that made the engine, when it has ended."""

    def __enter__(self) -> "EngineProcess":
        python = self._python or ensure_vllm_environment() / "bin" / "python"
        self._lock = VLLM_LOCK.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        reading, writing = os.pipe()
        self._answers = os.fdopen(reading, "r")
        driver = Path(__file__).parent / "engine_driver.py"
        try:
            with self.log_path.open("w") as log:
                self._process = subprocess.Popen(
                    [str(python), str(driver), str(writing), json.dumps(self.options)],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    text=True,
                    env=self._environment,
                    pass_fds=(writing,),
                    # A group to be killed, but not a session: the kernel (6.18) groups tasks by session, and the
                    # workers' busy waiting (sched_yield) then keeps other sessions off the CPU for up to 3 s at a time.
                    process_group=0,
                )
        finally:
            os.close(writing)
        try:
            if self._read(START_SECONDS) != "up":
                raise AssertionError("the driver did not come up")
            if self.has_probe:
                self.rpc("probe_install")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the engine as its user would, and make sure that all of it is gone; once is enough."""
        if self._answers.closed:
            return
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self.exit_status = self._process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self.exit_status = self._process.wait()
        self._answers.close()
        self._lock.close()

    @property
    def log(self) -> str:
        """All that vLLM has said."""
        return self.log_path.read_text(errors="replace")

    def lines(self, word: str) -> list[str]:
        """Lines of the log with a word."""
        return [line for line in self.log.splitlines() if word in line]

    @property
    def tracebacks(self) -> list[str]:
        """Lines of the log that begin one, but for what vLLM's front end says of its missing tokenizer."""
        return [line for line in self.lines("Traceback") if "MainProcess" not in line]

    def do(self, command: str, **arguments: Any) -> Any:
        """Run one command in the driver."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": command, **arguments}) + "\n")
        self._process.stdin.flush()
        answer = self._read(ANSWER_SECONDS)
        if "error" in answer:
            raise AssertionError(f"{command}: {answer['error']}\n{self._tail()}")
        return answer["ok"]

    def rpc(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of the probe in every worker; one answer a rank."""
        return list(self.do("rpc", method=method, args=list(arguments)))

    def generate(self, prompts: list[list[int]], **options: Any) -> Generated:
        """Greedy tokens for each prompt."""
        answer = self.do("generate", prompts=prompts, **options)
        return Generated(answer["tokens"], answer["logprobs"], answer["cached"], answer["seconds"])

    def reset_prefix_cache(self, *, connector: bool = False) -> None:
        """Forget vLLM's own prefix cache, so that look-ups reach us; with `connector`, ours too."""
        assert self.do("reset_prefix_cache", connector=connector)

    def hold_transfers(self, prompts: list[list[int]], *, max_tokens: int = 8) -> list[str]:
        """Add requests, one whose chunks the pool has and one whose chunks it has not, and return when both ranks are
        in the middle of a load and of a store. The copies stay there until the probe's fault is taken away."""
        self.reset_prefix_cache()
        self.rpc("probe_fault", "hold")
        names = self.do("add", prompts=prompts, max_tokens=max_tokens)
        assert eventually(lambda: all(min(held) > 0 for held in self.rpc("probe_held")), 60)
        return list(names)

    def generate_cold(self, prompts: list[list[int]], **options: Any) -> Generated:
        """Generate with vLLM's own prefix cache empty before it."""
        self.reset_prefix_cache()
        return self.generate(prompts, **options)

    def _read(self, seconds: float) -> Any:
        assert self._process is not None
        if not select.select([self._answers], [], [], seconds)[0]:
            raise AssertionError(f"no answer within {seconds} s\n{self._tail()}")
        line = self._answers.readline()
        if not line:
            raise AssertionError(f"vLLM ended with {self._process.wait(30)}\n{self._tail()}")
        return json.loads(line)

    def _tail(self) -> str:
        return "\n".join(self.log.splitlines()[-60:])
