"""Tokens per second of the whole engine on a workload of mixed adapters.

    python -m benchmarks.engine.w1 [WORKLOAD] --model MODEL [--base] [--first N] [--limit SECONDS]
        [--schedule-only] ...

WORKLOAD is a folder with requests.jsonl: lines of id, prompt_ids, max_new_tokens and adapter
(`a0`, `a1`, ... or null). Without one, 32 requests are made that share a prefix of 230 tokens
and use four adapters. The adapters are made with PEFT as random matrices: ranks 8, 16 and 32
in turn, all linear modules, standard deviation 0.02, alpha twice the rank. All requests are
submitted at once, greedy, end of sequence ignored. Every round begins with an empty prefix cache,
tells how far it is on standard error, and is broken off after `--limit` seconds: its rate is then
that of what was done, and it says so.
`--schedule-only` computes nothing: steps, prefix hits and waste are the same, whatever the machine.
Set GOMP_SPINCOUNT as workers do (`worker.engine.compute_threads`).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from worker.engine.config import SchedulerConfig
from worker.engine.engine import Engine
from worker.engine.metrics import EngineStats
from worker.engine.null_runner import NullResidency, NullRunner
from worker.protocol.types import AdapterRef, RequestId, SamplingParams
from worker.runtime.build_hf import TOKEN_BUDGETS
from worker.runtime.offline import OfflineEngine, Prompt
from worker.settings import EngineSettings, parse_bytes

RANKS = (8, 16, 32)
NULL_BLOCKS = 16_384
PROGRESS = 5.0  # seconds
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Round:
    """`answers` of the requests were complete at the end."""

    seconds: float
    output_tokens: int
    answers: int
    lines: tuple[str, ...]

    @property
    def rate(self) -> float:
        return self.output_tokens / self.seconds


def rank_of(adapter: str) -> int:
    return RANKS[int(adapter.removeprefix("a")) % len(RANKS)]


def make_adapters(model: str, names: list[str], folder: Path) -> None:
    """PEFT's own files; number i has rank RANKS[i % 3] and seed 1000 + i."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for name in names:
        number, rank = int(name.removeprefix("a")), rank_of(name)
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=MODULES)
        tuned = get_peft_model(base, config)
        generator = torch.Generator().manual_seed(1000 + number)
        for key, weight in tuned.named_parameters():
            if "lora_" in key:
                values = torch.randn(weight.shape, generator=generator) * 0.02
                weight.data = values.to(torch.bfloat16)
        tuned.save_pretrained(folder / name)
        base = tuned.unload()


def prompts(requests: list[dict[str, Any]], adapters: Path | None) -> list[Prompt]:
    return [
        Prompt(
            request["prompt_ids"],
            SamplingParams(max_tokens=request["max_new_tokens"], temperature=0.0, ignore_eos=True),
            adapters / request["adapter"] if adapters and request["adapter"] else None,
        )
        for request in requests
    ]


def measure(settings: EngineSettings, work: list[Prompt], limit: float) -> Round:
    """One run on an engine of its own, of about `limit` seconds at most."""
    with OfflineEngine(settings) as engine:
        begin, complete = time.perf_counter(), 0
        with progress(engine, begin):
            for answer in engine.stream(work):
                if answer.error:
                    raise SystemExit(f"request {answer.index} failed: {answer.error}")
                complete += 1
                if time.perf_counter() - begin >= limit:
                    break
        seconds = time.perf_counter() - begin
        stats = engine.stats()
    return Round(seconds, stats.counters.output_tokens, complete, lines(stats))


@contextmanager
def progress(engine: OfflineEngine, begin: float) -> Iterator[None]:
    """Say every few seconds how far it is."""
    ended = threading.Event()

    def tell() -> None:
        while not ended.wait(PROGRESS):
            stats = engine.stats()
            print(
                f"{time.perf_counter() - begin:6.0f} s  {stats.counters.finished} finished, "
                f"{stats.running} running, {stats.waiting} waiting, prompts "
                f"{stats.counters.prefill_tokens} tokens, answers {stats.counters.output_tokens}",
                file=sys.stderr,
                flush=True,
            )

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def lines(stats: EngineStats) -> tuple[str, ...]:
    counters = stats.counters
    prompt_tokens = counters.prefill_tokens + counters.cached_tokens
    phases = "  ".join(f"{phase} {h.mean:.2f} s" for phase, h in stats.latency.items())
    return (
        f"steps {counters.steps}   preemptions {counters.preemptions}   adapters loaded "
        f"{stats.adapters.loads}, evicted {stats.adapters.evictions}",
        f"prompt tokens {prompt_tokens}, of them prefix hits {counters.cached_tokens} "
        f"({counters.cached_tokens / prompt_tokens:.1%})",
        f"KV waste {counters.waste:.2%} (blocks of {stats.block_size})",
        f"mean by phase: {phases}",
    )


