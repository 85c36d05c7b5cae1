from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends

from gateway.auth.dependencies import AdminPrincipal
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


@router.post("", status_code=201)
async def create_system_prompt(
    wanted: CreateSystemPrompt, context: AppContext, operator: AdminPrincipal
) -> SystemPromptObject:
    """Share the KV of prompts that begin so among all tenants."""
    return show_system_prompt(await service.register(context, wanted))


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
