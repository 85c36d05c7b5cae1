from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from gateway.auth.dependencies import CurrentPrincipal
from gateway.auth.principal import Principal
from gateway.chat import service
from gateway.jobs.generation import CHAT, COMPLETIONS, Endpoint
from gateway.kit.context import Context
from gateway.kit.dependencies import AppContext

router = APIRouter(prefix="/v1", tags=["inference"])

JsonBody = Annotated[dict[str, Any], Body()]


@router.post("/chat/completions", response_class=JSONResponse)
async def create_chat_completion(
    request: Request, body: JsonBody, context: AppContext, principal: CurrentPrincipal
) -> JSONResponse:
    return await _answer(request, context, principal, CHAT, body)


@router.post("/completions", response_class=JSONResponse)
async def create_completion(
    request: Request, body: JsonBody, context: AppContext, principal: CurrentPrincipal
) -> JSONResponse:
    return await _answer(request, context, principal, COMPLETIONS, body)


async def _answer(
    request: Request,
    context: Context,
    principal: Principal,
    endpoint: Endpoint,
    body: dict[str, Any],
) -> JSONResponse:
    row = await service.begin(context, principal, endpoint, body)
    answer = asyncio.create_task(service.finish(context, principal, row))
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            await service.abandon(context, row)
            raise ClientDisconnect
        result = answer.result()
    finally:
        for task in (answer, gone):
            task.cancel()
        await asyncio.wait({answer, gone})
    return JSONResponse(result.body, result.status_code or 200)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue
