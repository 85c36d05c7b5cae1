"""Adapters from upload to serving name, over HTTP."""

from __future__ import annotations

import io
import stat
import tarfile
import zipfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from openai import AsyncOpenAI
from safetensors.numpy import load, save

from gateway.adapters.examiner import examine
from gateway.adapters.ingest import ingest, waiting_revisions
from gateway.adapters.purge import remove_orphan_uploads
from gateway.adapters.service import resolve_model
from gateway.errors import NotFound
from gateway.kit.context import Context
from gateway.kit.tasks import RecordedTasks
from gateway.models import BaseModel

pytestmark = pytest.mark.usefixtures("base_model")
Folder = dict[str, bytes]


def form(folder: Folder) -> list[tuple[str, tuple[str, bytes]]]:
    return [("files", (name, content)) for name, content in folder.items()]


def zipped(folder: Folder, prefix: str = "my/") -> Folder:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in folder.items():
            archive.writestr(prefix + name, content)
    return {"adapter.zip": buffer.getvalue()}


def tarred(folder: Folder, prefix: str = "my/", link: str | None = None) -> Folder:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in folder.items():
            info = tarfile.TarInfo(prefix + name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        if link is not None:
            info = tarfile.TarInfo("link")
            info.type, info.linkname = tarfile.SYMTYPE, link
            archive.addfile(info)
    return {"adapter.tar.gz": buffer.getvalue()}


async def send(client: httpx.AsyncClient, folder: Folder, name: str = "bot", **fields: str):
    return await client.post("/v1/adapters", data={"name": name, **fields}, files=form(folder))


async def add(
    client: httpx.AsyncClient, context: Context, folder: Folder, name: str = "bot"
) -> dict[str, Any]:
    """Upload, ingest and read the revision."""
    answer = await send(client, folder, name)
    assert answer.status_code == 201, answer.text
    revision = answer.json()["revision"]
    assert revision["status"] == "validating"
    await ingest(context, revision["id"])
    shown = await client.get(f"/v1/adapters/{name}/revisions/{revision['number']}")
    return shown.json()


async def stored_keys(context: Context) -> list[str]:
    return sorted([item["path"] async for page in context.store.list() for item in page])


async def test_upload_ingest_serve(
    client: httpx.AsyncClient,
    openai_client: AsyncOpenAI,
    context: Context,
    tasks: RecordedTasks,
    make_folder: Callable[..., Folder],
) -> None:
    folder = make_folder(rank=2)
    revision = await add(client, context, {**folder, "README.md": b"# mine"})
    assert (revision["status"], revision["rank"], revision["number"]) == ("ready", 2, 1)
    assert revision["config"]["lora_alpha"] == 4
    assert tasks.sent == [("adapters.ingest", revision["id"])]
    keys = [f"adapters/{revision['digest']}/{name}" for name in sorted(folder)]
    assert await stored_keys(context) == keys
    content = await context.store.get_async(keys[1])
    assert bytes(await content.bytes_async()) == folder["adapter_model.safetensors"]
    models = [model.id for model in (await openai_client.models.list()).data]
    assert models == ["org/tiny", "bot"]
    assert (await openai_client.models.retrieve("bot")).owned_by.startswith("tenant_")
    assert (await openai_client.models.retrieve("bot@1")).id == "bot"
    assert (await openai_client.models.retrieve("org/tiny")).id == "org/tiny"
    with pytest.raises(openai.NotFoundError) as unknown:
        await openai_client.models.retrieve("nothing")
    assert unknown.value.code == "model_not_found"


async def test_ingest_twice_and_sweep(
    client: httpx.AsyncClient, context: Context, make_folder: Callable[..., Folder]
) -> None:
    sent = (await send(client, make_folder())).json()["revision"]["id"]
    assert await waiting_revisions(context) == [sent]
    await ingest(context, sent)
    await ingest(context, sent)
    assert await waiting_revisions(context) == []


@pytest.mark.parametrize("pack", [zipped, tarred, lambda folder: zipped(folder, "")])
async def test_archives(
    client: httpx.AsyncClient,
    context: Context,
    make_folder: Callable[..., Folder],
    pack: Callable[[Folder], Folder],
) -> None:
    folder = make_folder()
    plain = await add(client, context, folder, "plain")
    packed = await add(client, context, pack(folder), "packed")
    assert packed["status"] == "ready", packed["errors"]
    assert packed["digest"] == plain["digest"]


def not_finite(folder: Folder) -> Folder:
    tensors = load(folder["adapter_model.safetensors"])
    first = sorted(tensors)[0]
    tensors[first] = np.full_like(tensors[first], np.nan)
    return folder | {"adapter_model.safetensors": save(tensors)}


def renamed(folder: Folder) -> Folder:
    tensors = load(folder["adapter_model.safetensors"])
    return folder | {
        "adapter_model.safetensors": save(
            {key.replace("layers.0", "layers.7"): t for key, t in tensors.items()}
        )
    }


REJECTED: list[tuple[Callable[[Folder], Folder], str]] = [
    (lambda f: {"adapter_config.json": f["adapter_config.json"]}, "adapter_missing_file"),
    (lambda f: f | {"adapter_config.json": b"{"}, "adapter_invalid_config"),
    (lambda f: f | {"adapter_model.safetensors": b"junk"}, "adapter_invalid_weights"),
    (lambda f: f | {"adapter_model.safetensors": b""}, "adapter_invalid_weights"),
    (
        lambda f: {
            "adapter_config.json": f["adapter_config.json"],
            "adapter_model.bin": b"\x80\x04",
        },
        "adapter_pickle_refused",
    ),
    (not_finite, "adapter_not_finite"),
    (renamed, "adapter_unmatched_modules"),
    (lambda f: {"a.zip": b"PK\x03\x04broken"}, "adapter_archive_refused"),
    (lambda f: {"a.tar.gz": b"junk"}, "adapter_archive_refused"),
    (lambda f: zipped(f, "../"), "adapter_archive_refused"),
    (lambda f: zipped(f, "/"), "adapter_archive_refused"),
    (lambda f: tarred(f, link="/etc/passwd"), "adapter_archive_refused"),
    (lambda f: zipped({"a/x.txt": b""}), "adapter_archive_refused"),
]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize(("spoil", "code"), REJECTED)
async def test_rejections_name_the_reason(
    client: httpx.AsyncClient,
    context: Context,
    make_folder: Callable[..., Folder],
    spoil: Callable[[Folder], Folder],
    code: str,
) -> None:
    revision = await add(client, context, spoil(make_folder()))
    assert revision["status"] == "rejected"
    assert {error["code"] for error in revision["errors"]} == {code}
    assert all(error["message"] for error in revision["errors"])
    assert await stored_keys(context) == []
    models = (await client.get("/v1/models")).json()["data"]
    assert [model["id"] for model in models] == ["org/tiny"]


async def test_every_reason_is_reported(
    client: httpx.AsyncClient, context: Context, make_folder: Callable[..., Folder]
) -> None:
    spoilt = make_folder(use_qalora=True) | {"adapter_model.safetensors": b"junk"}
    revision = await add(client, context, spoilt)
    codes = {error["code"] for error in revision["errors"]}
    assert codes == {"adapter_unsupported_option", "adapter_invalid_weights"}


async def test_a_rank_that_no_worker_takes(
    client: httpx.AsyncClient, context: Context, make_folder: Callable[..., Folder]
) -> None:
    async with context.database.write() as session:
        (await session.get_one(BaseModel, "org/tiny")).limits = {"adapter_rank": 4}
    revision = await add(client, context, make_folder(rank=5))
    assert [error["code"] for error in revision["errors"]] == ["adapter_rank_too_large"]


async def test_a_zip_bomb_stops_at_the_limit(
    client: httpx.AsyncClient,
    context: Context,
    make_folder: Callable[..., Folder],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(context.settings.__dict__, "adapter_bytes", 100_000)
    bomb = make_folder() | {"adapter_model.safetensors": bytes(10**7)}
    for pack in (zipped, tarred):
        revision = await add(client, context, pack(bomb))
        assert revision["errors"][0]["code"] == "adapter_archive_refused"
        assert "too large" in revision["errors"][0]["message"]
    refused = await send(client, bomb)
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "adapter_too_large")
    assert await stored_keys(context) == []


async def test_revisions_promotion_and_rollback(
    client: httpx.AsyncClient, context: Context, tenant, make_folder: Callable[..., Folder]
) -> None:
    revisions = [await add(client, context, make_folder(seed=seed)) for seed in range(3)]
    assert [revision["number"] for revision in revisions] == [1, 2, 3]
    assert len({revision["digest"] for revision in revisions}) == 3

    async def serving(name: str) -> int:
        async with context.database.read() as session:
            found = await resolve_model(session, tenant.scope, name)
        assert found.revision is not None
        assert found.adapter is not None
        # A name that the tenant chose must not choose a price.
        assert found.price_names == (found.adapter.id, "org/tiny")
        return found.revision.number

    assert await serving("bot") == 1
    promoted = await client.post("/v1/adapters/bot/promote", json={"revision": 3})
    assert promoted.json()["promoted_revision_id"] == revisions[2]["id"]
    assert (await serving("bot"), await serving("bot@1")) == (3, 1)
    assert await serving(f"bot@{revisions[1]['id']}") == 2
    await client.post("/v1/adapters/bot/rollback")
    assert await serving("bot") == 2
    await client.post("/v1/adapters/bot/rollback")
    last = await client.post("/v1/adapters/bot/rollback")
    assert (last.status_code, last.json()["error"]["code"]) == (409, "no_earlier_revision")
    listed = (await client.get("/v1/adapters/bot/revisions", params={"limit": 2})).json()
    assert [row["number"] for row in listed["data"]] == [3, 2]
    assert listed["has_more"]


async def test_a_rejected_revision_cannot_be_promoted(
    client: httpx.AsyncClient, context: Context, make_folder: Callable[..., Folder]
) -> None:
    await add(client, context, not_finite(make_folder()))
    answer = await client.post("/v1/adapters/bot/promote", json={"revision": 1})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "revision_not_ready")
    retrieved = await client.get("/v1/models/bot")
    assert "no ready revision" in retrieved.json()["error"]["message"]


