"""Questions that are asked at the same time, answered by one call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from itertools import islice
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Coalesced(Generic[K, V]):
    """`get(key)` is `(await fetch([key])).get(key)`, for up to `most` keys a call.

    While a call is on its way, further keys gather for the next: the busier, the more of them
    share one. What `fetch` raises, everybody gets who waits for that call.
    """

    def __init__(self, fetch: Callable[[Sequence[K]], Awaitable[Mapping[K, V]]], most: int) -> None:
        self._fetch = fetch
        self._most = most
        self._asked: dict[K, asyncio.Future[V | None]] = {}
        self._working: asyncio.Task[None] | None = None

    async def get(self, key: K) -> V | None:
        answer = self._asked.get(key)
        if answer is None:
            answer = self._asked[key] = asyncio.get_running_loop().create_future()
        if self._working is None:
            self._working = asyncio.create_task(self._work())
        return await asyncio.shield(answer)

    async def _work(self) -> None:
        try:
            while self._asked:
                keys = list(islice(self._asked, self._most))
                answers = {key: self._asked.pop(key) for key in keys}
                await self._answer(answers)
        finally:
            self._working = None

    async def _answer(self, answers: Mapping[K, asyncio.Future[V | None]]) -> None:
        try:
            found = await self._fetch(list(answers))
        except Exception as error:  # handed to whoever awaits
            for answer in answers.values():
                answer.set_exception(error)
                answer.exception()  # whoever asked may be gone
            return
        for key, answer in answers.items():
            answer.set_result(found.get(key))
