from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from gateway.kit.clock import seconds
from gateway.models import File


class FileObject(BaseModel):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    status_details: str | None = None


class FileDeleted(BaseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


def show_file(file: File) -> FileObject:
    return FileObject(
        id=file.id,
        bytes=file.bytes,
        created_at=file.created_at // 1000,
        expires_at=seconds(file.expires_at),
        filename=file.filename,
        purpose=file.purpose,
    )
