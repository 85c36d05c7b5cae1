from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from gateway.auth.dependencies import CurrentPrincipal
from gateway.auth.idempotency import CurrentIdempotency
from gateway.files import service
from gateway.files.repository import FileRepository
from gateway.files.schemas import FileDeleted, FileObject, show_file
from gateway.files.upload import receive_upload
from gateway.kit.dependencies import AppContext
from gateway.kit.pagination import ListObject, PageRequest, list_object, paging
from gateway.kit.ranges import Unsatisfiable, parse_range
from gateway.kit.store import delete_blob

router = APIRouter(prefix="/v1/files", tags=["files"])

_FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": ["batch"]},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {"type": "integer"},
                    },
                }
            }
        },
    }
}


@router.post("", response_model=FileObject, openapi_extra=_FORM)
async def upload_file(
    request: Request,
    context: AppContext,
    principal: CurrentPrincipal,
    idempotency: CurrentIdempotency,
) -> JSONResponse:
    """Upload a file of batch requests (.jsonl)."""
    upload = await receive_upload(context, request)
    kept = False

    try:
        async with context.database.write() as session:

            async def create() -> dict[str, Any]:
                nonlocal kept
                file = service.file_row(
                    principal.scope, upload.blob, upload.filename, upload.purpose, upload.expires_at
                )
                FileRepository(session, principal.scope).add(file)
                kept = True
                return show_file(file).model_dump()

            return await idempotency.once(session, upload.fingerprint, create)
    finally:
        if not kept:
            await delete_blob(context.store, upload.blob.store_key)


@router.get("")
async def list_files(
    context: AppContext,
    principal: CurrentPrincipal,
    page: Annotated[PageRequest, Depends(paging(10_000, 10_000))],
    purpose: str | None = None,
) -> ListObject[FileObject]:
    async with context.database.read() as session:
        files = await FileRepository(session, principal.scope).page(page, purpose)
        return list_object(files, show_file)


@router.get("/{file_id}")
async def get_file(file_id: str, context: AppContext, principal: CurrentPrincipal) -> FileObject:
    async with context.database.read() as session:
        return show_file(await service.get_file(session, principal.scope, file_id))


@router.delete("/{file_id}")
async def delete_file(
    file_id: str, context: AppContext, principal: CurrentPrincipal
) -> FileDeleted:
    """The file is gone for its owner at once; a batch that reads it goes on."""
    async with context.database.write() as session:
        await service.delete_file(session, principal.scope, file_id)
    return FileDeleted(id=file_id)


_BYTES = {"content": {"application/octet-stream": {"schema": {"format": "binary"}}}}
_RANGES: dict[int | str, dict[str, Any]] = {
    200: {"description": "All bytes", **_BYTES},
    206: {"description": "The range of bytes that was asked for", **_BYTES},
    416: {"description": "The file has no such bytes"},
}


@router.get("/{file_id}/content", response_class=Response, responses=_RANGES)
async def get_content(
    file_id: str,
    context: AppContext,
    principal: CurrentPrincipal,
    range_header: Annotated[str | None, Header(alias="range")] = None,
) -> Response:
    """The bytes, streamed; one range of them when asked."""
    async with context.database.read() as session:
        file = await service.get_file(session, principal.scope, file_id)
    try:
        part = parse_range(range_header, file.bytes)
    except Unsatisfiable:
        return Response(status_code=416, headers={"Content-Range": f"bytes */{file.bytes}"})
    start, end = (part.start, part.end) if part else (0, file.bytes)
    headers = {"Accept-Ranges": "bytes", "Content-Length": str(end - start)}
    if part:
        headers["Content-Range"] = part.content_range
    chunks = service.stream(context, file, start, end)
    first = await anext(chunks, b"")  # what is wrong with the store is said by the status
    return StreamingResponse(
        _following(first, chunks),
        206 if part else 200,
        headers,
        media_type="application/octet-stream",
    )


async def _following(first: bytes, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for chunk in chunks:
        yield chunk
