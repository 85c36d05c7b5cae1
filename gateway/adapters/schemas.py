from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from gateway.kit.clock import seconds
from gateway.models import Adapter, AdapterGrant, AdapterRevision
from gateway.models import BaseModel as BaseModelRow


class ModelObject(BaseModel):
    """OpenAI's Model, and what we know beyond it."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    kind: Literal["base", "adapter"]
    context_tokens: int
    base_model: str | None = None
    adapter_id: str | None = None
    revision: int | None = None
    rank: int | None = None


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelObject]


class AdapterObject(BaseModel):
    id: str
    object: Literal["adapter"] = "adapter"
    name: str
    base_model: str
    promoted_revision_id: str | None
    created_at: int


class RevisionObject(BaseModel):
    id: str
    object: Literal["adapter.revision"] = "adapter.revision"
    adapter_id: str
    number: int
    status: Literal["validating", "ready", "rejected"]
    digest: str | None
    rank: int | None
    bytes: int
    config: dict[str, Any] | None
    own_prompt_format: bool = Field(
        description="Whether its chat template or special tokens are not the base model's"
    )
    errors: list[dict[str, Any]] | None
    created_at: int
    finished_at: int | None


class UploadedAdapter(AdapterObject):
    revision: RevisionObject


class AdapterDeleted(BaseModel):
    id: str
    object: Literal["adapter"] = "adapter"
    deleted: Literal[True] = True


class GrantObject(BaseModel):
    id: str
    object: Literal["adapter.grant"] = "adapter.grant"
    adapter_id: str
    tenant: str
    created_at: int


class GrantRevoked(BaseModel):
    id: str
    object: Literal["adapter.grant"] = "adapter.grant"
    deleted: Literal[True] = True


class Grant(BaseModel):
    model_config = ConfigDict(extra="forbid")

    tenant: str = Field(description="Id or name")


class Promote(BaseModel):
    model_config = ConfigDict(extra="forbid")

    revision: str | int = Field(description="A revision's number or id")


def show_base_model(row: BaseModelRow) -> ModelObject:
    return ModelObject(
        id=row.name,
        created=row.created_at // 1000,
        owned_by="batten",
        kind="base",
        context_tokens=row.context_tokens,
    )


def show_adapter_model(
    adapter: Adapter, revision: AdapterRevision, base: BaseModelRow
) -> ModelObject:
    return ModelObject(
        id=adapter.name,
        created=adapter.created_at // 1000,
        owned_by=adapter.tenant_id or "batten",
        kind="adapter",
        context_tokens=base.context_tokens,
        base_model=base.name,
        adapter_id=adapter.id,
        revision=revision.number,
        rank=revision.rank,
    )


def show_adapter(row: Adapter) -> AdapterObject:
    return AdapterObject(
        id=row.id,
        name=row.name,
        base_model=row.base_model,
        promoted_revision_id=row.promoted_revision_id,
        created_at=row.created_at // 1000,
    )


def show_grant(row: AdapterGrant) -> GrantObject:
    return GrantObject(
        id=row.id,
        adapter_id=row.adapter_id,
        tenant=row.tenant_id,
        created_at=row.created_at // 1000,
    )


def show_revision(row: AdapterRevision) -> RevisionObject:
    return RevisionObject.model_validate(
        {
            "id": row.id,
            "adapter_id": row.adapter_id,
            "number": row.number,
            "status": row.status,
            "digest": row.digest,
            "rank": row.rank,
            "bytes": row.bytes,
            "config": row.config,
            "own_prompt_format": row.prompt_format is not None,
            "errors": row.errors,
            "created_at": row.created_at // 1000,
            "finished_at": seconds(row.finished_at),
        }
    )