async def test_deletion_frees_the_name(
    client: httpx.AsyncClient, context: Context, make_folder: Callable[..., Folder]
) -> None:
    await add(client, context, make_folder())
    deleted = await client.delete("/v1/adapters/bot")
    assert deleted.json()["deleted"] is True
    for path in ("/v1/adapters/bot", "/v1/models/bot", "/v1/adapters/bot/revisions"):
        assert (await client.get(path)).status_code == 404
    assert (await client.get("/v1/adapters")).json()["data"] == []
    again = await add(client, context, make_folder())
    assert (again["number"], again["status"]) == (1, "ready")


async def test_another_tenants_adapter_is_unknown(
    client: httpx.AsyncClient,
    other_client: httpx.AsyncClient,
    context: Context,
    other_tenant,
    make_folder: Callable[..., Folder],
) -> None:
    revision = await add(client, context, make_folder())
    adapter_id = revision["adapter_id"]
    for path in (adapter_id, "bot", "bot/revisions", f"bot/revisions/{revision['id']}"):
        theirs = await other_client.get(f"/v1/adapters/{path}")
        nobodys = await other_client.get(f"/v1/adapters/{path.replace(adapter_id, 'x')}")
        assert theirs.status_code == nobodys.status_code == 404
        assert theirs.text == nobodys.text.replace("'x'", f"'{adapter_id}'")
    for action in ("promote", "rollback"):
        posted = await other_client.post(f"/v1/adapters/bot/{action}", json={"revision": 1})
        assert posted.status_code == 404
    assert (await other_client.delete("/v1/adapters/bot")).status_code == 404
    async with context.database.read() as session:
        with pytest.raises(NotFound):
            await resolve_model(session, other_tenant.scope, "bot")
    mine = await add(other_client, context, make_folder(seed=9))
    assert (mine["number"], mine["status"]) == (1, "ready")


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"name": "org/tiny"}, 409, "name"),
        ({"name": "a@b"}, 400, "name"),
        ({"name": ""}, 400, "name"),
        ({"name": "x" * 129}, 400, "name"),
        ({"name": "bot", "base_model": "gpt"}, 400, "base_model"),
    ],
)
async def test_bad_fields_leave_nothing(
    client: httpx.AsyncClient,
    context: Context,
    make_folder: Callable[..., Folder],
    fields: dict[str, str],
    status: int,
    param: str,
) -> None:
    answer = await send(client, make_folder(), **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
    assert await stored_keys(context) == []


async def test_forms_without_an_adapter(
    client: httpx.AsyncClient, make_folder: Callable[..., Folder]
) -> None:
    folder = make_folder()
    for files in ({"README.md": b"x"}, {**folder, **zipped(folder)}):
        answer = await send(client, files)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "files")


