"""The engine agent's rows: the scheduler's time beside vLLM's own manager, and a real vLLM with two ranks.

A real vLLM takes a minute a start; `KVOFFLOAD_BENCH_VLLM=0` leaves those rows out.
"""

import json
import os
import re
import subprocess
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from bench.rows import Measured, Row
from hack.vllm.environment import environment_path
from tests.daemon_process import DaemonProcess

ROOT = Path(__file__).resolve().parents[1]
VLLM_PYTHON = environment_path() / "bin" / "python"
PROMPT_TOKENS = 1800
PROMPTS = 6
EXTENT_BYTES = 64 << 20
PER_RANK = {"KVOFFLOAD_REPLICATED_LAYOUT": "per-rank"}


def run() -> list[Row]:
    """Every row of the engine; none where there is no vLLM."""
    if not VLLM_PYTHON.exists():
        return []
    with tempfile.TemporaryDirectory(prefix="kvo-bench-") as folder:
        rows = _measure_scheduler(Path(folder) / "scheduler")
        if os.environ.get("KVOFFLOAD_BENCH_VLLM", "1") != "0":
            rows += _measure_vllm(Path(folder))
    return rows


def _measure_scheduler(folder: Path) -> list[Row]:
    with DaemonProcess(folder, capacity_bytes=384 << 20) as daemon:
        assert daemon.process is not None
        os.sched_setaffinity(daemon.process.pid, {0})
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT / "agent"),
            "VLLM_PLUGINS": "",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        command = [str(VLLM_PYTHON), str(ROOT / "bench" / "engine_scheduler.py"), str(daemon.attach("pod"))]
        out = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout
    figures = json.loads(out.splitlines()[-1])
    ours, theirs = figures["ours"], figures["theirs"]
    if missing := [kind for kind in ("lookup", "rested", "load", "store", "step") if not ours[kind]]:
        raise SystemExit(f"no {missing[0]} met the deadline of 2 ms: {ours['dropped']} missed it")
    rows = []
    for name, kinds, target, limit in (
        ("look-up of a request with 1,000 keys", ("lookup",), "at most 0.6", None),
        ("the same 10 ms after the request before, when the core has slept", ("rested",), "at most 0.6", None),
        ("prepare and complete its load", ("load",), "no more than vLLM's", 1.0),
        ("prepare and complete a store of 1,000 keys", ("store",), "no more than vLLM's", 1.0),
        ("scheduler time of a request with 1,000 keys in all", ("lookup", "load", "store"), "1.5 x vLLM's sum", 1.5),
        (
            "scheduler time per step at saturation: 4 requests of 250 keys loaded, 64 keys stored", ("step",),
            "1.5 x vLLM's", 1.5,
        ),
    ):  # fmt: skip
        mine, reference = _total(ours, kinds), _total(theirs, kinds)
        met = mine.median <= (0.6 if limit is None else limit * reference.median)
        rows.append(Row(name, "ms", mine, reference, "vLLM in process", target, met))
    waits = Measured.of(ours["waits"])
    name = "blocking round trips of a request with 1,000 keys"
    rows.append(Row(name, "waits", waits, None, "", "1", max(ours["waits"]) <= 1))
    for what, counted in (("requests", ["lookup", "rested", "store"]), ("steps at saturation", ["step"])):
        dropped = sum(ours["dropped"][kind] for kind in counted)
        tried = dropped + sum(len(ours[kind]) for kind in counted)
        name = f"of these {tried} {what}, missed the deadline of 2 ms (their times are not above)"
        rows.append(Row(name, "count", Measured.of([dropped]), None, "", "0.1 %", dropped <= tried / 1000))
    return rows


def _total(figures: dict[str, list[float]], kinds: tuple[str, ...]) -> Measured:
    return Measured.of([sum(one) for one in zip(*(figures[kind] for kind in kinds), strict=False)])


