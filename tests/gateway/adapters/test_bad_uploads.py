"""Every kind of bad adapter is refused by name: what is wrong, where, and what would be right."""

from __future__ import annotations

import io
import json
import stat
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load, save

from gateway.adapters.ingest import ingest
from gateway.kit.context import Context
from gateway.models import BaseModel

Folder = dict[str, bytes]
Spoil = Callable[[Folder], Folder]
WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
PREFIX = "base_model.model.model.layers.0.self_attn.q_proj"


def with_weights(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Spoil:
    return lambda folder: folder | {WEIGHTS: save(change(load(folder[WEIGHTS])))}


def with_config(**fields: Any) -> Spoil:
    return lambda folder: (
        folder | {CONFIG: json.dumps(json.loads(folder[CONFIG]) | fields).encode()}
    )


def tar(*members: tarfile.TarInfo) -> Spoil:
    def pack(folder: Folder) -> Folder:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
            for name, content in folder.items():
                info = tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
            for member in members:
                archive.addfile(member)
        return {"a.tar.gz": buffer.getvalue()}

    return pack


def member(name: str, kind: bytes, target: str = "/etc/passwd") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def zipped(*extra: tuple[zipfile.ZipInfo | str, bytes]) -> Spoil:
    def pack(folder: Folder) -> Folder:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            for name, content in [*folder.items(), *extra]:
                archive.writestr(name, content)
        return {"a.zip": buffer.getvalue()}

    return pack


def zip_link() -> zipfile.ZipInfo:
    info = zipfile.ZipInfo("evil")
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    return info


BAD: dict[str, tuple[Spoil, str, str, str]] = {
    "truncated": (
        lambda f: f | {WEIGHTS: f[WEIGHTS][:-10]},
        "adapter_invalid_weights",
        WEIGHTS,
        "truncated: tensors end at byte",
    ),
    "only a header's length": (
        lambda f: f | {WEIGHTS: b"\xff" * 8},
        "adapter_invalid_weights",
        WEIGHTS,
        "truncated or no safetensors file",
    ),
    "wrong base": (
        with_weights(lambda t: {name: np.pad(each, 1) for name, each in t.items()}),
        "adapter_rank_mismatch",
        "model.layers.0.self_attn.q_proj",
        "rank 4 in the file, 2 in the config",
    ),
    "a wider base": (
        with_weights(
            lambda t: {
                name: np.zeros((2, 16) if "lora_A" in name else (16, 2), np.float32) for name in t
            }
        ),
        "adapter_shape_mismatch",
        "model.layers.0.self_attn.q_proj",
        "[16, 16], the base model has [8, 8]",
    ),
    "a deeper base": (
        with_weights(lambda t: {k.replace("layers.0", "layers.9"): v for k, v in t.items()}),
        "adapter_unmatched_modules",
        "model.layers.9.self_attn.q_proj",
        "the base model has no such module",
    ),
    "unknown tensor": (
        with_weights(lambda t: t | {"base_model.model.extra": np.zeros(2, np.float32)}),
        "adapter_unknown_tensor",
        "base_model.model.extra",
        "not a LoRA tensor of this model",
    ),
    "another prefix": (
        with_weights(lambda t: t | {"language_model.x.lora_A.weight": np.zeros(2, np.float32)}),
        "adapter_unknown_tensor",
        "language_model.x.lora_A.weight",
        "its name doesn't start with base_model.model.",
    ),
    "half a pair": (
        with_weights(lambda t: {k: v for k, v in t.items() if "lora_A" in k}),
        "adapter_incomplete_module",
        "model.layers.0.self_attn.q_proj",
        "lora_B.weight is missing",
    ),
    "whole numbers": (
        with_weights(lambda t: {k: v.astype(np.int32) for k, v in t.items()}),
        "adapter_wrong_dtype",
        f"{PREFIX}.lora_A.weight",
        "I32, expected one of F32, F16, BF16",
    ),
    "unknown option": (
        with_config(use_telepathy=True),
        "adapter_unsupported_option",
        "use_telepathy",
        "use_telepathy is not known, and might change the output",
    ),
    "another method": (
        with_config(peft_type="IA3"),
        "adapter_unsupported_option",
        "peft_type",
        "peft_type 'IA3': only LORA",
    ),
    "a pickle": (
        lambda f: {CONFIG: f[CONFIG], "adapter_model.bin": b"\x80\x04."},
        "adapter_pickle_refused",
        "adapter_model.bin",
        "a pickle can run code when it is loaded: save with safe_serialization=True",
    ),
    "a pickle under another name": (
        lambda f: f | {WEIGHTS: b"\x80\x04" + bytes(100)},
        "adapter_invalid_weights",
        WEIGHTS,
        "a pickle, not a safetensors file",
    ),
    "traversal in a zip": (
        zipped(("../../etc/cron.d/x", b"")),
        "adapter_archive_refused",
        "archive",
        "'../../etc/cron.d/x' points out of the archive",
    ),
    "an absolute path in a tar": (
        tar(member("/etc/x", tarfile.REGTYPE, "")),
        "adapter_archive_refused",
        "archive",
        "'/etc/x' points out of the archive",
    ),
    "a symbolic link in a tar": (
        tar(member("evil", tarfile.SYMTYPE)),
        "adapter_archive_refused",
        "archive",
        "evil is a link or a device",
    ),
    "a hard link in a tar": (
        tar(member("evil", tarfile.LNKTYPE, CONFIG)),
        "adapter_archive_refused",
        "archive",
        "evil is a link or a device",
    ),
    "a device in a tar": (
        tar(member("evil", tarfile.CHRTYPE)),
        "adapter_archive_refused",
        "archive",
        "evil is a link or a device",
    ),
    "a link in a zip": (
        zipped((zip_link(), b"/etc/passwd")),
        "adapter_archive_refused",
        "archive",
        "evil is a link",
    ),
    "other weights in an archive": (
        zipped(("more.safetensors", b"")),
        "adapter_archive_refused",
        "archive",
        "more.safetensors would have to be ignored",
    ),
}


async def upload(client: httpx.AsyncClient, context: Context, folder: Folder) -> dict[str, Any]:
    files = [("files", (name, content)) for name, content in folder.items()]
    answer = await client.post("/v1/adapters", data={"name": "bot"}, files=files)
    assert answer.status_code == 201, answer.text
    await ingest(context, answer.json()["revision"]["id"])
    shown: dict[str, Any] = (await client.get("/v1/adapters/bot/revisions/1")).json()
    return shown


@pytest.mark.usefixtures("base_model")
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("kind", BAD)
async def test_bad_uploads_say_what_is_wrong(
    client: httpx.AsyncClient,
    context: Context,
    make_folder: Callable[..., Folder],
    kind: str,
) -> None:
    spoil, code, param, message = BAD[kind]
    revision = await upload(client, context, spoil(make_folder()))
    assert revision["status"] == "rejected"
    found = {(error["code"], error["param"]): error["message"] for error in revision["errors"]}
    assert message in found[code, param], found
    assert [page async for page in context.store.list() if page] == [], "nothing is kept"


@pytest.mark.usefixtures("base_model")
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_a_rank_over_the_limit_names_both(
    client: httpx.AsyncClient, context: Context, make_folder: Callable[..., Folder]
) -> None:
    async with context.database.write() as session:
        (await session.get_one(BaseModel, "org/tiny")).limits = {"adapter_rank": 4}
    revision = await upload(client, context, make_folder(rank=5))
    assert revision["errors"] == [
        {
            "code": "adapter_rank_too_large",
            "param": CONFIG,
            "message": "rank 5, workers take at most 4",
        }
    ]


BIG = 192 * 2**20


def test_a_big_upload_is_never_whole_in_memory(tmp_path: Path) -> None:
    """`batten adapter add` of 192 MiB, which is what the API and the control process do too."""
    rows, rank = 2**17, 800
    name = "model.layers.0.self_attn.q_proj"
    model, folder = tmp_path / "model", tmp_path / "adapter"
    sparse(model / "model.safetensors", {f"{name}.weight": (rows, 256)})
    pair = {"lora_A": (rank, 256), "lora_B": (rows, rank)}
    tensors = {f"base_model.model.{name}.{part}.weight": shape for part, shape in pair.items()}
    sparse(folder / WEIGHTS, tensors)
    assert (folder / WEIGHTS).stat().st_size > BIG
    config = {"model_type": "llama", "max_position_embeddings": 64}
    (model / "config.json").write_text(json.dumps(config))
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (folder / CONFIG).write_text(json.dumps(fields))
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(model), str(folder)],
        env={"PYTHONPATH": ":".join(sys.path), "BATTEN_DATA": str(tmp_path / "data")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    before, after = map(int, done.stdout.split()[-2:])
    assert after - before < BIG // 3


MEASURED = """
import asyncio, resource, sys
from gateway.adapters.base_models import register_base_model
from gateway.cli.root import root
from gateway.kit.database import Database
from gateway.kit.migrations import migrate
from gateway.settings import Settings
from gateway.tenants.service import create_tenant
from gateway.adapters import ingest  # imported before the first measurement

settings = Settings()
settings.data.mkdir()
migrate(settings.effective_database_url)

async def fill():
    database = Database(settings.effective_database_url)
    async with database.write() as session:
        await register_base_model(session, "base", sys.argv[1])
        await create_tenant(session, "acme")
    await database.close()

asyncio.run(fill())
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
root(["adapter", "add", "acme", "big", sys.argv[2]], standalone_mode=False)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(before * 1024, after * 1024)
"""


def sparse(path: Path, shapes: dict[str, tuple[int, int]]) -> None:
    """A safetensors file of float16 zeros that takes no disk."""
    path.parent.mkdir()
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        size = 2 * shape[0] * shape[1]
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
