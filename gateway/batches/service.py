"""Batches: create, cancel, look up."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import msgspec

from gateway.auth.principal import Principal
from gateway.auth.scope import TenantScope
from gateway.batches.freeze import Stopped, in_queue
from gateway.batches.repository import BatchRepository
from gateway.batches.schemas import CreateBatch, InlineRequest
from gateway.batches.state import check_transition, on_cancel
from gateway.errors import BadRequest, Conflict, NotFound
from gateway.files import service as files
from gateway.jobs.generation import ENDPOINTS
from gateway.jobs.parameters import missing
from gateway.jobs.service import stop_in_queue
from gateway.kit.clock import now_ms
from gateway.kit.context import Context
from gateway.kit.database import ReadSession, WriteSession
from gateway.kit.ids import new_id
from gateway.models import Batch, File

Session = ReadSession | WriteSession

LONGEST_WINDOW_MS = 7 * 24 * 3600 * 1000
_WINDOW = re.compile(r"([1-9][0-9]{0,5})([hm])", re.ASCII)
_UNIT_MS = {"h": 3_600_000, "m": 60_000}


def window_ms(window: str) -> int:
    """`24h`, `90m`, up to 7 days. Raises BadRequest."""
    match = _WINDOW.fullmatch(window)
    length = int(match[1]) * _UNIT_MS[match[2]] if match else 0
    if not 0 < length <= LONGEST_WINDOW_MS:
        raise BadRequest(
            f"Invalid value: '{window}'. Supported values are: '24h', and any number of hours "
            "('48h') or minutes ('90m') up to 7 days.",
            code="invalid_value",
            param="completion_window",
        )
    return length


def check_create(wanted: CreateBatch) -> None:
    """What is wrong with the call itself. Raises BadRequest."""
    if wanted.endpoint not in ENDPOINTS:
        supported = " and ".join(f"'{endpoint}'" for endpoint in ENDPOINTS)
        raise BadRequest(
            f"Invalid value: '{wanted.endpoint}'. Supported values are: {supported}.",
            code="invalid_value",
            param="endpoint",
        )
    window_ms(wanted.completion_window)
    if wanted.input_file_id is None and wanted.requests is None:
        raise missing("input_file_id")
    if wanted.input_file_id is not None and wanted.requests is not None:
        raise BadRequest(
            "Give either 'input_file_id' or 'requests', not both.",
            code="invalid_value",
            param="requests",
        )


async def inline_file(context: Context, scope: TenantScope, wanted: CreateBatch) -> File:
    """Inline requests as an input file like any other; the row is not added yet."""
    requests = wanted.requests or []
    return await files.create_output(
        context, scope, "inline.jsonl", "batch", inline_lines(requests, wanted.endpoint)
    )


async def input_file(session: Session, scope: TenantScope, file_id: str) -> File:
    """Raises BadRequest: unknown, another tenant's, or not for batches."""
    try:
        file = await files.get_file(session, scope, file_id)
    except NotFound:
        raise BadRequest(
            f"No such File object: {file_id}", code="invalid_request", param="input_file_id"
        ) from None
    if file.purpose != "batch":
        raise BadRequest(
            f"The file {file_id} has the purpose '{file.purpose}'; a batch needs 'batch'.",
            code="invalid_request",
            param="input_file_id",
        )
    return file


def new_batch(principal: Principal, wanted: CreateBatch, file: File) -> Batch:
    now = now_ms()
    expiry = wanted.output_expires_after
    counts = dict.fromkeys(
        (
            "validated_offset",
            "validated_lines",
            "total",
            "completed",
            "failed",
            "cancelled",
            "expired",
            "enqueued_tokens",
            "prompt_tokens",
            "cached_tokens",
            "completion_tokens",
        ),
        0,
    )
    return Batch(
        id=new_id("batch"),
        tenant_id=principal.tenant_id,
        key_id=principal.key_id,
        endpoint=wanted.endpoint,
        completion_window=wanted.completion_window,
        on_invalid=wanted.on_invalid,
        status="validating",
        input_file_id=file.id,
        output_expires_seconds=expiry.seconds if expiry else None,
        user_metadata=wanted.metadata,
        created_at=now,
        expires_at=now + window_ms(wanted.completion_window),
        **counts,
    )


async def get_batch(session: Session, scope: TenantScope, id: str) -> Batch:
    """Raises NotFound."""
    batch = await BatchRepository(session, scope).get(id)
    if batch is None:
        raise NotFound(f"No batch found with id '{id}'.", param="id")
    return batch


async def cancel_batch(context: Context, scope: TenantScope, id: str) -> tuple[Batch, bool]:
    """The batch, and whether this call began to cancel it. Raises NotFound, Conflict."""
    stopped = Stopped()
    async with context.database.write() as session:
        batch = await BatchRepository(session, scope).get(id, lock=True)
        if batch is None:
            raise NotFound(f"No batch found with id '{id}'.", param="id")
        decision = on_cancel(batch.status)
        if decision == "refuse":
            raise Conflict(f"Cannot cancel a batch with status '{batch.status}'.")
        if decision == "begin":
            check_transition(batch.status, "cancelling")
            batch.status, batch.cancelling_at = "cancelling", now_ms()
            stopped = await in_queue(session, batch)
    for model, ids in stopped.ids.items():
        await stop_in_queue(context, model, ids)
    return batch, decision == "begin"


async def inline_lines(requests: list[InlineRequest], endpoint: str) -> AsyncIterator[bytes]:
    for request in requests:
        line = {
            "custom_id": request.custom_id,
            "method": request.method,
            "url": request.url or endpoint,
            "body": request.body,
        }
        yield msgspec.json.encode(line) + b"\n"
