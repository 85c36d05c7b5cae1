"""What is shared among tenants reaches the workers of a model, also after the server lost it."""

from worker.protocol.types import SharedPrefix

ONE = (SharedPrefix((1, 2, 3)), SharedPrefix((4,), "d" * 64))


async def test_nothing_is_published_at_first(world):
    assert await world.prefixes().read("") is None


async def test_a_reader_is_told_of_changes_once(world):
    prefixes = world.prefixes()
    assert await prefixes.publish(ONE) is True
    assert await prefixes.publish(list(ONE)) is False
    first = await world.prefixes().read("")
    assert first.prefixes == ONE
    assert await prefixes.read(first.version) is None
    assert await prefixes.publish(()) is True
    second = await prefixes.read(first.version)
    assert second.prefixes == ()
    assert second.version != first.version


async def test_a_server_that_lost_it_is_told_again(world):
    prefixes = world.prefixes()
    await prefixes.publish(ONE)
    known = (await prefixes.read("")).version
    await world.flush()
    assert await prefixes.read(known) is None  # nothing known is no reason to forget
    assert await prefixes.publish(ONE) is True
    assert await prefixes.read(known) is None
