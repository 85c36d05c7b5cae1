"""`python -m benchmarks`: every benchmark in a short form, one after another, and a summary.

    python -m benchmarks [NAME ...] [--list]

NAME is part of a benchmark's name. Each may also be run by itself: see its file for the options of
its full form. BATTEN_MODEL (a local folder) is the model of those that compute with one, and of
those that only tokenise; without it they are left out. BATTEN_WORKLOAD is a folder with a
requests.jsonl for `engine.w1`, which otherwise makes its own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from worker.engine.compute_threads import wait_politely
from worker.settings import logical_cores, physical_cores


@dataclass(frozen=True)
class Benchmark:
    name: str
    arguments: tuple[str, ...] = ()

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", f"benchmarks.{self.name}", *self.arguments]


def benchmarks() -> Iterator[Benchmark]:
    yield Benchmark("engine.scheduler")
    yield Benchmark("kernels.cpu", ("--rounds", "5"))
    yield Benchmark("kernels.compile_ahead")
    sizes = ("--queued", "10", "1000", "10000", "--claims", "100", "--passes", "1000")
    yield Benchmark("queue.claim", sizes)
    yield Benchmark("queue.fairness", ("--lines", "5000"))
    yield Benchmark("queue.usage", ("--rows", "100000", "--transactions", "5"))
    if model := os.environ.get("BATTEN_MODEL"):
        yield Benchmark("queue.delivery", ("--lines", "2000", "--model", model))
        yield Benchmark("queue.sharing", ("--lines", "3000", "--backlog", "600", "--model", model))
        yield Benchmark("queue.submit", ("--jobs", "200", "--model", model))
        yield Benchmark("queue.first_token", ("--calls", "20", "--model", model))
        workload = os.environ.get("BATTEN_WORKLOAD")
        given = (workload,) if workload else ()
        few = ("--adapters", "200", "--requests", "64", "--prompt", "32", "--tokens", "16")
        yield Benchmark("engine.adapters", ("--model", model, *few))
        yield Benchmark("engine.w1", (*given, "--model", model, "--first", "32", "--limit", "120"))


def run(benchmark: Benchmark) -> str:
    """How it ended, in a line."""
    load, begin = os.getloadavg()[0], time.monotonic()
    print(f"\n{benchmark.name} {' '.join(benchmark.arguments)}", flush=True)
    environment = dict(os.environ)
    wait_politely(physical_cores(), logical_cores(), environment)
    status = subprocess.run(benchmark.command, env=environment, check=False).returncode
    end = "done" if status == 0 else f"FAILED (status {status})"
    return f"{benchmark.name:<24}{end} in {time.monotonic() - begin:.0f} s, load average {load:.1f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    chosen = [
        benchmark
        for benchmark in benchmarks()
        if not options.names or any(name in benchmark.name for name in options.names)
    ]
    if not chosen:
        parser.error(f"no benchmark is called like {', '.join(options.names)}")
    if options.list:
        print("\n".join(" ".join((each.name, *each.arguments)) for each in chosen))
        return 0
    ends = [run(benchmark) for benchmark in chosen]
    print("\n" + "\n".join(ends))
    return int(any("FAILED" in end for end in ends))


if __name__ == "__main__":
    sys.exit(main())
