"""What work costs: integer nanodollars throughout, rounded once per request."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.billing.repository import PriceRepository
from gateway.errors import BadRequest
from gateway.kit.clock import now_ms
from gateway.kit.database import ReadSession, WriteSession
from gateway.kit.ids import new_id
from gateway.models import Price
from worker.protocol.types import RequestClass

EVERY_MODEL = "*"
NANO = 10**9


class NoPrice(BadRequest):
    """Nothing may run that cannot be billed."""


async def price_for(session: ReadSession | WriteSession, model_names: Sequence[str]) -> Price:
    """The price in force for the first of `model_names` that has one (adapter, then base
    model), else the one for every model. Raises NoPrice."""
    names = [*model_names, EVERY_MODEL]
    prices = await PriceRepository(session).newest(names)
    for name in names:
        if name in prices:
            return prices[name]
    raise NoPrice(f"No price is set for '{names[0]}'.", code="no_price", param="model")


def amount_nano(
    price: Price, request_class: RequestClass, prompt: int, cached: int, completion: int
) -> int:
    """`cached` of the `prompt` tokens cost less. Half a nanodollar is rounded up."""
    full = (
        (prompt - cached) * price.input_nano
        + cached * price.cached_nano
        + completion * price.output_nano
    )
    if request_class != "batch":
        return full
    return (full * price.batch_percent + 50) // 100


def most_nano(price: Price, request_class: RequestClass, prompt: int, completion: int) -> int:
    """The most that it can cost, whatever is cached."""
    return max(
        amount_nano(price, request_class, prompt, cached, completion) for cached in (0, prompt)
    )


def dollars(nano: int) -> str:
    """Exact: 1_500_000_000 → "1.500000000"."""
    sign, amount = ("-" if nano < 0 else ""), abs(nano)
    return f"{sign}{amount // NANO}.{amount % NANO:09d}"


async def set_price(
    session: WriteSession,
    model: str,
    input_nano: int,
    cached_nano: int,
    output_nano: int,
    batch_percent: int,
) -> Price:
    """A new version, for what is submitted from now on; what is submitted keeps its price."""
    price = Price(
        id=new_id("price"),
        model=model,
        input_nano=input_nano,
        cached_nano=cached_nano,
        output_nano=output_nano,
        batch_percent=batch_percent,
        created_at=now_ms(),
    )
    PriceRepository(session).add(price)
    await session.flush()
    return price
