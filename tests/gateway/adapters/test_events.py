from __future__ import annotations

import json
from collections.abc import Callable

import httpx
import pytest
from sqlalchemy import select

from gateway.adapters.ingest import ingest
from gateway.kit.context import Context
from gateway.models import WebhookEvent

pytestmark = pytest.mark.usefixtures("base_model")


@pytest.mark.parametrize(("config", "ending"), [({}, "ready"), ({"r": 3}, "rejected")])
async def test_an_uploads_outcome_is_told_once(
    client: httpx.AsyncClient,
    context: Context,
    make_folder: Callable[..., dict[str, bytes]],
    config: dict[str, int],
    ending: str,
) -> None:
    folder = make_folder(rank=2, **config)
    files = [("files", (name, content)) for name, content in folder.items()]
    uploaded = (await client.post("/v1/adapters", data={"name": "bot"}, files=files)).json()
    revision_id = uploaded["revision"]["id"]
    for _ in range(2):
        await ingest(context, revision_id)
    async with context.database.read() as session:
        event = (await session.scalars(select(WebhookEvent))).one()
    assert event.type == f"adapter.{ending}"
    assert json.loads(event.body)["data"] == {"id": uploaded["id"], "revision_id": revision_id}
