"""An upload: the form is read part by part, the file goes straight to the object store."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import Request

from gateway.auth.idempotency import fingerprint
from gateway.errors import BadRequest, PayloadTooLarge
from gateway.files.service import StoredBlob, store_blob
from gateway.kit.clock import now_ms
from gateway.kit.context import Context
from gateway.kit.multipart import Multipart, PartHead
from gateway.kit.store import BlobTooLarge, delete_blob

UPLOAD_PURPOSES = ("batch",)
EXPIRY_SECONDS = range(3600, 2_592_001)
_DAY_MS = 24 * 3600 * 1000


@dataclass(frozen=True, slots=True)
class Upload:
    """A checked form, its file stored but not yet anybody's."""

    filename: str
    purpose: str
    lifetime_ms: int
    blob: StoredBlob

    @property
    def expires_at(self) -> int:
        return now_ms() + self.lifetime_ms

    @property
    def fingerprint(self) -> str:
        lifetime = str(self.lifetime_ms)
        return fingerprint(self.blob.written.sha256, self.filename, self.purpose, lifetime)


async def receive_upload(context: Context, request: Request) -> Upload:
    """Raises BadRequest, PayloadTooLarge; then nothing is left in the store."""
    fields: dict[str, str] = {}
    stored: tuple[str, StoredBlob] | None = None
    try:
        async for part in (form := Multipart(request)):
            if part.name == "file" and part.filename is not None:
                if stored is not None:
                    raise BadRequest("Send one file at a time.", param="file")
                _check_filename(part.filename)
                stored = part.filename, await _store(context, form)
            else:
                fields[part.name] = await _field(form, part)
        return _checked(context, fields, stored)
    except BaseException:
        if stored is not None:
            await delete_blob(context.store, stored[1].store_key)
        raise


async def _store(context: Context, form: Multipart) -> StoredBlob:
    try:
        return await store_blob(context, form.chunks(), context.settings.file_bytes)
    except BlobTooLarge as error:
        raise PayloadTooLarge(
            f"The file is larger than {error.limit} bytes.", code="file_too_large", param="file"
        ) from None


async def _field(form: Multipart, part: PartHead) -> str:
    if part.filename is not None:
        raise BadRequest(f"Unknown parameter: '{part.name}'.", param=part.name)
    return await form.text()


def _check_filename(filename: str) -> None:
    if not filename.lower().endswith(".jsonl"):
        raise BadRequest("Invalid file format for Batch API. Must be .jsonl", param="file")


def _checked(
    context: Context, fields: dict[str, str], stored: tuple[str, StoredBlob] | None
) -> Upload:
    if stored is None:
        raise _missing("file")
    if "purpose" not in fields:
        raise _missing("purpose")
    if fields["purpose"] not in UPLOAD_PURPOSES:
        raise BadRequest(
            f"Invalid value for 'purpose': '{fields['purpose'][:64]}'. Supported values are: "
            "'batch'.",
            code="invalid_value",
            param="purpose",
        )
    filename, blob = stored
    if blob.written.bytes == 0:
        raise BadRequest("The file is empty.", code="empty_file", param="file")
    return Upload(filename[:512], fields["purpose"], _lifetime_ms(context, fields), blob)


def _lifetime_ms(context: Context, fields: dict[str, str]) -> int:
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return context.settings.file_days * _DAY_MS
    if anchor != "created_at":
        raise BadRequest(
            "Invalid value for 'expires_after.anchor': use 'created_at'.",
            code="invalid_value",
            param="expires_after.anchor",
        )
    if not (seconds or "").isdecimal() or int(seconds or 0) not in EXPIRY_SECONDS:
        raise BadRequest(
            "Invalid value for 'expires_after.seconds': use 3600 to 2592000.",
            code="invalid_value",
            param="expires_after.seconds",
        )
    return int(seconds or 0) * 1000


def _missing(name: str) -> BadRequest:
    return BadRequest(
        f"Missing required parameter: '{name}'.", code="missing_required_parameter", param=name
    )
