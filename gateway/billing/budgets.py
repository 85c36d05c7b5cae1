"""Budgets: what operators set, and where a tenant stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import select

from gateway.billing.accounts import budget_of, spent_in, warn
from gateway.errors import NotFound
from gateway.kit.clock import now_ms
from gateway.kit.database import ReadSession, WriteSession
from gateway.kit.months import month_of
from gateway.models import Account, Budget


@dataclass(frozen=True, slots=True)
class Standing:
    """A tenant's month so far, in nanodollars; a budget of None is no limit."""

    month: str
    soft: int | None
    hard: int | None
    spent: int
    reserved: int

    @property
    def left(self) -> int | None:
        """What may still be reserved."""
        return None if self.hard is None else max(0, self.hard - self.spent - self.reserved)


async def standing(session: ReadSession, tenant_id: str) -> Standing:
    month = month_of(now_ms())
    account = await session.get_one(Account, tenant_id)
    budget = await budget_of(session, tenant_id, month)
    return Standing(
        month,
        budget.soft_nano if budget else None,
        budget.hard_nano if budget else None,
        spent_in(account, month),
        account.reserved_nano,
    )


async def set_budget(
    session: WriteSession, tenant_id: str, month: str, soft: int | None, hard: int | None
) -> Budget:
    """In force for what comes next; what runs goes on. A soft budget that is set anew is told of
    anew."""
    account = await _locked(session, tenant_id)
    budget = await session.get(Budget, (tenant_id, month))
    if budget is None:
        budget = Budget(tenant_id=tenant_id, month=month, created_at=now_ms())
        session.add(budget)
    budget.soft_nano, budget.hard_nano = soft, hard
    account.warned_month = ""
    await session.flush()
    if account.month == month_of(now_ms()):
        await warn(session, [account])
    return budget


async def delete_budget(session: WriteSession, tenant_id: str, month: str) -> None:
    """What was reserved or spent stays so. Where it was the one in force the budget of every month
    is, if there is one, and its soft budget is told of anew. Raises NotFound."""
    account = await _locked(session, tenant_id)
    this_month = month_of(now_ms())
    budget = await session.get(Budget, (tenant_id, month))
    if budget is None:
        raise NotFound("The tenant has no such budget.", code="budget_not_found", param="month")
    was_in_force = await budget_of(session, tenant_id, this_month) is budget
    await session.delete(budget)
    await session.flush()
    if was_in_force:
        account.warned_month = ""
        if account.month == this_month:
            await warn(session, [account])


async def _locked(session: WriteSession, tenant_id: str) -> Account:
    rows = select(Account).where(Account.tenant_id == tenant_id)
    return (await session.scalars(rows.with_for_update())).one()


async def budgets(session: ReadSession, tenant_id: str | None) -> Sequence[Budget]:
    rows = select(Budget).order_by(Budget.tenant_id, Budget.month)
    if tenant_id is not None:
        rows = rows.where(Budget.tenant_id == tenant_id)
    return (await session.scalars(rows)).all()
