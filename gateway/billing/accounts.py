"""What a tenant has reserved and spent, and the budget that bounds both.

    accept   reserve the most it may cost, or refuse: spent + reserved ≤ hard budget
    end      release the reservation and add what was used, in the transaction that ends it

An account is one row, locked last and for as long as a commit takes. Those of many tenants are
locked in the order of their ids, once per transaction, however many requests it ends.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from sqlalchemy import ColumnElement, case, func, select, update

from gateway.billing.service import dollars
from gateway.errors import TooManyRequests
from gateway.kit.clock import now_ms
from gateway.kit.database import ReadSession, WriteSession
from gateway.kit.months import month_of
from gateway.models import Account, Budget
from gateway.webhooks.events import NewEvent
from gateway.webhooks.service import record_all

EVERY_MONTH = "*"
_UNLIMITED = 2**63 - 1


class BudgetExceeded(TooManyRequests):
    """Accepting it could take the tenant over its hard budget."""

    default_code = "budget_exceeded"


@dataclass(slots=True)
class Change:
    """Of one account, in nanodollars: reservations that ended, and what was used."""

    released: int = 0
    spent: int = 0


async def reserve(session: WriteSession, tenant_id: str, nano: int) -> None:
    """Call last in a transaction. Raises BudgetExceeded."""
    month = month_of(now_ms())
    won = await session.scalar(
        update(Account)
        .where(
            Account.tenant_id == tenant_id,
            Account.reserved_nano + _spent_in(month) + nano <= _hard_budget(tenant_id, month),
        )
        .values(reserved_nano=Account.reserved_nano + nano)
        .returning(Account.tenant_id)
        .execution_options(synchronize_session=False)
    )
    if won is None:
        raise await _refusal(session, tenant_id, month, nano)


async def apply(session: WriteSession, changes: Mapping[str, Change], at: int) -> None:
    """Call last in a transaction. `changes` by tenant; what was spent was so at the time `at`."""
    ids = [tenant_id for tenant_id, change in changes.items() if change.released or change.spent]
    if not ids:
        return
    accounts = await session.scalars(
        select(Account)
        .where(Account.tenant_id.in_(ids))
        .order_by(Account.tenant_id)
        .with_for_update()
        .execution_options(populate_existing=True)
    )
    month, locked = month_of(at), accounts.all()
    for account in locked:
        change = changes[account.tenant_id]
        account.reserved_nano -= change.released
        if account.month < month:
            account.month, account.spent_nano = month, 0
        if account.month == month:
            account.spent_nano += change.spent
    await warn(session, locked)


async def warn(session: WriteSession, accounts: Collection[Account]) -> None:
    """Tells tenants, once a month, that what they spent has reached their soft budget. The
    accounts are locked."""
    unwarned = {a.tenant_id: a for a in accounts if a.warned_month < a.month and a.spent_nano}
    if not unwarned:
        return
    months = {EVERY_MONTH, *(account.month for account in unwarned.values())}
    budgets = await session.scalars(
        select(Budget).where(Budget.tenant_id.in_(unwarned), Budget.month.in_(months))
    )
    soft = {(budget.tenant_id, budget.month): budget.soft_nano for budget in budgets}
    events = []
    for tenant_id, account in sorted(unwarned.items()):
        limit = soft.get((tenant_id, account.month), soft.get((tenant_id, EVERY_MONTH)))
        if limit is not None and account.spent_nano >= limit:
            account.warned_month = account.month
            data = {"id": account.month}
            events.append(NewEvent(tenant_id, "budget.threshold_reached", data))
    await record_all(session, events)


async def budget_of(
    session: ReadSession | WriteSession, tenant_id: str, month: str
) -> Budget | None:
    """The month's own, or the one of every month."""
    return await session.scalar(
        select(Budget)
        .where(Budget.tenant_id == tenant_id, Budget.month.in_((month, EVERY_MONTH)))
        .order_by(_is_general())
        .limit(1)
    )


def spent_in(account: Account, month: str) -> int:
    return account.spent_nano if account.month == month else 0


def _spent_in(month: str) -> ColumnElement[int]:
    """A clock that is behind at the turn of a month sees what is spent already."""
    return case((Account.month >= month, Account.spent_nano), else_=0)


def _hard_budget(tenant_id: str, month: str) -> ColumnElement[int]:
    hard = (
        select(Budget.hard_nano)
        .where(Budget.tenant_id == tenant_id, Budget.month.in_((month, EVERY_MONTH)))
        .order_by(_is_general())
        .limit(1)
    )
    return func.coalesce(hard.scalar_subquery(), _UNLIMITED)


def _is_general() -> ColumnElement[int]:
    return case((Budget.month == EVERY_MONTH, 1), else_=0)


async def _refusal(session: WriteSession, tenant_id: str, month: str, nano: int) -> BudgetExceeded:
    account = await session.get_one(Account, tenant_id, populate_existing=True)
    budget = await budget_of(session, tenant_id, month)
    hard = budget.hard_nano if budget and budget.hard_nano is not None else 0
    return BudgetExceeded(
        f"Your hard budget for {month} is ${dollars(hard)}: ${dollars(spent_in(account, month))} "
        f"are spent, ${dollars(account.reserved_nano)} are reserved for what has not ended, and "
        f"this may cost ${dollars(nano)}."
    )
