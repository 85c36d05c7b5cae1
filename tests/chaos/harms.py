"""What may happen to a system, drawn by a seed."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field

from tests.chaos.skew import PROCESSES
from tests.chaos.system import LEASE_SECONDS, System

A_ROUND = 3
LONGER_THAN_A_LEASE = LEASE_SECONDS + 1.0
WRONG_BY = (-40, -15, 15, 40)


@dataclass(frozen=True)
class Harm:
    """`after` the one before, in seconds; `seconds` is how long it lasts, or how wrong a clock
    is then."""

    kind: str
    process: str = ""
    seconds: float = 0.0
    after: float = 0.0


KINDS = (
    *(Harm("kill", process) for process in PROCESSES),
    Harm("freeze", "-m worker", LONGER_THAN_A_LEASE),
    Harm("freeze", "gateway collector", LONGER_THAN_A_LEASE),
    Harm("flush"),
    Harm("restart"),
    Harm("cut", seconds=2.0),
    Harm("stall", seconds=2.0),
    Harm("stall", seconds=LONGER_THAN_A_LEASE + 1.0),
    Harm("database", "crash", 1.0),
    Harm("database", "disconnect", 1.0),
    *(Harm("skew", process) for process in PROCESSES),
)


def plan(seed: int) -> list[Harm]:
    chance = random.Random(seed)
    return [
        Harm(
            each.kind,
            each.process,
            chance.choice(WRONG_BY) if each.kind == "skew" else each.seconds,
            round(chance.uniform(0, 1.5), 2),
        )
        for each in chance.sample(KINDS, A_ROUND)
    ]


@dataclass
class Exposed:
    """How many harms each request was out in: so often it may have been sent round again."""

    times: Counter[str] = field(default_factory=Counter)

    def to(self, system: System, harm: Harm) -> None:
        before = system.out()
        apply(system, harm)
        self.times.update(before | system.out())


def apply(system: System, harm: Harm) -> None:
    match harm.kind:
        case "kill":
            system.child(harm.process).kill()
        case "freeze":
            process = system.child(harm.process)
            process.send_signal(signal.SIGSTOP)
            time.sleep(harm.seconds)
            process.send_signal(signal.SIGCONT)
        case "flush":
            system.redis.flush()
        case "restart":
            system.redis.kill()
            system.redis.start()
        case "cut" | "stall":
            system.wire.cut() if harm.kind == "cut" else system.wire.stall()
            time.sleep(harm.seconds)
            system.wire.heal()
        case "database":
            system.database.harm(harm.process)
            time.sleep(harm.seconds)
            system.database.heal()
        case "skew" if system.clocks.can_be_wrong:
            system.clocks.set(harm.process, int(harm.seconds))
