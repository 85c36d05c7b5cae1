from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse

from gateway.auth.dependencies import AdminPrincipal
from gateway.auth.idempotency import OperatorOnce
from gateway.kit.database import WriteSession
from gateway.kit.dependencies import AppContext
from gateway.kit.pagination import ListObject, PageRequest, list_object, paging
from gateway.system_prompts import service
from gateway.system_prompts.repository import SystemPromptRepository
from gateway.system_prompts.schemas import (
    CreateSystemPrompt,
    SystemPromptDeleted,
    SystemPromptObject,
    show_system_prompt,
)

router = APIRouter(prefix="/v1/admin/system_prompts", tags=["admin"])


@router.post("", status_code=201, response_model=SystemPromptObject)
async def create_system_prompt(
    wanted: CreateSystemPrompt, context: AppContext, once: OperatorOnce
) -> JSONResponse:
    """Share the KV of prompts that begin so among all tenants."""
    if (earlier := await once.earlier()) is not None:
        return earlier
    prompt = await service.prepare(context, wanted)

    async def create(session: WriteSession) -> dict[str, Any]:
        SystemPromptRepository(session).add(prompt)
        return show_system_prompt(prompt).model_dump()

    return await once.answer(create, 201)


@router.get("")
async def list_system_prompts(
    context: AppContext,
    operator: AdminPrincipal,
    page: Annotated[PageRequest, Depends(paging(20, 100))],
) -> ListObject[SystemPromptObject]:
    async with context.database.read() as session:
        return list_object(await SystemPromptRepository(session).page(page), show_system_prompt)


@router.get("/{prompt_id}")
async def get_system_prompt(
    prompt_id: str, context: AppContext, operator: AdminPrincipal
) -> SystemPromptObject:
    async with context.database.read() as session:
        prompt = await SystemPromptRepository(session).get(prompt_id)
    if prompt is None:
        raise service.not_found(prompt_id)
    return show_system_prompt(prompt)


@router.delete("/{prompt_id}")
async def delete_system_prompt(
    prompt_id: str, context: AppContext, operator: AdminPrincipal
) -> SystemPromptDeleted:
    """It is shared no more after some seconds."""
    async with context.database.write() as session:
        prompt = await service.delete(session, prompt_id)
    return SystemPromptDeleted(id=prompt.id)
