"""From an upload to a revision that can be served: validating → ready | rejected.

Idempotent and safe to run twice at once: files are named by content, and the status changes by
compare-and-set. The revision has its digest before files are written, so that no sweep removes them
(`ContentRepository`). The tenant's upload is deleted once the outcome is committed.
"""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import asdict
from pathlib import Path

import obstore
import structlog

from gateway.adapters.archive import ArchiveRefused, is_archive, unpack
from gateway.adapters.base_models import BaseModelUnavailable, model_shapes
from gateway.adapters.checking import CheckedAdapter, PromptBase
from gateway.adapters.examiner import examine
from gateway.adapters.purge import content_keys
from gateway.adapters.repository import (
    BaseModelRepository,
    ContentRepository,
    IngestRepository,
)
from gateway.kit.clock import now_ms
from gateway.kit.context import Context
from gateway.kit.database import WriteSession
from gateway.kit.prompts import PromptsUnavailable, prompts_folder
from gateway.kit.store import delete_blob, read_blob
from gateway.models import AdapterRevision, BaseModel
from gateway.webhooks.events import EventType
from gateway.webhooks.service import record
from worker.protocol.peft import Problem

_log = structlog.get_logger(__name__)


class _ContentIsPurged(Exception):
    """A sweep is removing files of the same content; the next message finds them gone."""


async def waiting_revisions(context: Context, limit: int = 100) -> list[str]:
    """For a sweep: uploads whose message was lost."""
    async with context.database.read() as session:
        return list(await IngestRepository(session).waiting(limit))


async def ingest(context: Context, revision_id: str) -> None:
    """Raises BaseModelUnavailable and the store's errors: the revision stays `validating`."""
    async with context.database.read() as session:
        repository = IngestRepository(session)
        revision = await repository.get(revision_id)
        if revision is None or revision.status != "validating":
            return
        adapter = await repository.adapter(revision.adapter_id)
        assert adapter is not None  # a foreign key
        base = await BaseModelRepository(session).get(adapter.base_model)
        assert base is not None  # a foreign key
    try:
        outcome = await _examine(context, revision, base)
    except _ContentIsPurged as content:
        _log.info("adapter_ingest_postponed", revision_id=revision_id, purged=str(content))
        return
    await _settle(context, revision_id, outcome)
    await _discard(context, revision.upload_key)
    _log.info(
        "adapter_ingested", revision_id=revision_id, ready=isinstance(outcome, CheckedAdapter)
    )


async def _examine(
    context: Context, revision: AdapterRevision, base: BaseModel
) -> CheckedAdapter | list[Problem]:
    most_bytes = context.settings.adapter_bytes
    most_rank = (base.limits or {}).get("adapter_rank")
    shapes = await asyncio.to_thread(model_shapes, base.source)
    prompts = await asyncio.to_thread(_prompt_base, context, base.source)
    with tempfile.TemporaryDirectory(prefix="batten-adapter-") as temporary:
        folder = Path(temporary)
        try:
            await _fetch(context, revision.upload_key, folder, most_bytes)
        except ArchiveRefused as error:
            return [Problem("adapter_archive_refused", "archive", str(error))]
        outcome = await examine(folder, shapes, most_rank, most_bytes, prompts)
        if isinstance(outcome, CheckedAdapter):
            await _store(context, revision.id, outcome.digest, folder)
        return outcome


async def _store(context: Context, revision_id: str, digest: str, folder: Path) -> None:
    async with context.database.write() as session:
        revision = await IngestRepository(session).get(revision_id, lock=True)
        if revision is None or revision.status != "validating":
            return
        if not await ContentRepository(session).claim(revision, digest):
            raise _ContentIsPurged(digest)
    for key in content_keys(digest):
        await obstore.put_async(context.store, key, folder / key.rpartition("/")[2])


def _prompt_base(context: Context, source: str) -> PromptBase | None:
    """None for a base model without a tokenizer: it serves no text, whatever an adapter brings."""
    try:
        folder = prompts_folder(source)
    except PromptsUnavailable as error:
        raise BaseModelUnavailable(str(error)) from error
    has_tokenizer = (folder / "tokenizer.json").is_file()
    return PromptBase(str(folder), context.settings.template_chars) if has_tokenizer else None


async def _fetch(context: Context, prefix: str, folder: Path, most_bytes: int) -> None:
    for key in await _keys(context, prefix):
        path = folder / key.rpartition("/")[2]
        with path.open("wb") as file:
            async for chunk in read_blob(context.store, key):
                file.write(chunk)
        if is_archive(path.name):
            await asyncio.to_thread(unpack, path, folder, most_bytes)
            path.unlink()


async def _settle(
    context: Context, revision_id: str, outcome: CheckedAdapter | list[Problem]
) -> None:
    async with context.database.write() as session:
        repository = IngestRepository(session)
        revision = await repository.get(revision_id, lock=True)
        if revision is None or revision.status != "validating":
            return
        revision.finished_at = now_ms()
        if not isinstance(outcome, CheckedAdapter):
            revision.status, revision.digest = "rejected", None
            revision.errors = [
                {"code": problem.code, "param": problem.name, "message": problem.message}
                for problem in outcome
            ]
            await _tell(session, "adapter.rejected", revision)
            return
        revision.status, revision.digest = "ready", outcome.digest
        revision.rank, revision.bytes = outcome.rank, outcome.bytes
        revision.config = outcome.config
        if outcome.prompt_format is not None:
            revision.prompt_format = asdict(outcome.prompt_format)
        adapter = await repository.adapter(revision.adapter_id, lock=True)
        if adapter is not None and adapter.promoted_revision_id is None:
            adapter.promoted_revision_id = revision.id
        await _tell(session, "adapter.ready", revision)


async def _tell(session: WriteSession, type: EventType, revision: AdapterRevision) -> None:
    """Its tenant; the operator's own adapters have none."""
    if revision.tenant_id is not None:
        told = {"id": revision.adapter_id, "revision_id": revision.id}
        await record(session, revision.tenant_id, type, told)


async def _keys(context: Context, prefix: str) -> list[str]:
    return [item["path"] async for page in context.store.list(prefix) for item in page]


async def _discard(context: Context, prefix: str) -> None:
    for key in await _keys(context, prefix):
        await delete_blob(context.store, key)
