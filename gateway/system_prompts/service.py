"""System prompts: beginnings of prompts that the operator lets tenants share.

prepare → its token ids in SQL → every gateway process counts what of a prompt they cover
                                └→ the collector tells the workers, which keep their KV
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from gateway.adapters.repository import BaseModelRepository
from gateway.adapters.service import prompts_of
from gateway.errors import BadRequest, NotFound
from gateway.kit.clock import now_ms
from gateway.kit.context import Context
from gateway.kit.database import WriteSession
from gateway.kit.ids import new_id
from gateway.kit.prompts import NoChatTemplate, Prompts
from gateway.kit.shared_prefixes import SharedPrefixTable, by_model, common
from gateway.kit.templates import TemplateRefused
from gateway.models import AdapterRevision, BaseModel, SystemPrompt
from gateway.system_prompts.repository import SystemPromptRepository
from gateway.system_prompts.schemas import CreateSystemPrompt

REFRESH_SECONDS = 2.0
"""How long a process may go on with what it read last."""


async def prepare(context: Context, wanted: CreateSystemPrompt) -> SystemPrompt:
    """A row to add. Raises BadRequest, NotFound (base model, adapter), Unavailable."""
    base, adapter = await _served(context, wanted)
    prompts = await prompts_of(context, base, adapter.prompt_format if adapter else None)
    ids = await asyncio.to_thread(_token_ids, prompts, wanted)
    if not 0 < len(ids) < base.context_tokens:
        raise BadRequest(
            f"It has {len(ids)} tokens that prompts can share; the model's context is "
            f"{base.context_tokens}.",
            code="invalid_value",
            param="text" if wanted.text is not None else "messages",
        )
    return SystemPrompt(
        id=new_id("sysprompt"),
        base_model=base.name,
        adapter_digest=wanted.adapter_digest,
        text=wanted.text,
        messages=None if wanted.messages is None else [m.model_dump() for m in wanted.messages],
        token_ids=list(ids),
        created_at=now_ms(),
    )


async def delete(session: WriteSession, prompt_id: str) -> SystemPrompt:
    """Prompts share it no more, and workers may give its KV up. Raises NotFound."""
    prompt = await SystemPromptRepository(session).get(prompt_id, lock=True)
    if prompt is None:
        raise not_found(prompt_id)
    prompt.deleted_at = now_ms()
    return prompt


def not_found(prompt_id: str) -> NotFound:
    return NotFound(f"No such system prompt: '{prompt_id}'.", param="id")


async def shared_prefixes(context: Context) -> SharedPrefixTable:
    """As registered, give or take REFRESH_SECONDS."""
    table = context.shared_prefixes
    if time.monotonic() - table.read_at < REFRESH_SECONDS:
        return table
    async with context.database.read() as session:
        repository = SystemPromptRepository(session)
        version = await repository.version()
        if version != table.version:
            table.replace(by_model(await repository.prefixes()))
    table.version, table.read_at = version, time.monotonic()
    return table


async def publish(context: Context, model: str) -> bool:
    """Tells the workers of a model. Raises QueueUnavailable."""
    table = await shared_prefixes(context)
    return await context.queues.prefixes(model).publish(table.of(model))


async def _served(
    context: Context, wanted: CreateSystemPrompt
) -> tuple[BaseModel, AdapterRevision | None]:
    async with context.database.read() as session:
        base = await BaseModelRepository(session).get(wanted.model)
        if base is None:
            raise NotFound(f"No such base model: '{wanted.model}'.", param="model")
        if wanted.adapter_digest is None:
            return base, None
        adapter = await SystemPromptRepository(session).adapter(wanted.adapter_digest, base.name)
    if adapter is None:
        raise NotFound("No ready adapter has that content.", param="adapter_digest")
    return base, adapter


def _token_ids(prompts: Prompts, wanted: CreateSystemPrompt) -> tuple[int, ...]:
    """What every prompt that begins so begins with. Raises BadRequest."""
    if wanted.text is not None:
        return prompts.encode(wanted.text)
    messages = [each.for_template() for each in wanted.messages or []]
    try:
        return conversation_start(prompts, messages)
    except NoChatTemplate:
        message = "This model has no chat template: give a text."
        raise BadRequest(message, param="messages") from None
    except TemplateRefused as error:
        raise BadRequest(
            f"The model's chat template refuses them: {error}", param="messages"
        ) from error


def conversation_start(prompts: Prompts, messages: Sequence[dict[str, str]]) -> tuple[int, ...]:
    """A template writes more than the messages, and may depend on what follows: the start is what
    two conversations share that go on differently."""
    role = "assistant" if messages[-1]["role"] == "user" else "user"
    one, other = (
        prompts.encode_chat([*messages, {"role": role, "content": words}]) for words in ("a", "Z")
    )
    return one[: common(one, other)]