def read(workload: Path) -> list[dict[str, Any]]:
    text = (workload / "requests.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def made(count: int = 32) -> list[dict[str, Any]]:
    rng = random.Random(0)
    prefix = [rng.randrange(1000, 20_000) for _ in range(230)]
    return [
        {
            "prompt_ids": prefix
            + [rng.randrange(1000, 20_000) for _ in range(rng.randint(10, 110))],
            "max_new_tokens": rng.choice([16, 32, 64, 96]),
            "adapter": f"a{number % 4}",
        }
        for number in range(count)
    ]


def without_computing(settings: EngineSettings, work: list[Prompt]) -> tuple[str, ...]:
    """The same schedule over a runner that computes nothing."""
    config = SchedulerConfig(
        num_blocks=NULL_BLOCKS,
        block_size=settings.block_size,
        token_budget=settings.token_budget or TOKEN_BUDGETS["cpu"],
    )
    engine = Engine(
        config, NullRunner(50_000), NullResidency(256), NoText(), frozenset(), "benchmark"
    )
    for number, prompt in enumerate(work):
        name = None if prompt.adapter is None else Path(prompt.adapter).name
        ref = None if name is None else AdapterRef(name, rank_of(name))
        request_id = RequestId(str(number))
        engine.add(request_id, prompt.content, prompt.sampling, adapter=ref, stream=False)
    while engine.has_work():
        engine.step()
    return lines(engine.stats())


class NoText:
    def decode(self, ids: object, skip_special_tokens: bool = True) -> str:
        return ""

    def token_to_id(self, token: str) -> int | None:
        return None


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload", type=Path, nargs="?")
    parser.add_argument("--model", required=True, help="a local folder")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--schedule-only", action="store_true")
    parser.add_argument("--base", action="store_true", help="leave the adapters out")
    parser.add_argument("--first", type=int, help="only so many requests")
    parser.add_argument("--limit", type=float, default=500.0, help="seconds of a round")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--kv-memory", type=parse_bytes, default=parse_bytes("2GiB"))
    parser.add_argument("--block-size", type=int)
    parser.add_argument("--token-budget", type=int, default=2048)
    parser.add_argument("--threads", type=int)
    return parser.parse_args()


def main() -> None:
    given = options()
    disable_progress_bar()
    requests = (read(given.workload) if given.workload else made())[: given.first]
    settings = EngineSettings(
        model=given.model,
        dtype=given.dtype,
        kv_memory=given.kv_memory,
        token_budget=given.token_budget,
        threads=given.threads,
    )
    if given.block_size:
        settings = replace(settings, block_size=given.block_size)
    names = sorted({request["adapter"] for request in requests if request["adapter"]})
    with tempfile.TemporaryDirectory(prefix="batten-w1-") as folder:
        if not given.base and not given.schedule_only:
            begin = time.perf_counter()
            make_adapters(given.model, names, Path(folder))
            print(f"adapters made in {time.perf_counter() - begin:.0f} s", file=sys.stderr)
        work = prompts(requests, None if given.base else Path(folder))
        print(f"{len(work)} requests, {0 if given.base else len(names)} adapters", flush=True)
        if given.schedule_only:
            print("\n".join(without_computing(settings, work)))
            return
        rounds = []
        for number in range(given.rounds):
            rounds.append(measure(settings, work, given.limit))
            last = rounds[-1]
            load = os.getloadavg()[0]
            print(
                f"round {number + 1}: {last.rate:.1f} output tokens/s "
                f"({last.output_tokens} in {last.seconds:.1f} s; load average {load:.1f})",
                flush=True,
            )
            if last.answers < len(work):
                print(f"broken off: {last.answers} of {len(work)} requests were complete")
        print("\n".join(rounds[-1].lines))


if __name__ == "__main__":
    main()
