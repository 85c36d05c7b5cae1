"""An answer while it is made: the token stream for speed, SQL for the truth.

token stream ──Delta──▶ chunks ──▶ client
             ──Finished──▶ the rest, usage, [DONE]
SQL, when the stream says nothing of the end (failed, cancelled, Redis lost it): the same,
from the recorded body
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog

from gateway.chat import service
from gateway.chat.chunks import Chunks, JsonBody, StreamMismatch
from gateway.errors import ApiError, BadRequest
from gateway.jobs.parameters import boolean, wrong_type
from gateway.jobs.responses import answered, error_body, response_body
from gateway.kit.context import Context
from gateway.models import Request, Result
from worker.protocol.messages import Delta, Finished
from worker.protocol.types import RequestId
from worker.queue.base import QueueUnavailable, StreamEntry

DONE = b"data: [DONE]\n\n"
_READ_SECONDS = 5.0
_QUEUE_AWAY_SECONDS = 1.0

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class StreamOptions:
    include_usage: bool = False


class AnsweredWithError(Exception):
    """The request ended with an error: its HTTP status and body."""

    def __init__(self, status: int, body: JsonBody) -> None:
        super().__init__(f"answered with {status}")
        self.status = status
        self.body = body


def stream_options(body: Mapping[str, Any]) -> StreamOptions | None:
    """None when the answer is wanted whole. Raises BadRequest."""
    options = body.get("stream_options")
    if not boolean(body, "stream"):
        if options is not None:
            raise BadRequest(
                "The 'stream_options' parameter is only allowed when 'stream' is enabled.",
                code="invalid_value",
                param="stream_options",
            )
        return None
    if options is not None and not isinstance(options, dict):
        raise wrong_type("stream_options", "an object")
    wanted = (options or {}).get("include_usage")
    if wanted is not None and not isinstance(wanted, bool):
        raise wrong_type("stream_options.include_usage", "a boolean")
    return StreamOptions(bool(wanted))


async def server_sent_events(
    context: Context, call: service.Call, options: StreamOptions
) -> AsyncGenerator[bytes]:
    """The response's body. Before the first piece errors are raised: AnsweredWithError,
    Unavailable. Later ones are the last event, without `[DONE]`."""
    begun = False
    try:
        async with aclosing(_chunks(context, call, options)) as pieces:
            async for chunks in pieces:
                yield b"".join(map(_event, chunks))
                begun = True
    except (AnsweredWithError, ApiError) as error:
        if not begun:
            raise
        yield _event(error.body() if isinstance(error, ApiError) else error.body)
        return
    except StreamMismatch:
        _log.error("stream_mismatch", request=call.row.id)
        await service.abandon(context, call)
        message = "The request was executed again and the answer differs from what was sent."
        yield _event(error_body(500, "stream_mismatch", message))
        return
    yield DONE


async def _chunks(
    context: Context, call: service.Call, options: StreamOptions
) -> AsyncGenerator[Sequence[JsonBody]]:
    """Never empty ones. Raises AnsweredWithError, Unavailable, StreamMismatch."""
    row, prompts = call.row, call.prompts
    chunks = Chunks(answered(row), prompts, usage=options.include_usage)
    ended = asyncio.create_task(service.finish(context, call))
    try:
        async with aclosing(_entries(context, row, ended)) as read:
            async for entries in read:
                new, last = _told(chunks, entries)
                if last is not None:
                    new += chunks.finish(response_body(answered(row), last, prompts))
                if new:
                    yield new
                if last is not None:
                    return
        yield chunks.finish(_recorded(ended.result()))
    finally:
        ended.cancel()
        await asyncio.wait({ended})


async def _entries(
    context: Context, row: Request, ended: asyncio.Task[Result]
) -> AsyncGenerator[Sequence[StreamEntry]]:
    """What the token stream says, until SQL says that the request has ended."""
    tokens = context.queues.tokens(row.base_model)
    with tokens.follow(RequestId(row.id)) as reader:
        while not ended.done():
            reading = asyncio.create_task(reader.read(_READ_SECONDS))
            try:
                await asyncio.wait({ended, reading}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                reading.cancel()
                await asyncio.wait({reading})
            if reading.cancelled():
                return
            try:
                entries = reading.result()
            except QueueUnavailable as error:
                _log.warning("token_stream_unavailable", request=row.id, error=str(error))
                await asyncio.wait({ended}, timeout=_QUEUE_AWAY_SECONDS)
                continue
            if entries:
                yield entries


def _told(chunks: Chunks, entries: Sequence[StreamEntry]) -> tuple[list[JsonBody], Finished | None]:
    """New chunks, and the event that ends the answer. What fails or is cancelled ends in SQL."""
    new: list[JsonBody] = []
    for entry in entries:
        if isinstance(entry.event, Delta):
            new += chunks.delta(entry.event)
        elif isinstance(entry.event, Finished):
            return new, entry.event
    return new, None


def _recorded(result: Result) -> JsonBody:
    """Raises AnsweredWithError."""
    status = result.status_code or 500
    if status != 200:
        raise AnsweredWithError(status, result.body or {})
    return result.body or {}


def _event(body: JsonBody) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