def _measure_vllm(folder: Path) -> list[Row]:
    from engine_process import EngineProcess, make_prompt

    prompts = [make_prompt(seed, PROMPT_TOKENS) for seed in range(PROMPTS)]
    options = {
        "model": "tiny-deepseek",
        "max_model_len": 2048,
        "num_gpu_blocks_override": 400,
        "max_num_batched_tokens": 2048,
    }
    starts: dict[str, float] = {}
    with DaemonProcess(folder / "pool", capacity_bytes=256 << 20) as daemon:
        socket = daemon.attach("pod-a")
        with EngineProcess(folder / "a", socket=socket, **options) as engine:
            engine.generate([make_prompt(99, PROMPT_TOKENS)], max_tokens=1)
            cold = [engine.generate_cold([prompt], max_tokens=1).seconds * 1e3 for prompt in prompts]
            records = [one["stored"] for one in engine.rpc("probe_take")]
            slot_bytes = _slot_bytes(engine)
        with EngineProcess(folder / "b", socket=daemon.attach("pod-b"), probe=False, **options) as engine:
            engine.generate([make_prompt(98, PROMPT_TOKENS)], max_tokens=1)
            answers = [engine.generate_cold([prompt], max_tokens=1) for prompt in prompts]
            warm = [one.seconds * 1e3 for one in answers]
            cached = [float(one.cached[0]) for one in answers]
        for name, given in (("with", socket), ("without", None)):
            begun = time.monotonic()
            # A row of parts, so that the same start tells of the plain layout; it takes the time of any other.
            with EngineProcess(folder / name, socket=given, probe=False, environment=PER_RANK, **options) as engine:
                starts[name] = time.monotonic() - begun
                if given is not None:
                    plain_slot_bytes = _slot_bytes(engine)
    chunks_per_gib, plain_per_gib = (1 << 30) // slot_bytes, (1 << 30) // plain_slot_bytes
    shares = _shares_of_first_rank(records, slot_bytes)
    pages = [offset for of_rank in records for offset, _, _ in of_rank]
    return [
        Row(
            "cached tokens of a second engine's first request", "tokens", Measured.of(cached), None, "recompute: 0",
            "above 0", min(cached) > 0,
        ),
        Row(
            f"time to first token, {PROMPT_TOKENS} tokens stored by another engine", "ms", Measured.of(warm),
            Measured.of(cold), "recompute", "no recompute", min(cached) > 0,
        ),
        Row(
            f"bytes of a chunk copied by rank 0 of two, {len(shares)} chunks", "share", Measured.of(shares), None,
            "vLLM: all by rank 0", "one half of each", min(shares) == max(shares) == 0.5,
        ),
        Row(
            "copies of each stored page, two ranks", "copies", Measured.of([len(pages) / len(set(pages))]), None,
            "plain: 2", "1", len(pages) == len(set(pages)),
        ),
        Row(
            "chunks per GiB, two ranks", "chunks", Measured.of([chunks_per_gib]), Measured.of([plain_per_gib]),
            "a part for each rank", "2 x the plain layout", chunks_per_gib >= 2 * plain_per_gib,
        ),
        Row(
            "start of an engine, with the pool beside without", "s", Measured.of([starts["with"]]),
            Measured.of([starts["without"]]), "without", "1 s longer at most",
            starts["with"] - starts["without"] <= 1.0,
        ),
    ]  # fmt: skip


def _slot_bytes(engine: Any) -> int:
    """Bytes of one chunk with all its parts, as this engine's workers said when their offload began."""
    from engine_process import eventually

    if not eventually(lambda: bool(engine.lines("slots of"))):
        raise SystemExit(f"offload did not begin: {engine.log_path}")
    found = re.search(r"slots of (\d+) bytes", engine.log)
    assert found is not None
    return int(found[1])


def _shares_of_first_rank(records: list[list[Any]], slot_bytes: int) -> list[float]:
    """What rank 0 copied of each chunk's bytes; slots stand one after the other in an extent."""
    copied: defaultdict[tuple[int, int], list[int]] = defaultdict(lambda: [0] * len(records))
    for rank, of_rank in enumerate(records):
        for offset, num_bytes, _ in of_rank:
            copied[offset // EXTENT_BYTES, offset % EXTENT_BYTES // slot_bytes][rank] += num_bytes
    if len({sum(of_chunk) for of_chunk in copied.values()}) != 1:
        raise SystemExit("the pages recorded do not make whole chunks")
    return [of_chunk[0] / sum(of_chunk) for of_chunk in copied.values()]
