"""What only the server in production can do: fail, forget its scripts, lose connections."""

import asyncio
import socket
from pathlib import Path

import pytest

from worker.protocol.codec import encode
from worker.protocol.messages import Cancelled
from worker.protocol.types import Capacity
from worker.queue.base import QueueUnavailable
from worker.queue.connection import address, connect
from worker.queue.redis import (
    Channels,
    RedisCompletionBell,
    RedisEventStream,
    RedisQueue,
    RedisTokenStream,
    RedisWorkerDirectory,
)
from worker.queue.settings import QueueSettings

ROOMY = Capacity(kv_tokens=10**9, adapter_rank=1000, requests=100)
PREFIX = "batten:{org/model}"


@pytest.fixture
async def queue(client):
    queue = RedisQueue(client, "org/model")
    yield queue
    await queue.close()


def closed_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@pytest.fixture
async def nowhere():
    client = connect(f"redis://batten:s3cret@127.0.0.1:{closed_port()}/0")
    yield client
    await client.aclose()


async def test_an_unreachable_server_is_named_without_its_password(nowhere, make):
    queue, channels = RedisQueue(nowhere, "m"), Channels(nowhere)
    with RedisTokenStream(nowhere, "m", channels).follow("r") as reader:
        pass
    calls = [
        queue.epoch(),
        queue.enqueue([make()]),
        queue.claim("w", ROOMY),
        queue.known(["a"]),
        queue.depth(),
        queue.counters(),
        queue.dead_letters(),
        queue.cancellations(0),
        RedisEventStream(nowhere, "m").read("c", 1, 0),
        RedisEventStream(nowhere, "m").ack(["1-0"]),
        RedisEventStream(nowhere, "m").pending(),
        reader.read(0),
        RedisWorkerDirectory(nowhere).workers(),
        RedisCompletionBell(nowhere, channels).ring(["a"]),
    ]
    for error in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(error, QueueUnavailable)
        assert address(nowhere) in str(error)
        assert "REDIS_URL" in str(error)
        assert "s3cret" not in f"{error!r} {error} {error.__cause__!r} {error.__cause__}"
    await channels.close()


async def test_without_a_server_the_bell_is_silent_but_breaks_nothing(nowhere):
    channels = Channels(nowhere)
    async with RedisCompletionBell(nowhere, channels).listen("a") as waiter:
        assert not await waiter.wait(0.01)
    await channels.close()


async def test_a_wrong_password_and_a_missing_right_are_told_apart(client, redis_url, make):
    await client.acl_setuser("bob", enabled=True, passwords=["+right"], commands=["+ping"])
    path = redis_url.removeprefix("unix://")
    for password, words in (("wr0ng", "user name or password"), ("right", "lacks a permission")):
        bob = connect(f"unix://bob@{path}?password={password}")
        with pytest.raises(QueueUnavailable, match=words) as caught:
            await RedisQueue(bob, "m").enqueue([make()])
        assert password not in f"{caught.value} {caught.value.__cause__}".replace(words, "")
        await bob.aclose()
    nobody = connect(f"{redis_url}?password=wr0ng")
    with pytest.raises(QueueUnavailable, match="user name or password"):
        await RedisQueue(nobody, "m").epoch()
    await nobody.aclose()


async def test_a_full_server_refuses_whole_steps(client, queue, make, answer):
    first, second = make(), make()
    await queue.enqueue([first])
    (lease,) = await queue.claim("w", ROOMY)
    await client.config_set("maxmemory", 1)
    try:
        with pytest.raises(QueueUnavailable, match="maxmemory"):
            await queue.enqueue([second])
        with pytest.raises(QueueUnavailable, match="maxmemory"):
            await queue.finish(lease, answer(lease))
    finally:
        await client.config_set("maxmemory", 0)
    assert await queue.known([second.request_id]) == [False]
    assert await queue.finish(lease, answer(lease))
    assert await RedisEventStream(client, "org/model").pending() == 1


async def test_a_replica_is_told_apart(client, queue, make):
    await client.replicaof("127.0.0.1", closed_port())
    try:
        with pytest.raises(QueueUnavailable, match="replica"):
            await queue.enqueue([make()])
    finally:
        await client.replicaof("NO", "ONE")


async def test_a_bug_in_our_commands_is_not_called_unavailable(client, queue, make):
    await client.set(f"{PREFIX}:depth", "no hash")
    with pytest.raises(Exception, match="WRONGTYPE"):
        await queue.enqueue([make()])


