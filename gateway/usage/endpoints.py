from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from gateway.auth.dependencies import CurrentPrincipal
from gateway.errors import BadRequest
from gateway.kit.clock import now_ms
from gateway.kit.dependencies import AppContext
from gateway.usage.repository import GroupBy, UsageRepository, total_of
from gateway.usage.schemas import UsageReport, show_group, show_storage, show_totals

router = APIRouter(prefix="/v1/usage", tags=["usage"])

HOUR = 3600
MONTH_SECONDS = 30 * 86_400
Second = Annotated[int | None, Query(ge=0, le=2**40)]


@router.get("")
async def get_usage(
    context: AppContext,
    principal: CurrentPrincipal,
    start: Annotated[Second, Query(alias="from", description="Unix seconds")] = None,
    end: Annotated[Second, Query(alias="to", description="Unix seconds, not included")] = None,
    group_by: GroupBy | None = None,
) -> UsageReport:
    """Tokens and money of the time [from, to); by default the last 30 days, from the beginning of
    an hour."""
    end = end if end is not None else now_ms() // 1000 + 1
    start = start if start is not None else max(0, end - MONTH_SECONDS) // HOUR * HOUR
    if start >= end:
        raise BadRequest("'from' must be before 'to'.", param="from", code="invalid_value")
    async with context.database.read() as session:
        repository = UsageRepository(session, principal.scope)
        groups = await repository.sums(start * 1000, end * 1000, group_by)
        storage = await repository.storage(start * 1000, end * 1000)
    return UsageReport(
        start=start,
        end=end,
        group_by=group_by,
        data=[show_group(group, group_by == "day") for group in groups] if group_by else [],
        total=show_totals(total_of(groups)),
        storage=show_storage(*storage),
    )
