"""Questions to the database that many clients ask at the same time, as one query."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from gateway.kit.database import Database, ReadSession
from worker.queue.coalesced import Coalesced

_KEYS_AT_ONCE = 500

Query = Callable[[ReadSession, Sequence[str]], Awaitable[set[str]]]


class Lookups:
    """`await holds(query, key)`: whether `query` finds `key`. `query` is a function that lives as
    long as the process, as what is asked is gathered for each."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._gathered: dict[Query, Coalesced[str, bool]] = {}

    async def holds(self, query: Query, key: str) -> bool:
        if query not in self._gathered:
            self._gathered[query] = Coalesced(partial(self._ask, query), _KEYS_AT_ONCE)
        return bool(await self._gathered[query].get(key))

    async def _ask(self, query: Query, keys: Sequence[str]) -> dict[str, bool]:
        async with self._database.read() as session:
            return dict.fromkeys(await query(session, keys), True)