async def test_the_same_key_uploads_once(
    client: httpx.AsyncClient, context: Context, make_folder: Callable[..., Folder]
) -> None:
    client.headers["Idempotency-Key"] = "once"
    first, again = [await send(client, make_folder()) for _ in range(2)]
    assert first.json() == again.json()
    assert again.headers["idempotent-replayed"] == "true"
    other = await send(client, make_folder(seed=1))
    assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_conflict")
    assert len(await stored_keys(context)) == 2


async def test_a_base_model_knows_its_context(context: Context, base_model: str) -> None:
    async with context.database.read() as session:
        row = await session.get_one(BaseModel, base_model)
    assert (row.context_tokens, row.limits) == (64, None)


@pytest.mark.parametrize("database_url", ["postgres"], indirect=True)
@pytest.mark.parametrize(
    "fields",
    [
        {"lora_alpha": 10**400},
        {"r": "\ud800"},
        {"target_modules": "("},
        {"rank_pattern": {"\0": "x"}},
    ],
)
async def test_hostile_configs_are_rejected(
    client: httpx.AsyncClient,
    context: Context,
    make_folder: Callable[..., Folder],
    fields: dict[str, Any],
) -> None:
    revision = await add(client, context, make_folder(**fields))
    assert revision["status"] == "rejected"
    assert revision["errors"]


