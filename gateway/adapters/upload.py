"""An adapter upload: the files of a PEFT folder, or one archive, straight to the store."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from fastapi import Request

from gateway.adapters.archive import is_archive
from gateway.adapters.folder_files import is_kept, is_refused, refusal
from gateway.auth.idempotency import fingerprint
from gateway.errors import BadRequest, PayloadTooLarge
from gateway.kit.context import Context
from gateway.kit.ids import new_id
from gateway.kit.multipart import Multipart
from gateway.kit.store import BlobTooLarge, Written, delete_blob, write_blob
from worker.protocol.peft import CONFIG_FILE, WEIGHTS_FILE

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}")


@dataclass
class AdapterUpload:
    """A form read so far; its files lie under `key` in the store."""

    revision_id: str = field(default_factory=lambda: new_id("adrev"))
    fields: dict[str, str] = field(default_factory=dict)
    files: dict[str, Written] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"uploads/{self.revision_id}"

    @property
    def bytes(self) -> int:
        return sum(written.bytes for written in self.files.values())

    @property
    def name(self) -> str:
        return self.fields["name"]

    @property
    def fingerprint(self) -> str:
        parts = [self.name, self.fields.get("base_model")]
        for name, written in sorted(self.files.items()):
            parts += [name, written.sha256]
        return fingerprint(*parts)


async def receive_adapter(context: Context, request: Request) -> AdapterUpload:
    """Raises BadRequest, PayloadTooLarge; then nothing is left in the store."""
    upload = AdapterUpload()
    try:
        async for part in (form := Multipart(request)):
            if part.filename is None:
                upload.fields[part.name] = await form.text()
            else:
                await _receive_file(context, upload, form, part.filename)
        _check(upload)
    except BaseException:
        await discard(context, upload)
        raise
    return upload


async def discard(context: Context, upload: AdapterUpload) -> None:
    for name in upload.files:
        await delete_blob(context.store, f"{upload.key}/{name}")


async def _receive_file(
    context: Context, upload: AdapterUpload, form: Multipart, filename: str
) -> None:
    name = re.split(r"[/\\]", filename)[-1]
    if is_archive(name):
        name = "archive" + name[name.lower().rindex(".tar" if ".tar" in name.lower() else ".") :]
    elif is_refused(name):
        raise BadRequest(f"{refusal(name)}.", code="adapter_unknown_file", param="files")
    elif not is_kept(name):
        return
    if name in upload.files:
        raise BadRequest(f"The form holds {name} twice.", param="files")
    limit = context.settings.adapter_bytes - upload.bytes
    try:
        written = await write_blob(context.store, f"{upload.key}/{name}", form.chunks(), limit)
    except BlobTooLarge:
        raise PayloadTooLarge(
            f"The adapter is larger than {context.settings.adapter_bytes} bytes.",
            code="adapter_too_large",
            param="files",
        ) from None
    upload.files[name] = written


def _check(upload: AdapterUpload) -> None:
    if "name" not in upload.fields:
        raise BadRequest(
            "Missing required parameter: 'name'.", code="missing_required_parameter", param="name"
        )
    if not NAME.fullmatch(upload.name):
        raise BadRequest(
            "Invalid value for 'name': use up to 128 letters, digits and any of . _ / : -, "
            "beginning with a letter or digit.",
            code="invalid_value",
            param="name",
        )
    archives = [name for name in upload.files if is_archive(name)]
    if not upload.files:
        raise BadRequest(
            f"Send {CONFIG_FILE} and {WEIGHTS_FILE}, or one .zip or .tar.gz of them.",
            code="missing_required_parameter",
            param="files",
        )
    if archives and len(upload.files) > 1:
        raise BadRequest("Send either one archive or files, not both.", param="files")
