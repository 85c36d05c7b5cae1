"""How tenants share one worker: a simulation of the queue's choice, with its plot.

    python -m benchmarks.queue.fairness [--plot docs/fairness.svg]

Time is tokens: a worker of `SLOTS` requests finishes whichever ends first, and claims again. The
queue is the in-memory one, which passes the same tests as the one in Redis.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from worker.protocol.messages import Finished, GenerateRequest
from worker.protocol.types import Capacity, RequestId, SamplingParams, TenantId, TokenUsage
from worker.queue.base import Lease
from worker.queue.memory import MemoryQueue, MemoryServer
from worker.queue.settings import QueueSettings

SLOTS = 32
OUTPUT = 64
PRICE = QueueSettings().output_price


@dataclass(frozen=True)
class Load:
    tenant: str
    lines: int
    prompt: int = 100
    weight: float = 1.0
    at: float = 0.0


@dataclass
class Outcome:
    """`served[tenant]`: (time, tokens so far) of each answer; tokens as the queue counts them."""

    served: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))

    def finish(self, tenant: str) -> float:
        return self.served[tenant][-1][0]

    def share(self, tenant: str, until: float) -> float:
        """Of all tokens handed out before `until`."""
        sums = {
            name: max((tokens for time, tokens in series if time <= until), default=0.0)
            for name, series in self.served.items()
        }
        return sums[tenant] / sum(sums.values())


def requests(load: Load) -> list[GenerateRequest]:
    prompt = tuple(range(load.prompt))
    return [
        GenerateRequest(
            request_id=RequestId(f"{load.tenant}-{number:06d}"),
            attempt=1,
            epoch="e",
            tenant=TenantId(load.tenant),
            model="m",
            prompt_ids=prompt,
            sampling=SamplingParams(max_tokens=OUTPUT),
            request_class="batch",
            weight=load.weight,
        )
        for number in range(load.lines)
    ]


async def simulate(loads: Sequence[Load], until: float = float("inf")) -> Outcome:
    """A request takes as much time as it has tokens, whoever runs beside it."""
    queue = MemoryQueue(MemoryServer(), "m", QueueSettings(stream_limit=10**9, lease_seconds=10**6))
    outcome, coming = Outcome(), sorted(loads, key=lambda load: load.at)
    running: list[tuple[float, str, Lease]] = []
    now = 0.0
    while now < until:
        while coming and coming[0].at <= now:
            await queue.enqueue(requests(coming.pop(0)))
        room = Capacity(10**9, 0, SLOTS - len(running), running=len(running))
        for lease in await queue.claim("w", room):
            end = now + len(lease.request.prompt_ids) / 10 + OUTPUT
            heapq.heappush(running, (end, lease.request.request_id, lease))
        if not running:
            break
        now, _, lease = heapq.heappop(running)
        await answer(queue, lease)
        record(outcome, lease.request, now)
    return outcome


async def answer(queue: MemoryQueue, lease: Lease) -> None:
    request = lease.request
    usage = TokenUsage(len(request.prompt_ids), 0, OUTPUT)
    event = Finished(request.request_id, request.attempt, (), usage, "w")
    assert await queue.finish(lease, event)
    await queue.forget([request.request_id])


def record(outcome: Outcome, request: GenerateRequest, now: float) -> None:
    series = outcome.served[request.tenant]
    before = series[-1][1] if series else 0.0
    series.append((now, before + len(request.prompt_ids) + PRICE * OUTPUT))


async def late_small(lines: int) -> tuple[Outcome, float, float]:
    """A submits `lines`; B submits 10 a little later. Also B's time here, and alone."""
    began = 2_000.0
    both = await simulate([Load("A", lines), Load("B", 10, at=began)])
    alone = await simulate([Load("B", 10)])
    return both, both.finish("B") - began, alone.finish("B")


async def measure(lines: int) -> dict[str, tuple[Outcome, str]]:
    both, beside, alone = await late_small(lines)
    weights = await simulate([Load("A", 4_000), Load("B", 4_000, weight=3)], until=8_000)
    long = await simulate([Load("A", 4_000), Load("B", 4_000, prompt=1_000)], until=8_000)
    return {
        f"A {lines:,} lines, then B 10": (
            both,
            f"B takes {beside:.0f}, alone {alone:.0f}; A ends at {both.finish('A'):,.0f}",
        ),
        "weights 1 : 3": (weights, f"B has {weights.share('B', 8_000):.1%} of the tokens"),
        "B's prompts 10 times as long": (long, f"B has {long.share('B', 8_000):.1%} of the tokens"),
    }


def plot(results: dict[str, tuple[Outcome, str]], until: float = 8_000) -> str:
    """Tokens served to each tenant over time, a panel for each case."""
    width, height, gap = 300, 200, 40
    parts = []
    for number, (title, (outcome, said)) in enumerate(results.items()):
        left = 20 + number * (width + gap)
        parts.append(f'<text x="{left}" y="20" font-weight="bold">{title}</text>')
        parts.append(f'<text x="{left}" y="36">{said}</text>')
        parts.append(
            f'<rect x="{left}" y="50" width="{width}" height="{height}" fill="none" stroke="#999"/>'
        )
        parts += curves(outcome, until, left, width, height)
        parts.append(f'<text x="{left}" y="{height + 66}">time, 0 to {until:,.0f} tokens</text>')
    whole = 20 + len(results) * (width + gap)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{whole}" height="{height + 80}" '
        'font-family="sans-serif" font-size="11">'
        '<rect width="100%" height="100%" fill="white"/>' + "".join(parts) + "</svg>\n"
    )


def curves(outcome: Outcome, until: float, left: int, width: int, height: int) -> list[str]:
    shown = {
        name: [point for point in series if point[0] <= until]
        for name, series in sorted(outcome.served.items())
    }
    most = max(points[-1][1] for points in shown.values() if points)
    parts = []
    for (name, points), colour in zip(shown.items(), ("#1f77b4", "#d62728"), strict=True):
        thinned = [*points[:: max(1, len(points) // 150)], points[-1]]
        places = [
            (left + width * time / until, 50 + height * (1 - tokens / most))
            for time, tokens in thinned
        ]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        x, y = min(places[-1][0] + 3, left + width - 12), max(60.0, places[-1][1] - 5)
        parts.append(f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}">{name}</text>')
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--lines", type=int, default=50_000)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    results = asyncio.run(measure(options.lines))
    for title, (_, said) in results.items():
        print(f"{title}: {said}")
    if options.plot:
        options.plot.write_text(plot(results), encoding="utf-8")


if __name__ == "__main__":
    main()