async def test_a_config_that_no_database_keeps(
    client: httpx.AsyncClient, context: Context, make_folder: Callable[..., Folder]
) -> None:
    odd = make_folder(lora_dropout=float("nan"), revision="a\0b\ud800")
    revision = await add(client, context, odd)
    assert revision["status"] == "ready"
    assert revision["config"]["revision"] == "a\\x00b\\ud800"
    assert revision["config"]["lora_dropout"] is None


def write(folder: Path, files: Folder) -> Path:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


async def examined(folder: Path, seconds: float) -> list[str]:
    shapes = {"model.layers.0.self_attn.q_proj": (8, 8)}
    outcome = await examine(folder, shapes, None, 10**6, base_seconds=seconds)
    assert isinstance(outcome, list)
    return [problem.code for problem in outcome]


async def test_a_pattern_that_never_ends_is_refused(
    tmp_path: Path, make_folder: Callable[..., Folder]
) -> None:
    endless = make_folder(target_modules=r"(([a-z._0-9]+)+)+X")
    folder = write(tmp_path / "endless", endless)
    assert await examined(folder, 60) == ["adapter_unsupported_option"]


async def test_a_check_that_takes_too_long_is_stopped(
    tmp_path: Path, make_folder: Callable[..., Folder]
) -> None:
    folder = write(tmp_path / "slow", make_folder())
    assert await examined(folder, 0.001) == ["adapter_check_timeout"]


async def test_links_in_a_zip_are_refused(
    client: httpx.AsyncClient, context: Context, make_folder: Callable[..., Folder]
) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        link = zipfile.ZipInfo("adapter_config.json")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "/etc/passwd")
        archive.writestr("adapter_model.safetensors", b"")
    revision = await add(client, context, {"a.zip": buffer.getvalue()})
    assert revision["errors"][0]["message"] == "adapter_config.json is a link"


async def test_uploads_of_nobody_are_removed(
    client: httpx.AsyncClient, context: Context, make_folder: Callable[..., Folder]
) -> None:
    waiting = (await send(client, make_folder())).json()["revision"]["id"]
    await context.store.put_async("uploads/adrev_lost/adapter_config.json", b"{}")
    assert await remove_orphan_uploads(context) == 0
    assert await remove_orphan_uploads(context, timedelta()) == 1
    left = await stored_keys(context)
    assert left
    assert all(key.startswith(f"uploads/{waiting}/") for key in left)
