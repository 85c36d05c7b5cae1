from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Body, Depends, Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect

from gateway.auth.dependencies import CurrentPrincipal
from gateway.auth.idempotency import REPLAYED, CurrentIdempotency, body_fingerprint
from gateway.chat import service
from gateway.chat.responses import EventStream, disconnected
from gateway.chat.schemas import documented
from gateway.chat.streaming import (
    AnsweredWithError,
    StreamOptions,
    server_sent_events,
    stream_options,
)
from gateway.jobs.generation import CHAT, COMPLETIONS, Endpoint
from gateway.kit.context import Context
from gateway.kit.dependencies import AppContext
from gateway.tenants.admission import CurrentAdmission

router = APIRouter(prefix="/v1", tags=["inference"])

JsonBody = Annotated[dict[str, Any], Body()]
T = TypeVar("T")

_SLOW_CLIENT_SECONDS = 60.0


async def current_caller(
    principal: CurrentPrincipal,
    idempotency: CurrentIdempotency,
    admission: CurrentAdmission,
    fingerprint: Annotated[str, Depends(body_fingerprint)],
) -> service.Caller:
    return service.Caller(principal, idempotency, fingerprint, admission)


CurrentCaller = Annotated[service.Caller, Depends(current_caller)]


@router.post("/chat/completions", response_class=JSONResponse, **documented(CHAT))
async def create_chat_completion(
    request: Request, body: JsonBody, context: AppContext, caller: CurrentCaller
) -> Response:
    return await _answer(request, context, caller, CHAT, body)


@router.post("/completions", response_class=JSONResponse, **documented(COMPLETIONS))
async def create_completion(
    request: Request, body: JsonBody, context: AppContext, caller: CurrentCaller
) -> Response:
    return await _answer(request, context, caller, COMPLETIONS, body)


async def _answer(
    request: Request,
    context: Context,
    caller: service.Caller,
    endpoint: Endpoint,
    body: dict[str, Any],
) -> Response:
    options = stream_options(body)
    call = await service.begin(context, caller, endpoint, body)
    headers = REPLAYED if call.replayed else {}
    if options is not None:
        return await _streamed(request, context, call, options, headers)
    result = await _while_connected(request, context, call, service.finish(context, call))
    return JSONResponse(result.body, result.status_code or 200, headers)


async def _streamed(
    request: Request,
    context: Context,
    call: service.Call,
    options: StreamOptions,
    headers: dict[str, str],
) -> Response:
    """What goes wrong before the first token is an HTTP error like any other."""
    pieces = server_sent_events(context, call, options)

    async def first_piece() -> bytes:
        return await anext(pieces)

    try:
        first = await _while_connected(request, context, call, first_piece())
    except AnsweredWithError as error:
        return JSONResponse(error.body, error.status, headers)
    longest = context.settings.sync_seconds + _SLOW_CLIENT_SECONDS
    return EventStream(first, pieces, lambda: service.abandon(context, call), longest, headers)


async def _while_connected(
    request: Request, context: Context, call: service.Call, work: Coroutine[Any, Any, T]
) -> T:
    """Raises ClientDisconnect, after the request was ended, when the client goes first."""
    working = asyncio.create_task(work)
    gone = asyncio.create_task(disconnected(request.receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            await service.abandon(context, call)
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.wait({working, gone})
