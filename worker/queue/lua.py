"""The queue's scripts, each sent to the server once and then called by its hash."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha1
from importlib import resources
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.exceptions import NoScriptError

from worker.protocol import codec
from worker.queue.connection import address, reaching

_LIBRARY = ("keys", "counters", "records")
_PARTS = {"claim": ("choice", "shares")}
_pack = msgspec.msgpack.Encoder().encode


class Script:
    """Called by its hash, or whole where the server does not know it: in one step, so that a server
    that comes back empty once more has nothing to forget in between."""

    def __init__(self, client: Redis, source: str) -> None:
        self._client: Any = client
        self._source = source
        self._hash = sha1(source.encode(), usedforsecurity=False).hexdigest()

    async def __call__(self, keys: Sequence[str], args: Sequence[bytes | str | int]) -> Any:
        given = (len(keys), *keys, *args)
        try:
            return await self._client.evalsha(self._hash, *given)
        except NoScriptError:
            return await self._client.eval(self._source, *given)


class Scripts:
    """Runs `scripts/{name}.lua` for one model: one script, one atomic step.

    A script reads its arguments as `ask` (a map) and `ARGV[2..]` (bytes).
    """

    def __init__(self, client: Redis, prefix: str) -> None:
        self.address = address(client)
        self._client = client
        self._prefix = prefix
        self._scripts: dict[str, Script] = {}

    async def run(self, name: str, ask: Mapping[str, object], *data: bytes) -> Any:
        """Raises QueueUnavailable."""
        if name not in self._scripts:
            self._scripts[name] = Script(self._client, _source(name))
        with reaching(self.address):
            return await self._scripts[name](keys=[self._prefix], args=[_pack(ask), *data])


def _source(name: str) -> str:
    folder = resources.files("worker.queue") / "scripts"
    names = (*_LIBRARY, *_PARTS.get(name, ()), name)
    parts = [(folder / f"{part}.lua").read_text("utf-8") for part in names]
    return "\n".join([f"local VERSION = {codec.VERSION}", *parts])


def prefix(model: str) -> str:
    """The start of all keys of a model: a hash tag keeps them on one node of a cluster."""
    tag = model.replace("%", "%25").replace("{", "%7B").replace("}", "%7D")
    return f"batten:{{{tag}}}"
