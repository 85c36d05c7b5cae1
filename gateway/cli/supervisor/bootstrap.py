"""What a system needs before its processes start: tables, the base model, an operator's key."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from sqlalchemy import select

from gateway.adapters.base_models import BaseModelUnreadable, register_configured_model
from gateway.cli.errors import CommandError
from gateway.kit.database import Database
from gateway.kit.migrations import migrate
from gateway.models import ApiKey
from gateway.settings import Settings
from gateway.tenants.service import create_key


@dataclass(frozen=True, slots=True)
class Bootstrapped:
    """`new_admin_key` exists only here: the database keeps its hash."""

    model_name: str | None
    new_admin_key: str | None = field(repr=False)


def bootstrap(settings: Settings, say: Callable[[str], None]) -> Bootstrapped:
    """Idempotent. Raises CommandError, or SQLAlchemy's errors when there is no database."""
    say("preparing the database")
    migrate(settings.effective_database_url)
    return asyncio.run(_register(settings))


async def _register(settings: Settings) -> Bootstrapped:
    database = Database(settings.effective_database_url)
    try:
        async with database.write() as session:
            model = await register_configured_model(session, settings)
            new_key = None
            if settings.admin_key is None and not await session.scalar(_operator_keys):
                new_key = (await create_key(session, None, "admin")).secret
            return Bootstrapped(model.name if model else None, new_key)
    except BaseModelUnreadable as error:
        raise CommandError(
            f"{str(error).partition(chr(10))[0]}: --model (BATTEN_MODEL) must name a Hugging Face "
            "model folder or a hub id such as org/name"
        ) from error
    finally:
        await database.close()


_operator_keys = (
    select(ApiKey.id).where(ApiKey.tenant_id.is_(None), ApiKey.revoked_at.is_(None)).limit(1)
)
