from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from gateway.billing.accounts import EVERY_MONTH
from gateway.billing.budgets import Standing
from gateway.billing.service import dollars
from gateway.kit.months import MONTH
from gateway.models import Budget, Price

Month = Annotated[str, Field(pattern=f"^{MONTH}$", description="UTC, as 2026-11")]
Amount = Annotated[int, Field(ge=0, le=10**18, description="Nanodollars")]
Nano = Annotated[int, Field(ge=0, le=10**9, description="Nanodollars per token")]


class SetPrice(BaseModel):
    model_config = ConfigDict(extra="forbid")

    model: str = Field(
        min_length=1,
        max_length=256,
        description='A base model, a shared adapter, the id of a tenant\'s adapter; "*": all',
    )
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


class SetBudget(BaseModel):
    """A soft budget is told of when it is reached (`budget.threshold_reached`), a hard one is
    never passed. Null is no limit; without `month` it is for every month that has none of its
    own."""

    model_config = ConfigDict(extra="forbid")

    tenant: str = Field(description="Id or name")
    month: Month | None = None
    soft_nano: Amount | None = None
    hard_nano: Amount | None = None


class BudgetObject(BaseModel):
    object: Literal["budget"] = "budget"
    tenant_id: str
    month: str | None
    soft_nano: int | None
    hard_nano: int | None


class BudgetList(BaseModel):
    object: Literal["list"] = "list"
    data: list[BudgetObject]


class BudgetDeleted(BaseModel):
    object: Literal["budget.deleted"] = "budget.deleted"
    tenant_id: str
    month: str | None
    deleted: Literal[True] = True


class BudgetStanding(BaseModel):
    """This month. `reserved`: the most that what has not ended may cost; `left`: what may still
    be asked for, null without a hard budget. Amounts are dollars."""

    id: str
    object: Literal["budget.standing"] = "budget.standing"
    month: str
    soft: str | None
    hard: str | None
    spent: str
    reserved: str
    left: str | None
    soft_nano: int | None
    hard_nano: int | None
    spent_nano: int
    reserved_nano: int
    left_nano: int | None


def show_budget(budget: Budget) -> BudgetObject:
    return BudgetObject(
        tenant_id=budget.tenant_id,
        month=None if budget.month == EVERY_MONTH else budget.month,
        soft_nano=budget.soft_nano,
        hard_nano=budget.hard_nano,
    )


def show_standing(at: Standing) -> BudgetStanding:
    def shown(nano: int | None) -> str | None:
        return None if nano is None else dollars(nano)

    return BudgetStanding(
        id=at.month,
        month=at.month,
        soft=shown(at.soft),
        hard=shown(at.hard),
        spent=dollars(at.spent),
        reserved=dollars(at.reserved),
        left=shown(at.left),
        soft_nano=at.soft,
        hard_nano=at.hard,
        spent_nano=at.spent,
        reserved_nano=at.reserved,
        left_nano=at.left,
    )
