"""Bodies of requests: a job's is in its row, a batch line's in the input file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import obstore
from obstore.store import ObjectStore
from sqlalchemy import select

from gateway.kit.database import ReadSession
from gateway.kit.json import parse_json
from gateway.models import Batch, File

JsonBody = Mapping[str, Any]


class HasBody(Protocol):
    """A request's row, or the part of it that says where its body is."""

    @property
    def id(self) -> str: ...

    @property
    def batch_id(self) -> str | None: ...

    @property
    def body(self) -> dict[str, Any] | None: ...

    @property
    def input_offset(self) -> int | None: ...

    @property
    def input_length(self) -> int | None: ...


async def input_keys(session: ReadSession, requests: Sequence[HasBody]) -> dict[str, str]:
    """Batch id → the input file's key in the store."""
    batch_ids = sorted({request.batch_id for request in requests if request.batch_id})
    rows = await session.execute(
        select(Batch.id, File.store_key)
        .join(File, File.id == Batch.input_file_id)
        .where(Batch.id.in_(batch_ids))
    )
    return {row[0]: row[1] for row in rows}


async def load_bodies(
    store: ObjectStore, keys: Mapping[str, str], requests: Sequence[HasBody]
) -> dict[str, JsonBody]:
    """Request id → body. Lines of one file are read together."""
    bodies: dict[str, JsonBody] = {
        request.id: request.body for request in requests if request.body is not None
    }
    lines: dict[str, list[HasBody]] = defaultdict(list)
    for request in requests:
        if request.body is None and request.batch_id:
            lines[keys[request.batch_id]].append(request)
    for key, of_file in lines.items():
        bodies |= await _load_lines(store, key, of_file)
    return bodies


async def _load_lines(
    store: ObjectStore, key: str, requests: Sequence[HasBody]
) -> dict[str, JsonBody]:
    chunks = await obstore.get_ranges_async(
        store,
        key,
        starts=[request.input_offset or 0 for request in requests],
        lengths=[request.input_length or 0 for request in requests],
    )
    return {
        request.id: parse_json(bytes(chunk))["body"]
        for request, chunk in zip(requests, chunks, strict=True)
    }
