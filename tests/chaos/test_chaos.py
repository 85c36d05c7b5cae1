"""Batches in a whole system whose parts are killed, frozen, cut off, emptied and set wrong at
random moments.

The engine is the null one: what is tested is that every line ends once and is billed once. A
failing round names its seed; `BATTEN_CHAOS_SEED=N BATTEN_CHAOS_ROUNDS=1 make chaos` repeats it
(harms and their moments; not how the processes interleave).
"""

from __future__ import annotations

import json
import os
import random
import secrets
import sys
import time
from collections import Counter
from typing import Any

import pytest
from openai import OpenAI

from tests.chaos.harms import KINDS, Exposed, plan
from tests.chaos.skew import PROCESSES
from tests.chaos.system import System, wait_for

LINES = 60
BAD_LINES = 4
ROUND_SECONDS = 240.0
AUDIT_EVERY = 10
TERMINAL = ("completed", "failed", "expired", "cancelled")

# Deaths, a cut wire and a stalled one, a database that is away, a wrong clock.
SHORT_SEEDS = (19, 34)


def lines(seed: int) -> bytes:
    """Lengths differ, so that answers come one after another; a few lines are bad."""
    chance = random.Random(seed)
    bad = set(chance.sample(range(LINES), BAD_LINES))
    texts = []
    for number in range(LINES):
        tokens = "many" if number in bad else chance.randint(5, 80)
        body = {"model": "tiny", "prompt": "w1 w2 w3", "max_tokens": tokens}
        request = {"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions"}
        texts.append(json.dumps({**request, "body": body}))
    return "\n".join(texts).encode()


def run_round(system: System, client: OpenAI, seed: int, first_answer: bool = False) -> None:
    exposed = Exposed()
    file = client.files.create(file=("in.jsonl", lines(seed)), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/completions",
        completion_window="24h",
        extra_body={"on_invalid": "skip"},
    )
    if first_answer:
        wait_for(lambda: client.batches.retrieve(batch.id).request_counts.completed, "an answer")
    for harm in plan(seed):
        time.sleep(harm.after)
        exposed.to(system, harm)
    deadline = time.monotonic() + ROUND_SECONDS
    while (now := client.batches.retrieve(batch.id)).status not in TERMINAL:
        assert time.monotonic() < deadline, ("stuck", now.status, states(system, batch.id))
        time.sleep(0.1)
    check(system, client, now, exposed)
    for process in PROCESSES:
        system.clocks.set(process, 0)


def states(system: System, batch_id: str) -> list[tuple[Any, ...]]:
    sql = "SELECT state, COUNT(*) FROM requests WHERE batch_id = ? GROUP BY state"
    return system.query(sql, batch_id)


def check(system: System, client: OpenAI, batch: Any, exposed: Exposed) -> None:
    assert batch.status == "completed"
    answers = read(client, batch.output_file_id)
    errors = read(client, batch.error_file_id)
    assert len(answers) == LINES - BAD_LINES == batch.request_counts.completed, errors
    assert len(errors) == BAD_LINES == batch.request_counts.failed
    ids = Counter(each["custom_id"] for each in [*answers, *errors])
    assert ids == Counter(f"c{number}" for number in range(LINES))
    assert [each["response"]["status_code"] for each in answers] == [200] * len(answers)
    usages = [each["response"]["body"]["usage"] for each in answers]
    billed = system.query(
        "SELECT COUNT(*), COUNT(DISTINCT request_id), SUM(prompt_tokens), SUM(completion_tokens) "
        "FROM usage_records WHERE batch_id = ?",
        batch.id,
    )
    tokens = [
        sum(usage[name] for usage in usages) for name in ("prompt_tokens", "completion_tokens")
    ]
    assert billed == [(len(answers), len(answers), *tokens)]
    assert not run_again(system, batch.id, exposed), "run again though not in flight at a harm"
    assert not system.out(), "still out after the end"
    assert system.query("SELECT enqueued_tokens FROM batches WHERE id = ?", batch.id) == [(0,)]


def run_again(system: System, batch_id: str, exposed: Exposed) -> dict[str, int]:
    """Requests that ran more often than harms and lost leases (a busy machine's too) explain."""
    sql = "SELECT id, attempt - crashes FROM requests WHERE batch_id = ?"
    rows = system.query(sql, batch_id)
    return {each: runs for each, runs in rows if runs - 1 > exposed.times[each]}


def read(client: OpenAI, file_id: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def run_seed(system: System, client: OpenAI, seed: int, first_answer: bool = False) -> None:
    began = time.monotonic()
    try:
        run_round(system, client, seed, first_answer)
    except BaseException:
        sys.stderr.write(f"\nthe round of seed {seed} failed: {plan(seed)}\n{system.logs()}\n")
        raise
    harms = ", ".join(f"{harm.kind} {harm.process}".strip() for harm in plan(seed))
    sys.stdout.write(f"seed {seed}: {time.monotonic() - began:.1f} s ({harms})\n")
    sys.stdout.flush()


@pytest.mark.parametrize("seed", SHORT_SEEDS)
def test_every_line_ends_once(system: System, client: OpenAI, seed: int) -> None:
    run_seed(system, client, seed, first_answer=True)
    system.batten("audit")


def test_every_kind_of_harm_is_drawn() -> None:
    drawn = {(harm.kind, harm.process) for seed in range(50) for harm in plan(seed)}
    assert drawn == {(harm.kind, harm.process) for harm in KINDS}


@pytest.mark.full
@pytest.mark.parametrize("database", ["postgres", "sqlite"])
def test_every_line_ends_once_in_many_rounds(
    tmp_path_factory: pytest.TempPathFactory, database: str
) -> None:
    """Half of the rounds on each database."""
    rounds = -(-int(os.environ.get("BATTEN_CHAOS_ROUNDS", "200")) // 2)
    first = int(os.environ.get("BATTEN_CHAOS_SEED", secrets.randbelow(10**9)))
    system = System(tmp_path_factory.mktemp(database), database)
    try:
        with system.connect() as client:
            for number in range(rounds):
                run_seed(system, client, first + number)
                if number % AUDIT_EVERY == 0 or number == rounds - 1:
                    system.batten("audit")
    finally:
        system.close()
