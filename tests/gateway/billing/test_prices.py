from __future__ import annotations

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.billing.service import NoPrice, amount_nano, dollars, price_for, set_price
from gateway.kit.database import Database
from gateway.models import Price

tokens = st.integers(0, 10**7)


def price(percent: int = 50) -> Price:
    return Price(
        id="p", model="m", input_nano=100, cached_nano=25, output_nano=400, batch_percent=percent
    )


def test_amounts() -> None:
    assert amount_nano(price(), "standard", 1000, 400, 10) == 600 * 100 + 400 * 25 + 10 * 400
    assert amount_nano(price(), "interactive", 1, 0, 0) == 100
    assert amount_nano(price(), "batch", 1000, 400, 10) == 37_000
    assert amount_nano(price(33), "batch", 0, 0, 1) == 132
    odd = price(50)
    odd.input_nano = 1
    assert amount_nano(odd, "batch", 1, 0, 0) == 1


@given(tokens, tokens, tokens)
def test_cached_tokens_and_batches_never_cost_more(prompt: int, cached: int, output: int) -> None:
    cached = min(prompt, cached)
    full = amount_nano(price(), "standard", prompt, 0, output)
    assert isinstance(full, int)
    assert 0 <= amount_nano(price(), "standard", prompt, cached, output) <= full
    assert abs(2 * amount_nano(price(), "batch", prompt, 0, output) - full) <= 1


@pytest.mark.parametrize(
    ("nano", "text"),
    [(0, "0.000000000"), (1, "0.000000001"), (1_500_000_000, "1.500000000"), (-5, "-0.000000005")],
)
def test_dollars_are_exact(nano: int, text: str) -> None:
    assert dollars(nano) == text


async def test_the_newest_price_of_the_most_specific_name(database: Database) -> None:
    async with database.write() as session:
        for model, nano in (("base", 1), ("base", 2), ("adapter", 3)):
            await set_price(session, model, nano, nano, nano, 50)
    async with database.read() as session:
        assert (await price_for(session, ["adapter", "base"])).input_nano == 3
        assert (await price_for(session, ["other", "base"])).input_nano == 2
        assert (await price_for(session, ["other"])).id == "price_default"


async def test_without_any_price_nothing_is_sold(database: Database) -> None:
    async with database.write() as session:
        await session.delete(await session.get_one(Price, "price_default"))
    async with database.read() as session:
        with pytest.raises(NoPrice):
            await price_for(session, ["m"])


async def test_operators_set_prices(admin: httpx.AsyncClient) -> None:
    wanted = {"model": "m", "input_nano": 10, "cached_nano": 1, "output_nano": 20}
    set_ = await admin.post("/v1/admin/prices", json=wanted)
    assert (set_.status_code, set_.json()["batch_percent"]) == (201, 50)
    await admin.post("/v1/admin/prices", json=wanted | {"input_nano": 11})
    listed = (await admin.get("/v1/admin/prices", params={"model": "m"})).json()["data"]
    assert [row["input_nano"] for row in listed] == [11, 10]
    for bad in ({"input_nano": -1}, {"input_nano": 0.5}, {"batch_percent": 101}, {"model": ""}):
        answer = await admin.post("/v1/admin/prices", json=wanted | bad)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(bad)))