async def test_scripts_are_sent_again_when_the_server_forgot_them(client, queue, make):
    await queue.enqueue([make()])
    await client.script_flush()
    assert await queue.enqueue([make()]) == ["enqueued"]
    assert len(await queue.claim("w", ROOMY)) == 2


async def test_a_server_may_forget_a_script_again_as_soon_as_it_has_it(
    client, queue, make, monkeypatch
):
    load = client.script_load

    async def load_in_vain(script):
        digest = await load(script)
        await client.script_flush()
        return digest

    monkeypatch.setattr(client, "script_load", load_in_vain)
    await client.script_flush()
    assert await queue.enqueue([make()]) == ["enqueued"]


async def test_one_read_bears_a_server_that_loses_everything_again_and_again(client):
    events = RedisEventStream(client, "org/model")
    reading = asyncio.create_task(events.read("c", 10, 20))
    for _ in range(3):
        while not (await client.info("clients"))["blocked_clients"]:
            assert not reading.done()
        await client.flushall()
        await client.client_kill_filter(_type="normal", skipme=True)
        while await client.exists(f"{PREFIX}:events") == 0:
            assert not reading.done()
    await client.xadd(f"{PREFIX}:events", {"event": encode(Cancelled(request_id="r", attempt=1))})
    assert [entry.event.request_id for entry in await reading] == ["r"]


async def test_all_keys_of_a_model_share_one_hash_tag(client, make, answer):
    queue = RedisQueue(client, "odd{model}")
    await queue.epoch()
    await queue.enqueue([make(deadline=9e9), make(alone=True), make()])
    leases = await queue.claim("w", ROOMY)
    await queue.finish(leases[0], answer(leases[0]))
    await queue.cancel(["x"])
    keys = [key.decode() for key in await client.keys("*")]
    assert len(keys) > 8
    assert all(key.startswith("batten:{odd%7Bmodel%7D}:") for key in keys)
    await queue.close()


async def test_a_worker_stays_with_its_suspects_as_long_as_it_renews(client, queue, make):
    await queue.enqueue([make(suspects="half"), make()])
    leases = await queue.claim("w", ROOMY)
    (confined,) = await client.keys("*:confined:w")
    await client.pexpire(confined, 5_000)
    await queue.renew("w", leases)
    assert await client.pttl(confined) > 30_000


async def test_readers_that_are_gone_and_hold_nothing_are_forgotten(client, queue, make, answer):
    async def readers() -> list[str]:
        found = await client.xinfo_consumers("batten:{org/model}:events", "collector")
        return sorted(one["name"].decode() for one in found)

    await queue.enqueue([make(), make()])
    for lease in await queue.claim("w", ROOMY):
        await queue.finish(lease, answer(lease))
    patient = RedisEventStream(client, queue.model)
    (acknowledged,) = await patient.read("done", 1, 0)
    (held,) = await patient.read("dead-with-work", 1, 0)
    await patient.ack([acknowledged.entry_id])
    await patient.read("alive", 1, 0)
    assert await readers() == ["alive", "dead-with-work", "done"]
    hasty = RedisEventStream(client, queue.model, settings=QueueSettings(reclaim_seconds=0.01))
    while not (again := await hasty.read("alive", 10, 0)):
        assert "dead-with-work" in await readers()
    assert again == [held]
    while await readers() != ["alive"]:
        await hasty.read("alive", 10, 0)


async def test_models_do_not_see_each_other(client, queue, make):
    other = RedisQueue(client, "another")
    request = make()
    await queue.enqueue([request])
    assert await other.claim("w", ROOMY) == []
    assert await other.known([request.request_id]) == [False]


async def test_a_claim_whose_answer_was_lost_is_answered_again(client, queue, make, monkeypatch):
    requests = [make(), make()]
    await queue.enqueue(requests)
    run = queue._scripts.run

    async def answer_lost(*args):
        await run(*args)
        raise QueueUnavailable("the answer was lost")

    monkeypatch.setattr(queue._scripts, "run", answer_lost)
    with pytest.raises(QueueUnavailable):
        await queue.claim("w", ROOMY)
    monkeypatch.setattr(queue._scripts, "run", run)
    await queue.enqueue([make()])
    leases = await queue.claim("w", ROOMY)
    assert [lease.request for lease in leases] == requests
    assert len(await queue.claim("w", ROOMY)) == 1


