from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.auth.idempotency import Idempotency, fingerprint, forget_old_keys
from gateway.errors import Conflict
from gateway.kit.clock import now_ms
from gateway.kit.database import Database
from gateway.models import IdempotencyKey


async def call(database: Database, tenant, body: str, key: str = "k", delay: float = 0) -> Any:
    made = 0

    async def create() -> dict[str, Any]:
        nonlocal made
        made += 1
        await asyncio.sleep(delay)
        return {"made": body}

    async with database.write() as session:
        idempotency = Idempotency(tenant.tenant_id, "/v1/things", key)
        answer = await idempotency.once(session, fingerprint(body), create, 201)
    return made, answer.status_code, answer.body


async def test_calls_at_once_create_once(database: Database, tenant) -> None:
    answers = await asyncio.gather(*(call(database, tenant, "a", delay=0.05) for _ in range(4)))
    assert sum(made for made, _, _ in answers) == 1
    assert {answer[1:] for answer in answers} == {(201, b'{"made":"a"}')}


async def test_another_body_conflicts(database: Database, tenant) -> None:
    await call(database, tenant, "a")
    with pytest.raises(Conflict):
        await call(database, tenant, "b")


async def test_tenants_do_not_share_keys(database: Database, tenant, other_tenant) -> None:
    assert (await call(database, tenant, "a"))[0] == 1
    assert (await call(database, other_tenant, "b"))[0] == 1


async def test_a_failed_call_leaves_the_key_free(database: Database, tenant) -> None:
    async def fail() -> dict[str, Any]:
        raise Conflict("no")

    with pytest.raises(Conflict, match="no"):
        async with database.write() as session:
            await Idempotency(tenant.tenant_id, "/v1/things", "k").once(session, "f", fail)
    assert (await call(database, tenant, "a"))[0] == 1


async def test_a_key_is_released_by_whom_it_stands_for_alone(database: Database, tenant) -> None:
    await call(database, tenant, "a")
    idempotency = Idempotency(tenant.tenant_id, "/v1/things", "k")
    for body, made in (({"made": "an earlier one"}, 0), ({"made": "a"}, 1)):
        async with database.write() as session:
            await idempotency.release(session, body)
        assert (await call(database, tenant, "a"))[0] == made


async def test_keys_are_forgotten_after_their_hours(database: Database, tenant) -> None:
    await call(database, tenant, "a")
    async with database.write() as session:
        row = await session.get_one(IdempotencyKey, (tenant.tenant_id, "/v1/things", "k"))
        row.created_at = now_ms() - 2 * 3_600_000 - 1
    async with database.write() as session:
        await forget_old_keys(session, 3)
    assert (await call(database, tenant, "a"))[0] == 0
    async with database.write() as session:
        await forget_old_keys(session, 2)
    assert (await call(database, tenant, "b"))[0] == 1
