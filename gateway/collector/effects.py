"""What many events do to the rows they are about: decided here, written by the fold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gateway.collector.decisions import Answer, Begin, End, Requeue, decide
from gateway.collector.suspects import halved
from gateway.jobs.locking import Standing
from gateway.jobs.settlement import Settlement
from gateway.kit.clock import now_ms
from worker.protocol.messages import Finished, GenerationEvent, LeaseLost


@dataclass(slots=True)
class Effects:
    """Rows that end, and rows that change otherwise; `freed`: room came free in the queue."""

    settlements: dict[str, Settlement] = field(default_factory=dict)
    moved: dict[str, Standing] = field(default_factory=dict)
    freed: bool = False


def effects_of(
    rows: Mapping[str, Standing],
    events: Sequence[GenerationEvent],
    max_attempts: int,
    answer: Callable[[Standing, Finished], Settlement],
) -> Effects:
    """Changes `rows`, except those that end: that is for `settle` to decide."""
    effects = Effects()
    lost: defaultdict[str, list[Standing]] = defaultdict(list)
    for event in events:
        row = rows.get(event.request_id)
        if row is None or row.id in effects.settlements:
            continue
        match decide(row, event, max_attempts):
            case Begin():
                row.state, row.started_at = "running", now_ms()
                effects.moved[row.id] = row
            case Answer(finished):
                effects.settlements[row.id] = answer(row, finished)
            case Requeue(failed, crashed, alone):
                row.state = "queued"
                row.failures += int(failed)
                row.crashes += int(crashed)
                row.crashes_alone += int(alone)
                effects.moved[row.id] = row
                effects.freed = True
                if isinstance(event, LeaseLost):
                    lost[event.worker].append(row)
            case End(settlement):
                effects.settlements[row.id] = settlement
            case _:
                pass
    for together in lost.values():
        groups = halved([row.id for row in together])
        for row in together:
            row.suspects = groups[row.id]
    effects.freed = effects.freed or bool(effects.settlements)
    return effects
