"""A thousand adapters in rotation over one base model, against one adapter and against none.

    python -m benchmarks.engine.adapters --model MODEL [--adapters 1000] [--requests 1000] ...

Adapters are files as PEFT writes them, random matrices of rank 4 in q_proj and v_proj of every
layer. All requests are submitted at once: `--prompt` random tokens, `--tokens` greedy ones. Every
way of choosing adapters runs the same prompts on an engine of its own:

    base      no adapter
    single    one adapter for all
    zipf      request by request, adapter k with a probability of 1 / (k + 1)
    uniform   each adapter alike

Prints output tokens a second and their ratio to `single`, the same ratio by processor time (which
other programs on the machine change little), loads and evictions, how long the engine had nothing
to compute but waited for adapters, and how the process grew in the second half of the run. Exit
status 1 when a request failed, when a ratio is below `--floor`, or when the process grew by more
than `--growth`.
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import structlog
from safetensors.numpy import save_file

from worker.adapters.folders import FolderSource
from worker.engine.outputs import FailedOutput, FinishedOutput
from worker.protocol import peft
from worker.protocol.types import AdapterRef, RequestId, SamplingParams
from worker.runtime.build_hf import hf_engine
from worker.settings import EngineSettings, parse_bytes

MODULES = ("q_proj", "v_proj")
WAYS = ("base", "single", "zipf", "uniform")
STALLED_SECONDS = 0.002


@dataclass(frozen=True)
class Round:
    way: str
    seconds: float
    processor: float
    tokens: int
    errors: int
    loads: int
    evictions: int
    stalled: float
    growth: int

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def make_adapters(model: Path, folder: Path, count: int, rank: int) -> list[Path]:
    """As PEFT saves them, bfloat16 bits in numpy being float16 here: half the size either way."""
    shapes = {
        name: shape
        for name, shape in peft.base_shapes(model).items()
        if name.endswith(tuple(f".{module}" for module in MODULES))
    }
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(MODULES),
        "base_model_name_or_path": str(model),
    }
    folders = []
    for number in range(count):
        numbers = np.random.default_rng(number)
        tensors = {}
        for name, (out, width) in shapes.items():
            for part, shape in (("lora_A", (rank, width)), ("lora_B", (out, rank))):
                values = numbers.standard_normal(shape, np.float32) * 0.02
                tensors[f"{peft.PREFIX}{name}.{part}.weight"] = values.astype(np.float16)
        target = folder / f"a{number}"
        target.mkdir()
        save_file(tensors, str(target / peft.WEIGHTS_FILE))
        (target / peft.CONFIG_FILE).write_text(json.dumps(config))
        folders.append(target)
    return folders


def choose(way: str, requests: int, adapters: int, seed: int = 7) -> list[int | None]:
    """Which adapter each request uses."""
    rng = random.Random(seed)
    if way == "base":
        return [None] * requests
    if way == "single":
        return [0] * requests
    if way == "uniform":
        return [rng.randrange(adapters) for _ in range(requests)]
    weights = list(itertools.accumulate(1 / (k + 1) for k in range(adapters)))
    return [bisect.bisect(weights, rng.random() * weights[-1]) for _ in range(requests)]


def measure(
    settings: EngineSettings, way: str, folders: Sequence[Path], given: argparse.Namespace
) -> Round:
    source = FolderSource()
    refs = [source.add(folder) for folder in folders]
    built = hf_engine(settings, Path(settings.model), source.for_model)
    engine = built.engine
    rng = random.Random(1)
    sampling = SamplingParams(max_tokens=given.tokens, temperature=0, ignore_eos=True)
    process = psutil.Process()
    finished = errors = 0
    middle, stalled = 0, 0.0
    try:
        begin, used = time.perf_counter(), time.process_time()
        for number, choice in enumerate(choose(way, given.requests, len(refs))):
            prompt = [rng.randrange(1000, 20_000) for _ in range(given.prompt)]
            adapter: AdapterRef | None = None if choice is None else refs[choice]
            engine.add(RequestId(str(number)), prompt, sampling, adapter=adapter, stream=False)
        while engine.has_work():
            for output in engine.step():
                finished += isinstance(output, FinishedOutput)
                errors += isinstance(output, FailedOutput)
            if not middle and finished >= given.requests // 2:
                middle = process.memory_info().rss
            if engine.stalled:
                time.sleep(STALLED_SECONDS)
                stalled += STALLED_SECONDS
        seconds, processor = time.perf_counter() - begin, time.process_time() - used
        stats = engine.stats()
    finally:
        built.close()
    return Round(
        way,
        seconds,
        processor,
        stats.counters.output_tokens,
        errors + given.requests - finished - errors,
        stats.adapters.loads,
        stats.adapters.evictions,
        stalled,
        process.memory_info().rss - middle,
    )


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, type=Path, help="a local folder")
    parser.add_argument("--adapters", type=int, default=1000)
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--max-sequences", type=int, default=64)
    parser.add_argument("--adapter-rank", type=int, default=256, help="rows of the rank pool")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--kv-memory", type=parse_bytes, default=parse_bytes("1GiB"))
    parser.add_argument("--only", choices=WAYS, nargs="+", default=list(WAYS))
    parser.add_argument("--floor", type=float, default=0.5, help="least ratio to `single`")
    parser.add_argument("--growth", type=parse_bytes, default=parse_bytes("256MiB"))
    return parser.parse_args()


def main() -> int:
    given = options()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    settings = EngineSettings(
        model=str(given.model),
        dtype=given.dtype,
        kv_memory=given.kv_memory,
        max_sequences=given.max_sequences,
        adapter_rank=given.adapter_rank,
        threads=given.threads,
    )
    rounds: dict[str, Round] = {}
    failed = False
    with tempfile.TemporaryDirectory(prefix="batten-adapters-") as temporary:
        began = time.perf_counter()
        folders = make_adapters(given.model, Path(temporary), given.adapters, given.rank)
        print(f"{len(folders)} adapters made in {time.perf_counter() - began:.0f} s", flush=True)
        print(
            "adapters  tokens/s  to single  by cpu  loads  evicted  stalled  growth  errors  load"
        )
        for way in given.only:
            last = rounds[way] = measure(settings, way, folders, given)
            single = rounds.get("single")
            ratio = last.rate / single.rate if single else float("nan")
            by_cpu = single.processor / last.processor if single else float("nan")
            print(
                f"{way:<8} {last.rate:>9.1f} {ratio:>10.2f} {by_cpu:>7.2f} {last.loads:>6}"
                f" {last.evictions:>8} {last.stalled:>6.1f} s {last.growth / 2**20:>3.0f} MiB"
                f" {last.errors:>7} {os.getloadavg()[0]:>5.1f}",
                flush=True,
            )
            failed |= last.errors > 0 or ratio < given.floor or last.growth > given.growth
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
