"""What a tenant does per minute or hour, counted in Redis: one script, one atomic step.

Each bucket leaks at its limit per window. A call is let through when it fits into all of them, and
then fills all. Buckets that Redis has lost are filled again from SQL: while a server is younger
than the window the script asks for what was used (`take` answers None).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from redis.asyncio import Redis

from worker.queue.connection import address, reaching
from worker.queue.lua import Script

MINUTE_SECONDS = 60
HOUR_SECONDS = 3600

_SCRIPT = """
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local born_key = KEYS[#KEYS]
redis.call('SET', born_key, now, 'NX')
local age = now - tonumber(redis.call('GET', born_key))
local buckets, wait = {}, 0
for i = 1, #KEYS - 1 do
  local window, limit, cost, used = unpack(ARGV, 4 * i - 3, 4 * i)
  local bucket = {window = tonumber(window), limit = tonumber(limit), cost = tonumber(cost)}
  local known = redis.call('HMGET', KEYS[i], 'level', 'at')
  bucket.level = 0
  if known[1] then
    local leaked = (now - tonumber(known[2])) * bucket.limit / bucket.window
    bucket.level = math.max(0, tonumber(known[1]) - leaked)
  elseif used ~= '' then
    bucket.level = tonumber(used)
  elseif age < bucket.window then
    return false
  end
  local over = bucket.level + bucket.cost - bucket.limit
  if over > 0 then
    wait = math.max(wait, math.ceil(over * bucket.window / bucket.limit))
  end
  buckets[i] = bucket
end
local answer = {wait}
for i, bucket in ipairs(buckets) do
  if wait == 0 then
    bucket.level = bucket.level + bucket.cost
  end
  redis.call('HSET', KEYS[i], 'level', string.format('%.6f', bucket.level), 'at', now)
  redis.call('PEXPIRE', KEYS[i], 2 * bucket.window)
  answer[#answer + 1] = math.floor(math.max(0, bucket.limit - bucket.level))
  answer[#answer + 1] = math.ceil(bucket.level * bucket.window / bucket.limit)
end
return answer
"""


@dataclass(frozen=True, slots=True)
class Bucket:
    """`limit` per window, and what the call costs."""

    name: str
    limit: int
    cost: int
    window_seconds: int = MINUTE_SECONDS


@dataclass(frozen=True, slots=True)
class Taken:
    """`wait_ms` is 0 when the call may go. `remaining` and `reset_ms` (until all is free again)
    are of the buckets, in order."""

    wait_ms: int
    remaining: tuple[int, ...]
    reset_ms: tuple[int, ...]


class Rates:
    def __init__(self, client: Redis) -> None:
        self._address = address(client)
        self._script = Script(client, _SCRIPT)

    async def take(
        self, tenant_id: str, buckets: Sequence[Bucket], used: Sequence[int] | None = None
    ) -> Taken | None:
        """`used`: what each bucket's window saw, for buckets that are missing; None is answered
        when it must be given. Raises QueueUnavailable."""
        keys = [f"batten:{{limits}}:{tenant_id}:{bucket.name}" for bucket in buckets]
        arguments: list[int | str] = []
        seeds: Sequence[int | str] = used or [""] * len(buckets)
        for bucket, seed in zip(buckets, seeds, strict=True):
            arguments += [bucket.window_seconds * 1000, bucket.limit, bucket.cost, seed]
        with reaching(self._address):
            answer = await self._script(keys=[*keys, "batten:{limits}:born"], args=arguments)
        if answer is None:
            return None
        wait, *rest = map(int, answer)
        return Taken(wait, tuple(rest[::2]), tuple(rest[1::2]))
