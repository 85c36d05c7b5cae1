"""Adapters of a tenant: new revisions, which one is promoted, and the end."""

from __future__ import annotations

from gateway.adapters.repository import AdapterRepository, BaseModelRepository
from gateway.adapters.upload import AdapterUpload
from gateway.auth.scope import SharedScope, TenantScope
from gateway.errors import BadRequest, Conflict, NotFound
from gateway.kit.clock import now_ms
from gateway.kit.database import ReadSession, WriteSession
from gateway.models import Adapter, AdapterRevision, BaseModel

Owner = TenantScope | SharedScope


async def add_revision(
    session: WriteSession, scope: Owner, upload: AdapterUpload
) -> tuple[Adapter, AdapterRevision]:
    """A new revision, and the adapter if its name is new. Raises BadRequest, Conflict."""
    base = await _base_model(session, upload.fields.get("base_model"))
    if await BaseModelRepository(session).get(upload.name) is not None:
        raise Conflict(
            f"'{upload.name}' is the name of a base model.", code="name_taken", param="name"
        )
    repository = AdapterRepository(session, scope)
    await repository.lock_tenant()
    if await repository.granted(upload.name) is not None:
        raise Conflict(
            f"'{upload.name}' is the name of a shared adapter that you may use.",
            code="name_taken",
            param="name",
        )
    adapter = await repository.named_or_new(upload.name, base.name)
    if adapter.base_model != base.name and "base_model" in upload.fields:
        raise Conflict(
            f"The adapter '{adapter.name}' belongs to the base model '{adapter.base_model}'.",
            code="base_model_mismatch",
            param="base_model",
        )
    revision = AdapterRevision(
        id=upload.revision_id,
        adapter_id=adapter.id,
        tenant_id=scope.tenant_id,
        number=await repository.next_number(adapter.id),
        status="validating",
        bytes=upload.bytes,
        upload_key=upload.key,
        created_at=now_ms(),
    )
    repository.add(revision)
    await session.flush()
    return adapter, revision


async def get_adapter(
    session: ReadSession | WriteSession, scope: Owner, id_or_name: str, lock: bool = False
) -> Adapter:
    """Raises NotFound."""
    adapter = await AdapterRepository(session, scope).get(id_or_name, lock)
    if adapter is None:
        raise NotFound(f"No such adapter: '{id_or_name}'.", code="adapter_not_found", param="id")
    return adapter


async def get_revision(
    session: ReadSession | WriteSession, scope: Owner, adapter: Adapter, number_or_id: str
) -> AdapterRevision:
    """Raises NotFound."""
    found = await AdapterRepository(session, scope).revision(adapter.id, number_or_id)
    if found is None:
        raise NotFound(
            f"No such revision of '{adapter.name}': '{number_or_id}'.", code="revision_not_found"
        )
    return found


async def promote(session: WriteSession, scope: Owner, id_or_name: str, revision: str) -> Adapter:
    """The bare name answers with `revision` from now on; what is submitted keeps its own.

    Raises NotFound, Conflict when the revision isn't ready.
    """
    adapter = await get_adapter(session, scope, id_or_name, lock=True)
    wanted = await get_revision(session, scope, adapter, revision)
    if wanted.status != "ready":
        raise Conflict(
            f"Revision {wanted.number} is {wanted.status}: only a ready one can be promoted.",
            code="revision_not_ready",
        )
    adapter.promoted_revision_id = wanted.id
    return adapter


async def roll_back(session: WriteSession, scope: Owner, id_or_name: str) -> Adapter:
    """Promote the newest ready revision before the promoted one. Raises NotFound, Conflict."""
    adapter = await get_adapter(session, scope, id_or_name, lock=True)
    repository = AdapterRepository(session, scope)
    current = await repository.revision(adapter.id, adapter.promoted_revision_id or "")
    previous = current and await repository.ready_before(adapter.id, current.number)
    if previous is None:
        raise Conflict("There is no earlier ready revision.", code="no_earlier_revision")
    adapter.promoted_revision_id = previous.id
    return adapter


async def delete_adapter(session: WriteSession, scope: Owner, id_or_name: str) -> Adapter:
    """Its name is free again. What runs ends as it would have; what still waits fails, see
    `gateway.jobs.withdrawal`. Raises NotFound."""
    adapter = await get_adapter(session, scope, id_or_name, lock=True)
    adapter.deleted_at = now_ms()
    return adapter


async def _base_model(session: WriteSession, name: str | None) -> BaseModel:
    models = await BaseModelRepository(session).all()
    if name is None:
        if not models:
            raise BadRequest(
                "No base model is served yet: an API process registers that of BATTEN_MODEL when "
                "it starts.",
                code="model_not_found",
                param="base_model",
            )
        if len(models) != 1:
            raise BadRequest(
                f"Name the adapter's base_model: {len(models)} are served.",
                code="missing_required_parameter",
                param="base_model",
            )
        return models[0]
    for model in models:
        if model.name == name:
            return model
    raise BadRequest(
        f"The base model '{name}' is not served here.", code="model_not_found", param="base_model"
    )
