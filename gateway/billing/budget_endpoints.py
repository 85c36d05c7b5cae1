from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from gateway.auth.dependencies import AdminPrincipal, CurrentPrincipal
from gateway.auth.idempotency import OperatorOnce
from gateway.billing import budgets
from gateway.billing.accounts import EVERY_MONTH
from gateway.billing.schemas import (
    BudgetList,
    BudgetObject,
    BudgetStanding,
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
