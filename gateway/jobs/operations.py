"""What an operator sees of the queue and may do about a request that no worker could read."""

from __future__ import annotations

from sqlalchemy import select, update

from gateway.adapters.repository import BaseModelRepository
from gateway.errors import Conflict, NotFound
from gateway.kit.context import Context
from gateway.models import Request
from gateway.models.request import is_out
from worker.queue.base import ClassDepth, DeadLetter


async def model_names(context: Context) -> list[str]:
    async with context.database.read() as session:
        return [model.name for model in await BaseModelRepository(session).all()]


async def depths(context: Context) -> dict[str, dict[str, ClassDepth]]:
    """By model and class. Raises QueueUnavailable."""
    return {
        model: await context.queues.queue(model).depth() for model in await model_names(context)
    }


async def counters(context: Context, model: str) -> dict[str, dict[str, float]]:
    """Virtual token counters of the tenants that wait, by class. Raises QueueUnavailable."""
    found = await context.queues.queue(model).counters()
    return {
        name: {str(tenant): value for tenant, value in of.items()} for name, of in found.items()
    }


async def dead_letters(context: Context, count: int) -> list[tuple[str, DeadLetter]]:
    """(model, letter): each model's newest first. Raises QueueUnavailable."""
    return [
        (model, letter)
        for model in await model_names(context)
        for letter in await context.queues.queue(model).dead_letters(count)
    ]


async def requeue_dead(context: Context, request_id: str) -> None:
    """Sends a request round again, with its next attempt: once workers can read it.

    The letter stays, as a record. Raises NotFound, Conflict, QueueUnavailable.
    """
    letters = [letter for _, letter in await dead_letters(context, 10_000)]
    if not any(letter.request_id == request_id for letter in letters):
        raise NotFound(f"No dead letter is about the request '{request_id}'.")
    async with context.database.write() as session:
        won = await session.scalar(
            select(Request.id)
            .where(Request.id == request_id, is_out())
            .with_for_update(key_share=True)
        )
        if won is None:
            raise Conflict(f"The request '{request_id}' has ended, or waits in the queue already.")
        await session.execute(
            update(Request)
            .where(Request.id == request_id)
            .values(state="queued")
            .execution_options(synchronize_session=False)
        )
