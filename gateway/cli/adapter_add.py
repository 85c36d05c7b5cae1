"""An adapter from a local folder, checked here and now instead of by the control processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import SecretStr

from gateway.adapters.archive import SUFFIXES, is_archive
from gateway.adapters.folder_files import is_kept, is_refused, missing_from, refusal
from gateway.adapters.ingest import ingest
from gateway.adapters.lifecycle import add_revision, get_adapter, get_revision
from gateway.adapters.upload import NAME, AdapterUpload
from gateway.auth.scope import TenantScope, scope_for_background
from gateway.cli.database import check_deployed
from gateway.cli.errors import CommandError
from gateway.kit.context import Context, open_context
from gateway.kit.store import BlobTooLarge, write_blob
from gateway.models import AdapterRevision
from gateway.settings import Settings
from gateway.tenants.service import find_tenant

CHUNK_BYTES = 1 << 20
# A context names a Redis, and connects only when one is asked for something: ingest asks nothing.
_NO_REDIS = SecretStr("redis://127.0.0.1:0/0")


@dataclass(frozen=True, slots=True)
class Added:
    name: str
    number: int


def add_adapter(
    settings: Settings, tenant: str, name: str, folder: Path, base_model: str | None
) -> Added:
    """Raises CommandError with every reason why it is refused; ApiError for unknown names."""
    if not NAME.fullmatch(name):
        raise CommandError(f"{name!r} is no adapter name: use letters, digits and any of . _ / : -")
    files = _files(folder)
    check_deployed(settings)
    settings = settings.model_copy(update={"redis_url": settings.redis_url or _NO_REDIS})
    return asyncio.run(_add(settings, tenant, name, files, base_model))


def _files(folder: Path) -> list[tuple[str, Path]]:
    """(name in the upload, file)"""
    if folder.is_file():
        if not is_archive(folder.name):
            raise CommandError(f"{folder} is neither a folder nor a .zip or .tar.gz")
        suffix = next(end for end in SUFFIXES if folder.name.lower().endswith(end))
        return [(f"archive{suffix}", folder)]
    if missing := missing_from(folder):
        raise CommandError(f"{folder} holds no {' and no '.join(missing)}: not a PEFT folder")
    if refused := [path.name for path in sorted(folder.iterdir()) if is_refused(path.name)]:
        raise CommandError(refusal(refused[0]))
    return [(path.name, path) for path in sorted(folder.iterdir()) if is_kept(path.name)]


async def _add(
    settings: Settings,
    tenant: str,
    name: str,
    files: list[tuple[str, Path]],
    base_model: str | None,
) -> Added:
    async with open_context(settings) as context:
        async with context.database.read() as session:
            scope = scope_for_background((await find_tenant(session, tenant)).id)
        upload = AdapterUpload(fields={"name": name})
        if base_model is not None:
            upload.fields["base_model"] = base_model
        for target, path in files:
            await _store(context, upload, target, path)
        async with context.database.write() as session:
            _, revision = await add_revision(session, scope, upload)
        await ingest(context, revision.id)
        return _outcome(name, await _revision(context, scope, name, revision.id))


async def _store(context: Context, upload: AdapterUpload, name: str, path: Path) -> None:
    limit = context.settings.adapter_bytes - upload.bytes
    try:
        upload.files[name] = await write_blob(
            context.store, f"{upload.key}/{name}", _chunks(path), limit
        )
    except BlobTooLarge as error:
        raise CommandError(f"{path} makes the adapter larger than BATTEN_ADAPTER_BYTES") from error


async def _chunks(path: Path) -> AsyncIterator[bytes]:
    with path.open("rb") as file:
        while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
            yield chunk


async def _revision(
    context: Context, scope: TenantScope, name: str, revision_id: str
) -> AdapterRevision:
    async with context.database.read() as session:
        adapter = await get_adapter(session, scope, name)
        return await get_revision(session, scope, adapter, revision_id)


def _outcome(name: str, revision: AdapterRevision) -> Added:
    if revision.status != "ready":
        reasons = "; ".join(str(error["message"]) for error in revision.errors or [])
        raise CommandError(f"{name} is {revision.status}: {reasons}")
    return Added(name, revision.number)
