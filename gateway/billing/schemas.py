from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from gateway.models import Price

Nano = Annotated[int, Field(ge=0, le=10**12, description="Nanodollars per token")]


class SetPrice(BaseModel):
    model_config = ConfigDict(extra="forbid")

    model: str = Field(min_length=1, max_length=256, description='A model or adapter; "*": all')
    input_nano: Nano
    cached_nano: Nano
    output_nano: Nano
    batch_percent: int = Field(50, ge=0, le=100, description="Batch class, of the full price")


class PriceObject(SetPrice):
    id: str
    object: Literal["price"] = "price"
    created_at: int


def show_price(price: Price) -> PriceObject:
    return PriceObject(
        id=price.id,
        model=price.model,
        input_nano=price.input_nano,
        cached_nano=price.cached_nano,
        output_nano=price.output_nano,
        batch_percent=price.batch_percent,
        created_at=price.created_at // 1000,
    )
