"""From a body to a row: the model it names, what it costs, how long it is, whether it fits."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.adapters.service import ResolvedModel, prompts_of, resolve_model
from gateway.auth.scope import TenantScope
from gateway.billing.service import most_nano, price_for
from gateway.errors import BadRequest
from gateway.jobs.dispatch import Prepared
from gateway.jobs.generation import Generation, fit, parse_generation, text_length
from gateway.jobs.ordering import sort_key
from gateway.jobs.parameters import missing, wrong_type
from gateway.kit.clock import now_ms
from gateway.kit.context import Context
from gateway.kit.database import ReadSession, WriteSession
from gateway.kit.ids import new_id
from gateway.kit.prompts import Prompts, is_small
from gateway.models import Price, Request
from gateway.settings import Settings
from worker.protocol.types import RequestClass, WorkerLimits


@dataclass(frozen=True, slots=True)
class Target:
    """What a `model` means now: pinned in every row made from it."""

    name: str
    resolved: ResolvedModel
    price: Price

    @property
    def revision_id(self) -> str | None:
        return self.resolved.revision.id if self.resolved.revision else None

    @property
    def limits(self) -> WorkerLimits | None:
        announced = self.resolved.base.limits
        return None if announced is None else msgspec.convert(announced, WorkerLimits)

    async def prompts(self, context: Context) -> Prompts:
        """Raises Unavailable."""
        revision = self.resolved.revision
        own = revision.prompt_format if revision else None
        return await prompts_of(context, self.resolved.base, own)


@dataclass(frozen=True, slots=True)
class Plan:
    """A body that may run: `max_tokens` and the seed are decided."""

    target: Target
    endpoint: str
    generation: Generation
    max_tokens: int

    @property
    def seed(self) -> int:
        return self.generation.sampling.seed

    @property
    def most_tokens(self) -> int:
        """The prompt, and every choice as long as it may be."""
        answers = self.generation.sampling.n * self.max_tokens
        return len(self.generation.prompt_ids) + answers

    def prepared(self, request_id: str) -> Prepared:
        generation = self.generation
        return Prepared(request_id, generation.prompt_ids, generation.sampling, generation.stream)


@dataclass(frozen=True, slots=True)
class Submitter:
    tenant_id: str
    key_id: str


def model_name(body: Mapping[str, Any]) -> str:
    """Raises BadRequest."""
    name = body.get("model")
    if name is None:
        raise missing("model")
    if not isinstance(name, str):
        raise wrong_type("model", "a string")
    return name


async def resolve_target(
    session: ReadSession | WriteSession, scope: TenantScope, name: str
) -> Target:
    """Raises NotFound, BadRequest (no price, or an adapter larger than any worker's pool)."""
    resolved = await resolve_model(session, scope, name)
    target = Target(name, resolved, await price_for(session, resolved.price_names))
    rank = (resolved.revision.rank or 0) if resolved.revision else 0
    if target.limits is not None and rank > target.limits.adapter_rank:
        raise BadRequest(
            f"The adapter has rank {rank}; workers hold at most {target.limits.adapter_rank}.",
            code="capacity_exceeded",
            param="model",
        )
    return target


async def plan(context: Context, target: Target, endpoint: str, body: Mapping[str, Any]) -> Plan:
    """Long texts are tokenised in a thread. Raises BadRequest, Unavailable."""
    prompts = await target.prompts(context)
    if is_small(text_length(body)) and not prompts.is_isolated:
        return plan_with(prompts, context.settings, target, endpoint, body)
    return await asyncio.to_thread(plan_with, prompts, context.settings, target, endpoint, body)


def plan_with(
    prompts: Prompts, settings: Settings, target: Target, endpoint: str, body: Mapping[str, Any]
) -> Plan:
    """Raises BadRequest."""
    generation = parse_generation(endpoint, body, prompts, seed=None)
    context_tokens = target.resolved.base.context_tokens
    max_tokens = fit(generation, context_tokens, target.limits, settings.default_max_tokens)
    return Plan(target, endpoint, generation, max_tokens)


def new_request(
    by: Submitter,
    plan: Plan,
    kind: str,
    request_class: RequestClass,
    deadline_at: int,
    body: dict[str, Any] | None = None,
    metadata: dict[str, str] | None = None,
) -> Request:
    """A row to add: a job or a synchronous call, queued."""
    now = now_ms()
    return Request(
        id=new_id("job" if kind == "job" else "req"),
        tenant_id=by.tenant_id,
        key_id=by.key_id,
        kind=kind,
        endpoint=plan.endpoint,
        request_class=request_class,
        state="queued",
        attempt=0,
        failures=0,
        crashes=0,
        sort_key=sort_key(now, plan.target.revision_id, plan.generation.prefix),
        body=body,
        user_metadata=metadata,
        created_at=now,
        deadline_at=deadline_at,
        **pinned(plan, request_class),
    )


def pinned(plan: Plan, request_class: RequestClass) -> dict[str, Any]:
    """Columns that never change after submission."""
    prompt = len(plan.generation.prompt_ids)
    price, completion = plan.target.price, plan.most_tokens - prompt
    return {
        "model": plan.target.name,
        "base_model": plan.target.resolved.base.name,
        "adapter_revision_id": plan.target.revision_id,
        "seed": plan.seed,
        "prompt_tokens": prompt,
        "max_tokens": plan.max_tokens,
        "price_id": price.id,
        "reserved_nano": most_nano(price, request_class, prompt, completion),
    }
