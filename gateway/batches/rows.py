"""Rows of a batch's lines."""

from __future__ import annotations

from typing import Any

from gateway.batches.lines import RawLine
from gateway.jobs.ordering import sort_key
from gateway.jobs.submission import Plan, pinned
from gateway.kit.clock import now_ms
from gateway.kit.ids import new_id
from gateway.models import Batch


def held_row(batch: Batch, line: RawLine, custom_id: str, plan: Plan) -> dict[str, Any]:
    """Waits until the whole file is found good."""
    prefix = plan.generation.prefix
    return {
        **_row(batch, line, custom_id),
        **pinned(plan, "batch"),
        "state": "held",
        "sort_key": sort_key(batch.expires_at, plan.target.revision_id, prefix, line.number),
        "finished_at": None,
    }


def refused_row(
    batch: Batch, line: RawLine, custom_id: str | None, named: dict[str, Any]
) -> dict[str, Any]:
    return {
        **_row(batch, line, custom_id),
        **named,
        "model": "",
        "adapter_revision_id": None,
        "seed": 0,
        "prompt_tokens": 0,
        "max_tokens": 0,
        "reserved_nano": 0,
        "state": "failed",
        "sort_key": "",
        "finished_at": now_ms(),
    }


def _row(batch: Batch, line: RawLine, custom_id: str | None) -> dict[str, Any]:
    return {
        "id": new_id("batch_req"),
        "tenant_id": batch.tenant_id,
        "key_id": batch.key_id,
        "kind": "line",
        "batch_id": batch.id,
        "line_no": line.number,
        "custom_id": custom_id,
        "endpoint": batch.endpoint,
        "request_class": "batch",
        "attempt": 0,
        "failures": 0,
        "crashes": 0,
        "crashes_alone": 0,
        "input_offset": line.offset,
        "input_length": line.length,
        "created_at": now_ms(),
        "deadline_at": batch.expires_at,
    }
