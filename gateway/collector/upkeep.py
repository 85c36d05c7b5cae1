"""What keeps SQL and the queue in step when either loses something."""

from __future__ import annotations

import msgspec
import structlog
from sqlalchemy import select, update

from gateway.collector.fold import Fold
from gateway.kit.clock import now_ms
from gateway.kit.context import Context
from gateway.models import BaseModel, Request
from gateway.models.request import is_out
from worker.protocol.types import RequestId, WorkerLimits

GRACE_MS = 30_000
_PAGE = 1000

_log = structlog.get_logger(__name__)


class Epochs:
    """Notices that the queue's server has lost its data, and sends its requests round again."""

    def __init__(self, context: Context, model: str, fold: Fold) -> None:
        self._context = context
        self._model = model
        self._fold = fold
        self._seen = ""

    async def check(self, consumer: str) -> int:
        """Returns how many requests of older epochs are queued again."""
        epoch = await self._context.queues.queue(self._model).epoch()
        if epoch == self._seen:
            return 0
        while await self._context.queues.events(self._model).pending():
            if not await self._fold.step(consumer, timeout=0.05):
                break
        count = await self._requeue_older(epoch)
        if count:
            _log.warning("queue_lost_its_data", model=self._model, requeued=count)
        self._seen = epoch
        return count

    async def _requeue_older(self, epoch: str) -> int:
        older = (Request.base_model == self._model, is_out(), Request.epoch != epoch)
        total = 0
        async with self._context.database.read() as session:
            ids = list(await session.scalars(select(Request.id).where(*older).order_by(Request.id)))
        for start in range(0, len(ids), _PAGE):
            page = ids[start : start + _PAGE]
            total += await requeue(self._context, page, Request.epoch != epoch)
        return total


async def requeue(context: Context, ids: list[str], *still: object) -> int:
    """Rows that are out and meet `still`, back to `queued`."""
    async with context.database.write() as session:
        locked = await session.scalars(
            select(Request.id)
            .where(Request.id.in_(ids), is_out(), *still)  # type: ignore[arg-type]
            .order_by(Request.id)
            .with_for_update(key_share=True)
        )
        won = list(locked)
        await session.execute(
            update(Request)
            .where(Request.id.in_(won))
            .values(state="queued")
            .execution_options(synchronize_session=False)
        )
    return len(won)


async def requeue_unknown(context: Context, model: str, grace_ms: int = GRACE_MS) -> int:
    """Rows that are out for a while and that the queue does not know: their enqueue was lost."""
    queue = context.queues.queue(model)
    before, last, total = now_ms() - grace_ms, "", 0
    while True:
        async with context.database.read() as session:
            rows = await session.scalars(
                select(Request.id)
                .where(
                    Request.base_model == model,
                    is_out(),
                    Request.dispatched_at <= before,
                    Request.id > last,
                )
                .order_by(Request.id)
                .limit(_PAGE)
            )
            page = list(rows)
        if not page:
            return total
        known = await queue.known([RequestId(request_id) for request_id in page])
        lost = [
            request_id for request_id, is_known in zip(page, known, strict=True) if not is_known
        ]
        if lost:
            total += await requeue(context, lost, Request.dispatched_at <= before)
            _log.warning("requests_lost_by_queue", model=model, requeued=len(lost))
        last = page[-1]


async def record_announcements(context: Context) -> None:
    """Keeps what live workers can hold, so that requests are judged while none is up."""
    best: dict[str, WorkerLimits] = {}
    for info in await context.queues.directory.workers():
        known = best.get(info.model)
        if known is None or _size(info.limits) > _size(known):
            best[info.model] = info.limits
    if not best:
        return
    announced = {name: msgspec.to_builtins(limits) for name, limits in best.items()}
    async with context.database.read() as session:
        rows = await session.execute(
            select(BaseModel.name, BaseModel.limits).where(BaseModel.name.in_(announced))
        )
        changed = [name for name, limits in rows if limits != announced[name]]
    if not changed:
        return
    async with context.database.write() as session:
        for model in await session.scalars(select(BaseModel).where(BaseModel.name.in_(changed))):
            model.limits = announced[model.name]


def _size(limits: WorkerLimits) -> tuple[int, int, int]:
    return limits.kv_tokens, limits.context_tokens, limits.adapter_rank
