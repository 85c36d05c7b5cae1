"""From the `model` of a body to what will run: `base`, `adapter` or `adapter@revision`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.adapters.repository import AdapterRepository, BaseModelRepository
from gateway.auth.scope import SHARED, TenantScope
from gateway.errors import NotFound, Unavailable
from gateway.kit.context import Context
from gateway.kit.database import ReadSession, WriteSession
from gateway.kit.prompts import Prompts, PromptsUnavailable
from gateway.models import Adapter, AdapterRevision, BaseModel


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """`name` is the adapter's, or the base model's when there is no adapter."""

    name: str
    base: BaseModel
    revision: AdapterRevision | None = None
    adapter: Adapter | None = None

    @property
    def price_names(self) -> tuple[str, ...]:
        """For `billing.price_for`: most specific first. A tenant names its own adapters, so that
        they are priced by id: a name would let it choose a price."""
        if self.adapter is None:
            return (self.name,)
        is_shared = self.adapter.tenant_id is None
        return (self.name if is_shared else self.adapter.id, self.base.name)


async def resolve_model(
    session: ReadSession | WriteSession, scope: TenantScope, name: str
) -> ResolvedModel:
    """The tenant's own adapters and those granted to it.

    Raises NotFound (`model_not_found`): unknown, another tenant's, or no ready revision.
    """
    models = BaseModelRepository(session)
    if base := await models.get(name):
        return ResolvedModel(name, base)
    adapters = AdapterRepository(session, scope)
    adapter_name, at, wanted = name.rpartition("@")
    adapter_name = adapter_name if at else name
    adapter = await adapters.named(adapter_name)
    if adapter is None:
        adapter = await adapters.granted(adapter_name)
        adapters = AdapterRepository(session, SHARED)
    if adapter is None:
        raise model_not_found(name)
    wanted = wanted if at else adapter.promoted_revision_id or ""
    revision = await adapters.revision(adapter.id, wanted) if wanted else None
    if revision is None:
        raise model_not_found(name, "" if at else " It has no ready revision yet.")
    if revision.status != "ready":
        raise model_not_found(name, f" Its revision {revision.number} is {revision.status}.")
    base = await models.get(adapter.base_model)
    assert base is not None  # a foreign key
    return ResolvedModel(adapter.name, base, revision, adapter)


async def prompts_of(
    context: Context, base: BaseModel, format: Mapping[str, Any] | None
) -> Prompts:
    """How prompts are made for a base model, or for an adapter with a `prompt_format` of its own.
    Raises Unavailable."""
    try:
        prompts = await context.prompts.of(base.source)
    except PromptsUnavailable as error:
        raise Unavailable(f"The model's tokenizer cannot be read: {error}") from error
    return prompts if format is None else prompts.of_adapter(format, context.templates)


def model_not_found(name: str, why: str = "") -> NotFound:
    return NotFound(
        f"The model '{name}' does not exist or you do not have access to it.{why}",
        code="model_not_found",
        param="model",
    )
