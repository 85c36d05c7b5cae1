"""What a gateway process holds: built once at its edge, passed down, closed at the end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from obstore.store import ObjectStore

from gateway.kit.database import Database
from gateway.kit.lookups import Lookups
from gateway.kit.prompts import PromptsCatalogue
from gateway.kit.queues import Queues
from gateway.kit.secret_key import load_secret_key
from gateway.kit.shared_prefixes import SharedPrefixTable
from gateway.kit.template_process import TemplateProcess
from gateway.settings import Settings
from worker.protocol.object_store import open_store
from worker.queue.settings import QueueSettings


@dataclass(frozen=True, slots=True)
class Context:
    settings: Settings
    database: Database
    store: ObjectStore
    queues: Queues
    templates: TemplateProcess
    secret_key: bytes = field(repr=False)
    shared_prefixes: SharedPrefixTable = field(default_factory=SharedPrefixTable)
    prompts: PromptsCatalogue = field(init=False)
    lookups: Lookups = field(init=False)

    def __post_init__(self) -> None:
        neutral = self.settings.generation_config == "neutral"
        object.__setattr__(self, "prompts", PromptsCatalogue(neutral))
        object.__setattr__(self, "lookups", Lookups(self.database))


class MissingSetting(Exception):
    """A process cannot start: names the setting and what to do."""


@asynccontextmanager
async def open_context(settings: Settings) -> AsyncIterator[Context]:
    """Raises MissingSetting."""
    if settings.redis_url is None:
        raise MissingSetting(
            "REDIS_URL is not set. `batten up` starts an embedded server; a process on its own "
            "needs the URL of one, such as redis://127.0.0.1:6379/0."
        )
    settings.data.mkdir(parents=True, exist_ok=True)
    database = Database(settings.effective_database_url)
    queues = Queues(
        settings.redis_url.get_secret_value(),
        QueueSettings.with_lease(settings.lease_seconds),
        settings.redis_connections,
    )
    templates = TemplateProcess(settings.template_seconds)
    store = open_store(settings.effective_store, settings.store_seconds)
    try:
        yield Context(settings, database, store, queues, templates, load_secret_key(settings))
    finally:
        templates.close()
        await queues.close()
        await database.close()
