"""Runs inside the vLLM environment: one LLM, driven by JSON lines on stdin, answering by JSON lines on file
descriptor 3.

Started by `engine_process.EngineProcess`. Nothing of kvoffload is named here: the plugin comes as it does in a pod,
by PYTHONPATH and its entry point.
"""

import json
import os
import sys
import time
from typing import Any


def run_generate(llm: Any, command: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    sampling = SamplingParams(
        max_tokens=command.get("max_tokens", 8), temperature=0, detokenize=False, ignore_eos=True, logprobs=1
    )
    salt = {"cache_salt": command["cache_salt"]} if "cache_salt" in command else {}
    adapter = None
    if "adapter" in command:
        from vllm.lora.request import LoRARequest

        name, number, path = command["adapter"]
        adapter = LoRARequest(name, number, path)
    picture = make_picture(*command["picture"]) if "picture" in command else {}
    prompts = [TokensPrompt(prompt_token_ids=prompt, **salt, **picture) for prompt in command["prompts"]]
    begin = time.monotonic()
    outputs = llm.generate(prompts, sampling, use_tqdm=False, lora_request=adapter)
    return {
        "seconds": time.monotonic() - begin,
        "tokens": [list(one.outputs[0].token_ids) for one in outputs],
        "logprobs": [
            [
                round(step[token].logprob, 4)
                for token, step in zip(one.outputs[0].token_ids, one.outputs[0].logprobs, strict=True)
            ]
            for one in outputs
        ],
        "cached": [one.num_cached_tokens or 0 for one in outputs],
    }


def make_picture(seed: int, name: str) -> dict[str, Any]:
    """Random pixels as a prompt's picture, under the name that the caller gives it."""
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 255, (32, 32, 3), dtype=np.uint8)
    return {"multi_modal_data": {"image": Image.fromarray(pixels)}, "multi_modal_uuids": {"image": [name]}}


def run_add(llm: Any, command: dict[str, Any]) -> list[str]:
    """Add requests and return their names; the engine core begins with them at once."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    sampling = SamplingParams(
        max_tokens=command.get("max_tokens", 64), temperature=0, detokenize=False, ignore_eos=True
    )
    names = [f"added-{time.monotonic_ns()}-{index}" for index in range(len(command["prompts"]))]
    for name, prompt in zip(names, command["prompts"], strict=True):
        llm.llm_engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), sampling)
    return names


def run_finish(llm: Any, command: dict[str, Any]) -> list[list[int]]:
    """Step until nothing is left; tokens of the requests named."""
    tokens: dict[str, list[int]] = {}
    while llm.llm_engine.has_unfinished_requests():
        for one in llm.llm_engine.step():
            tokens[one.request_id] = list(one.outputs[0].token_ids)
    return [tokens[name] for name in command["names"]]


def run_sleep_during_transfers(llm: Any) -> bool:
    """Ask the engine core to sleep, let the transfers go on that the probe holds, wake up. Whether the core had heard
    of it, and was not asleep yet, while they were held."""
    from concurrent.futures import Future

    from vllm.v1.engine import EngineCoreRequestType

    core, asleep = llm.llm_engine.engine_core, Future()
    core.utility_results[asleep_id := 1 << 60] = asleep  # as its `call_utility` does, without waiting
    core._send_input(EngineCoreRequestType.UTILITY, (0, asleep_id, "sleep", (1, "abort")))
    has_heard = core.is_sleeping()
    was_pending = not asleep.done()
    llm.collective_rpc("probe_fault", args=("",))
    asleep.result(60)
    llm.wake_up()
    return bool(has_heard and was_pending)


def run_abort(llm: Any, command: dict[str, Any]) -> dict[str, Any]:
    """Add requests, or take those `names`, take some steps, abort them all; then step until nothing is left."""
    engine = llm.llm_engine
    names = command["names"] if "names" in command else run_add(llm, command)
    for _ in range(command["steps"]):
        engine.step()
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    return {}


def handle(llm: Any, command: dict[str, Any]) -> Any:
    match command["do"]:
        case "generate":
            return run_generate(llm, command)
        case "abort":
            return run_abort(llm, command)
        case "add":
            return run_add(llm, command)
        case "finish":
            return run_finish(llm, command)
        case "reset_prefix_cache":
            return bool(llm.reset_prefix_cache(reset_connector=command.get("connector", False)))
        case "rpc":
            return llm.collective_rpc(command["method"], args=tuple(command.get("args", ())))
        case "metrics":
            return {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
        case "sleep_during_transfers":
            return run_sleep_during_transfers(llm)
    raise ValueError(f"unknown command {command['do']}")


def main() -> None:
    answers = os.fdopen(int(sys.argv[1]), "w")
    options = json.loads(sys.argv[2])
    from vllm import LLM

    llm = LLM(**options)
    print(json.dumps("up"), file=answers, flush=True)
    for line in sys.stdin:
        try:
            answer = {"ok": handle(llm, json.loads(line))}
        except Exception as error:  # noqa: BLE001 - the test gets it as an answer
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
