from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse

from gateway.auth.dependencies import AdminPrincipal, CurrentPrincipal
from gateway.auth.idempotency import OperatorOnce
from gateway.billing import budgets
from gateway.billing.accounts import EVERY_MONTH
from gateway.billing.schemas import (
    BudgetDeleted,
    BudgetList,
    BudgetObject,
    BudgetStanding,
    Month,
    SetBudget,
    show_budget,
    show_standing,
)
from gateway.kit.database import WriteSession
from gateway.kit.dependencies import AppContext
from gateway.tenants.service import find_tenant

router = APIRouter()


@router.get("/v1/budget", tags=["usage"])
async def get_budget(context: AppContext, principal: CurrentPrincipal) -> BudgetStanding:
    """What this month has cost so far, what is reserved, and what is left."""
    async with context.database.read() as session:
        return show_standing(await budgets.standing(session, principal.tenant_id))


@router.get("/v1/admin/budgets", tags=["admin"])
async def list_budgets(
    context: AppContext, operator: AdminPrincipal, tenant: str | None = None
) -> BudgetList:
    async with context.database.read() as session:
        owner = tenant and (await find_tenant(session, tenant)).id
        return BudgetList(data=[show_budget(row) for row in await budgets.budgets(session, owner)])


@router.post("/v1/admin/budgets", tags=["admin"], response_model=BudgetObject)
async def set_budget(wanted: SetBudget, once: OperatorOnce) -> JSONResponse:
    """In force at once. What is accepted already goes on, even over a new hard budget."""
    month = wanted.month or EVERY_MONTH

    async def change(session: WriteSession) -> dict[str, Any]:
        owner = await find_tenant(session, wanted.tenant)
        soft, hard = wanted.soft_nano, wanted.hard_nano
        budget = await budgets.set_budget(session, owner.id, month, soft, hard)
        return show_budget(budget).model_dump()

    return await once.answer(change)


@router.delete("/v1/admin/budgets/{tenant}", tags=["admin"])
async def delete_budget(
    tenant: str,
    context: AppContext,
    operator: AdminPrincipal,
    month: Annotated[Month | None, Query()] = None,
) -> BudgetDeleted:
    """The month's own, or without `month` the one of every month. Nothing that is accepted
    changes; from now on the budget of every month is in force where there is one, else none."""
    async with context.database.write() as session:
        owner = await find_tenant(session, tenant)
        await budgets.delete_budget(session, owner.id, month or EVERY_MONTH)
    return BudgetDeleted(tenant_id=owner.id, month=month)
