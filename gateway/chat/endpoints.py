from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Body, Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect

from gateway.auth.dependencies import CurrentPrincipal
from gateway.auth.principal import Principal
from gateway.chat import service
from gateway.chat.responses import EventStream, disconnected
from gateway.chat.streaming import (
    AnsweredWithError,
    StreamOptions,
    server_sent_events,
    stream_options,
)
from gateway.jobs.generation import CHAT, COMPLETIONS, Endpoint
from gateway.kit.context import Context
from gateway.kit.dependencies import AppContext

router = APIRouter(prefix="/v1", tags=["inference"])

JsonBody = Annotated[dict[str, Any], Body()]
T = TypeVar("T")

_SLOW_CLIENT_SECONDS = 60.0
_DOCUMENTED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer; with `stream` its chunks as server-sent events",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }
}


@router.post("/chat/completions", response_class=JSONResponse, responses=_DOCUMENTED)
async def create_chat_completion(
    request: Request, body: JsonBody, context: AppContext, principal: CurrentPrincipal
) -> Response:
    return await _answer(request, context, principal, CHAT, body)


@router.post("/completions", response_class=JSONResponse, responses=_DOCUMENTED)
async def create_completion(
    request: Request, body: JsonBody, context: AppContext, principal: CurrentPrincipal
) -> Response:
    return await _answer(request, context, principal, COMPLETIONS, body)


async def _answer(
    request: Request,
    context: Context,
    principal: Principal,
    endpoint: Endpoint,
    body: dict[str, Any],
) -> Response:
    options = stream_options(body)
    call = await service.begin(context, principal, endpoint, body)
    if options is not None:
        return await _streamed(request, context, principal, call, options)
    answer = service.finish(context, principal, call.row)
    result = await _while_connected(request, context, call, answer)
    return JSONResponse(result.body, result.status_code or 200)


async def _streamed(
    request: Request,
    context: Context,
    principal: Principal,
    call: service.Call,
    options: StreamOptions,
) -> Response:
    """What goes wrong before the first token is an HTTP error like any other."""
    pieces = server_sent_events(context, principal, call, options)

    async def first_piece() -> bytes:
        return await anext(pieces)

    try:
        first = await _while_connected(request, context, call, first_piece())
    except AnsweredWithError as error:
        return JSONResponse(error.body, error.status)
    longest = context.settings.sync_seconds + _SLOW_CLIENT_SECONDS
    return EventStream(first, pieces, lambda: service.abandon(context, call.row), longest)


async def _while_connected(
    request: Request, context: Context, call: service.Call, work: Coroutine[Any, Any, T]
) -> T:
    """Raises ClientDisconnect, after the request was ended, when the client goes first."""
    working = asyncio.create_task(work)
    gone = asyncio.create_task(disconnected(request.receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            await service.abandon(context, call.row)
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.wait({working, gone})
