"""What answered requests add to the deployment's statistics: a pure function of them."""

from __future__ import annotations

from collections.abc import Iterable

from gateway.jobs.locking import Standing
from gateway.kit.statistics import Counts, count_phase, count_tokens
from worker.protocol.messages import Finished


def counts_of(answers: Iterable[tuple[Standing, Finished]], now_ms: int) -> Counts:
    """`queue` is all time that no worker computed for the request. Workers of an older release
    tell no times: then the whole is known, and not its parts."""
    counts = Counts()
    for row, finished in answers:
        of = row.request_class
        whole = max(0, now_ms - row.created_at) / 1000
        count_phase(counts, of, "e2e", whole)
        if times := finished.times:
            count_phase(counts, of, "prefill", times.prefill)
            count_phase(counts, of, "decode", times.decode)
            count_phase(counts, of, "queue", max(0.0, whole - times.prefill - times.decode))
        count_tokens(counts, of, "prompt", finished.usage.prompt)
        count_tokens(counts, of, "cached", finished.usage.cached)
        count_tokens(counts, of, "completion", finished.usage.completion)
    return counts
