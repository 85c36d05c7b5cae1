"""A batch from a client's view: submitted, watched, fetched."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gateway.cli.client import Client
from gateway.cli.errors import CommandError

ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
POLL_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0)


def submit(client: Client, path: Path, window: str) -> str:
    """Upload and create. Raises CommandError, ServerRefused."""
    endpoint = endpoint_of(path)
    file = client.upload(path, "batch")
    batch = client.post(
        "/batches",
        {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": window},
    )
    return str(batch["id"])


def endpoint_of(path: Path) -> str:
    """What the first line asks for: a batch has one endpoint."""
    with path.open("rb") as file:
        lines = (line.removeprefix(b"\xef\xbb\xbf").strip() for line in file)
        first = next((line for line in lines if line), b"")
    try:
        url = json.loads(first)["url"]
    except (ValueError, KeyError, TypeError) as error:
        raise CommandError(f"{path}: the first line is no batch request with a url") from error
    return str(url)


def follow(client: Client, batch_id: str, output: Path) -> None:
    """Progress until the end, then the files. Raises CommandError unless all went well."""
    batch = watch(client, batch_id)
    for name, target in (("output", output), ("error", _errors_path(output))):
        if file_id := batch.get(f"{name}_file_id"):
            _fetch(client, str(file_id), target)
            click.echo(f"{name} file: {target}", err=True)
    counts = batch["request_counts"]
    if batch["status"] != "completed":
        raise CommandError(f"{batch_id} is {batch['status']}{_reasons(batch)}")
    if counts["failed"]:
        raise CommandError(f"{counts['failed']} of {counts['total']} requests failed")


def watch(client: Client, batch_id: str) -> dict[str, Any]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("validating", total=None)
        for pause in _pauses():
            batch = client.get(f"/batches/{batch_id}")
            counts = batch["request_counts"]
            progress.update(
                task,
                description=batch["status"],
                total=counts["total"] or None,
                completed=counts["completed"] + counts["failed"],
            )
            if batch["status"] in ENDED:
                return batch
            time.sleep(pause)
    raise AssertionError("pauses never end")


def _pauses() -> Iterator[float]:
    return itertools.chain(POLL_SECONDS, itertools.repeat(POLL_SECONDS[-1]))


def _fetch(client: Client, file_id: str, target: Path) -> None:
    """Appears under its name only once it is whole."""
    partial = target.with_name(f"{target.name}.part")
    with partial.open("wb") as file:
        client.download(f"/files/{file_id}/content", file)
    partial.replace(target)


def _errors_path(output: Path) -> Path:
    return output.with_name(f"{output.name.removesuffix('.jsonl')}.errors.jsonl")


def _reasons(batch: dict[str, Any]) -> str:
    """The first validation errors, with their lines."""
    errors = (batch.get("errors") or {}).get("data", [])
    shown = [
        f"line {error['line']}: {error['message']}" if error.get("line") else error["message"]
        for error in errors[:3]
    ]
    more = f" (and {len(errors) - 3} more)" if len(errors) > 3 else ""
    return f": {'; '.join(shown)}{more}" if shown else ""