async def test_cancel_notices_survive_a_broken_connection(client, queue, make):
    await queue.enqueue([make()])
    (lease,) = await queue.claim("w", ROOMY)
    assert await queue.cancellations(0.01) == []
    await client.client_kill_filter(_type="pubsub", skipme=False)
    assert await queue.cancellations(0.01) == []
    await queue.cancel([lease.request.request_id])
    assert await queue.cancellations(20) == [lease.request.request_id]


async def test_pending_entries_that_were_deleted_are_passed_over(client):
    stream = f"{PREFIX}:events"
    dead, alive = RedisEventStream(client, "org/model"), RedisEventStream(client, "org/model")
    assert await dead.read("dead", 1, 0) == []
    ids = [
        await client.xadd(stream, {"event": encode(Cancelled(request_id=f"r{i}", attempt=1))})
        for i in range(5)
    ]
    held = await dead.read("dead", 10, 0)
    await client.xdel(stream, *ids[:3])
    restarted = RedisEventStream(client, "org/model")
    assert await restarted.read("dead", 2, 0) + await restarted.read("dead", 2, 0) == held[3:]
    await client.xclaim(stream, "collector", "dead", 0, ids[3:], idle=3_600_000, justid=True)
    assert await alive.read("alive", 10, 0) == held[3:]


async def test_a_server_that_dies_and_comes_back_empty(mortal_redis, make, answer):
    client = connect(mortal_redis.url)
    queue, events = RedisQueue(client, "m"), RedisEventStream(client, "m")
    channels = Channels(client)
    bell = RedisCompletionBell(client, channels)
    epoch = await queue.epoch()
    await queue.enqueue([make()])
    (lease,) = await queue.claim("w", ROOMY)
    assert await queue.cancellations(0.01) == []
    reading = asyncio.create_task(events.read("c", 1, 20))
    async with bell.listen("a") as waiter:
        mortal_redis.kill()
        with pytest.raises(QueueUnavailable):
            await reading
        with pytest.raises(QueueUnavailable):
            await queue.finish(lease, answer(lease))
        with pytest.raises(QueueUnavailable):
            await queue.cancellations(0.01)
        mortal_redis.start()
        assert await queue.epoch() != epoch
        assert not await queue.finish(lease, answer(lease))
        assert await queue.cancellations(0.01) == []
        again = make()
        await queue.enqueue([again])
        (lease,) = await queue.claim("w", ROOMY)
        await queue.cancel([again.request_id])
        assert await queue.cancellations(20) == [again.request_id]
        await queue.finish(lease, answer(lease))
        assert len(await events.read("c", 10, 0)) == 1
        assert await waiter.wait(20)  # the subscription was made again
        await bell.ring(["a"])
        assert await waiter.wait(20)
    await channels.close()
    await client.aclose()


async def test_tombstones_and_token_streams_expire(client, queue, make, answer):
    await queue.enqueue([make(stream=True)])
    (lease,) = await queue.claim("w", ROOMY)
    await queue.finish(lease, answer(lease))
    await queue.cancel(["gone"])
    assert 0 < await client.pttl(f"{PREFIX}:tomb:gone") <= 86_400_000
    assert 0 < await client.pttl(f"{PREFIX}:tokens:{lease.request.request_id}") <= 600_000


async def test_nothing_but_history_remains_of_finished_work(client, queue, make, answer):
    requests = [make(f"t{i % 3}", deadline=9e9, stream=False) for i in range(30)]
    await queue.enqueue(requests)
    for lease in await queue.claim("w", ROOMY):
        await queue.finish(lease, answer(lease))
    events = RedisEventStream(client, "org/model")
    await events.ack([entry.entry_id for entry in await events.read("c", 100, 0)])
    await queue.forget([request.request_id for request in requests])
    names = {key.decode().removeprefix(f"{PREFIX}:") for key in await client.keys("*")}
    lengths = {f"length:t{i}\0" for i in range(3)}
    assert names - lengths == {"sequence", "depth", "credits", "floors", "claim:w", "events"}


def test_the_address_names_sockets_and_ports(redis_url):
    assert address(connect("redis://u:p@example:7000/1")) == "example:7000"
    assert address(connect(redis_url)) == f"unix:{Path(redis_url.removeprefix('unix://'))}"
