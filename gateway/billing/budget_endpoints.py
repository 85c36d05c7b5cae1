from __future__ import annotations

from fastapi import APIRouter

from gateway.auth.dependencies import AdminPrincipal, CurrentPrincipal
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


@router.post("/v1/admin/budgets", tags=["admin"])
async def set_budget(
    wanted: SetBudget, context: AppContext, operator: AdminPrincipal
) -> BudgetObject:
    """In force at once. What is accepted already goes on, even over a new hard budget."""
    month = wanted.month or EVERY_MONTH
    async with context.database.write() as session:
        owner = await find_tenant(session, wanted.tenant)
        return show_budget(
            await budgets.set_budget(session, owner.id, month, wanted.soft_nano, wanted.hard_nano)
        )
