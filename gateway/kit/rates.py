"""Requests and tokens per minute, counted in Redis: one script, one atomic step.

Two buckets a tenant leak at their limit a minute. A request is let through when it fits into
both, and then fills both. Buckets that Redis has lost are filled again from SQL: during the
first minute of a server's life the script asks for what was used (`take` answers None).
"""

from __future__ import annotations

from dataclasses import dataclass

from redis.asyncio import Redis

from worker.queue.connection import address, reaching

WINDOW_SECONDS = 60

_SCRIPT = """
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local window = tonumber(ARGV[1])
redis.call('SET', KEYS[3], now, 'NX')
local young = now - tonumber(redis.call('GET', KEYS[3])) < window
local levels, wait = {}, 0
for i = 1, 2 do
  local limit, cost, used = tonumber(ARGV[3 * i - 1]), tonumber(ARGV[3 * i]), ARGV[3 * i + 1]
  if limit > 0 then
    local known = redis.call('HMGET', KEYS[i], 'level', 'at')
    local level = 0
    if known[1] then
      level = math.max(0, tonumber(known[1]) - (now - tonumber(known[2])) * limit / window)
    elseif used ~= '' then
      level = tonumber(used)
    elseif young then
      return false
    end
    levels[i] = level
    if level + cost > limit then
      wait = math.max(wait, math.ceil((level + cost - limit) * window / limit))
    end
  end
end
local answer = {wait}
for i = 1, 2 do
  local limit, cost = tonumber(ARGV[3 * i - 1]), tonumber(ARGV[3 * i])
  local level = levels[i] or 0
  if levels[i] then
    if wait == 0 then
      level = level + cost
    end
    redis.call('HSET', KEYS[i], 'level', string.format('%.6f', level), 'at', now)
    redis.call('PEXPIRE', KEYS[i], 2 * window)
  end
  answer[#answer + 1] = math.floor(math.max(0, limit - level))
  answer[#answer + 1] = limit > 0 and math.ceil(level * window / limit) or 0
end
return answer
"""


@dataclass(frozen=True, slots=True)
class Bucket:
    """`limit` a minute (0: none), and what the request costs."""

    limit: int
    cost: int


@dataclass(frozen=True, slots=True)
class Taken:
    """`wait_ms` is 0 when the request may go. `remaining` and `reset_ms` (until all is free
    again) are of requests and tokens."""

    wait_ms: int
    remaining: tuple[int, int]
    reset_ms: tuple[int, int]


class Rates:
    def __init__(self, client: Redis) -> None:
        self._address = address(client)
        self._script = client.register_script(_SCRIPT)

    async def take(
        self,
        tenant_id: str,
        requests: Bucket,
        tokens: Bucket,
        used: tuple[int, int] | None = None,
    ) -> Taken | None:
        """`used`: requests and tokens of the last minute, for buckets that are missing; None is
        answered when they must be given. Raises QueueUnavailable."""
        names = ("requests", "tokens")
        keys = [f"batten:{{limits}}:{tenant_id}:{name}" for name in names]
        seeds: tuple[int | str, int | str] = used or ("", "")
        arguments: list[int | str] = [WINDOW_SECONDS * 1000]
        for bucket, seed in zip((requests, tokens), seeds, strict=True):
            arguments += [bucket.limit, bucket.cost, seed]
        with reaching(self._address):
            answer = await self._script(keys=[*keys, "batten:{limits}:born"], args=arguments)
        if answer is None:
            return None
        wait, *rest = map(int, answer)
        return Taken(wait, (rest[0], rest[2]), (rest[1], rest[3]))
