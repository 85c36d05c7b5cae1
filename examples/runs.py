"""Batches of held-out lines: submit, follow with live progress, collect the answers."""

import io
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import httpx
from customers import Customer, bearer
from openai import OpenAI
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from stack import Stack
from tasks import HELD_OUT_SEED, Example

ENDED = {"completed", "failed", "expired", "cancelled"}
POLL_SECONDS = 0.5


class BatchError(Exception):
    """A batch did not complete."""


@dataclass
class Run:
    """One batch of a customer's held-out lines on one model, and what came of it."""

    customer: Customer
    model: str
    client: OpenAI
    examples: list[Example]
    batch: Any
    texts: list[str] | None = None

    @property
    def is_base(self) -> bool:
        return self.model != self.customer.adapter

    @property
    def correct(self) -> int:
        pairs = zip(self.texts or [], self.examples, strict=True)
        return sum(self.customer.task.score(text, example.answer) for text, example in pairs)


def submit_all(stack: Stack, customers: list[Customer], base: str, lines: int) -> list[Run]:
    runs = []
    for customer in customers:
        client = OpenAI(base_url=f"{stack.url}/v1", api_key=customer.key)
        examples = customer.task.generate(lines, HELD_OUT_SEED, heldout=True)
        runs += [submit(customer, client, m, examples) for m in (customer.adapter, base)]
    return runs


def submit(customer: Customer, client: OpenAI, model: str, examples: list[Example]) -> Run:
    lines = "".join(
        json.dumps(request_line(number, customer, model, example)) + "\n"
        for number, example in enumerate(examples)
    )
    name = f"{customer.adapter}-{model}.jsonl"
    uploaded = client.files.create(file=(name, io.BytesIO(lines.encode())), purpose="batch")
    batch = client.batches.create(
        input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    return Run(customer, model, client, examples, batch)


def request_line(number: int, customer: Customer, model: str, example: Example) -> dict[str, Any]:
    return {
        "custom_id": str(number),
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "model": model,
            "messages": customer.task.messages(example.user),
            "max_tokens": customer.task.MAX_TOKENS,
            "temperature": 0,
        },
    }


def follow(runs: list[Run], console: Console) -> None:
    """Poll until every batch has ended, with a bar for each."""
    columns = (
        TextColumn("{task.description:<34}"),
        BarColumn(24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bars = [
            progress.add_task(
                f"{run.customer.tenant} on {run.model}", total=len(run.examples), status=""
            )
            for run in runs
        ]
        while any(run.batch.status not in ENDED for run in runs):
            time.sleep(POLL_SECONDS)
            for run, bar in zip(runs, bars, strict=True):
                if run.batch.status not in ENDED:
                    run.batch = run.client.batches.retrieve(run.batch.id)
                counts = run.batch.request_counts
                done = counts.completed + counts.failed
                progress.update(bar, completed=done, status=run.batch.status)
                if run.batch.status in ENDED:
                    progress.stop_task(bar)


def collect(runs: Iterable[Run]) -> None:
    for run in runs:
        if run.batch.status != "completed" or run.batch.output_file_id is None:
            errors = run.batch.errors and run.batch.errors.data
            raise BatchError(f"batch {run.batch.id} ended {run.batch.status}: {errors}")
        content = run.client.files.content(run.batch.output_file_id).text
        answers = {line["custom_id"]: line for line in map(json.loads, content.splitlines())}
        run.texts = [
            answers[str(number)]["response"]["body"]["choices"][0]["message"]["content"]
            for number in range(len(run.examples))
        ]


def bill(stack: Stack, run: Run) -> dict[str, Any]:
    """What this run's tenant pays for its model, counted from this batch on."""
    response = httpx.get(
        f"{stack.url}/v1/usage",
        params={"group_by": "model", "from": run.batch.created_at},
        headers=bearer(run.customer.key),
    )
    rows = [row for row in response.raise_for_status().json()["data"] if row["group"] == run.model]
    if len(rows) != 1:
        raise BatchError(f"the usage of {run.customer.tenant} on {run.model} has {len(rows)} rows")
    row: dict[str, Any] = rows[0]
    return row
