"""The HTTP application: context, middleware, error bodies and the list of routers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI
from fastapi.routing import APIRoute

from gateway import ops
from gateway.adapters import admin_endpoints as shared_adapters
from gateway.adapters import endpoints as adapters
from gateway.adapters import models_endpoints as models
from gateway.adapters.base_models import register_configured_model
from gateway.batches import endpoints as batches
from gateway.billing import budget_endpoints as budgets
from gateway.billing import endpoints as billing
from gateway.billing import invoice_endpoints as invoices
from gateway.chat import endpoints as chat
from gateway.files import endpoints as files
from gateway.jobs import endpoints as jobs
from gateway.jobs import operations_endpoints as operations
from gateway.kit.context import open_context
from gateway.kit.edge import RequestEdge
from gateway.kit.error_handlers import install_error_handlers
from gateway.kit.metrics import Metrics
from gateway.kit.openapi import document
from gateway.kit.tasks import SweptTasks, Tasks
from gateway.settings import Settings
from gateway.system_prompts import endpoints as system_prompts
from gateway.tenants import endpoints as tenants
from gateway.usage import endpoints as usage
from gateway.webhooks import endpoints as webhooks
from gateway.webhooks import events_endpoints as webhook_events

ROUTERS = (
    files.router,
    batches.router,
    jobs.router,
    operations.router,
    chat.router,
    models.router,
    adapters.router,
    shared_adapters.router,
    webhooks.router,
    webhook_events.router,
    usage.router,
    system_prompts.router,
    tenants.router,
    billing.router,
    budgets.router,
    invoices.router,
    ops.router,
)


def create_app(settings: Settings, tasks: Tasks | None = None) -> FastAPI:
    """`tasks` is how control processes are told of work; by default only their sweeps find it."""
    metrics = Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with open_context(settings) as context:
            if settings.model is not None:
                async with context.database.write() as session:
                    await register_configured_model(session, settings)
            app.state.context = context
            yield

    app = FastAPI(title="Batten", version=version("batten"), lifespan=lifespan)
    app.state.metrics = metrics
    app.state.tasks = tasks or SweptTasks()
    app.openapi = lambda: document(app)  # type: ignore[method-assign]
    install_error_handlers(app, ROUTERS)
    for router in ROUTERS:
        app.include_router(router)
    app.add_middleware(
        RequestEdge, body_bytes=settings.body_bytes, metrics=metrics, uploads=_uploads()
    )
    return app


def _uploads() -> frozenset[str]:
    """Paths that take forms, as their documentation says."""
    routes = [route for router in ROUTERS for route in router.routes]
    return frozenset(
        route.path
        for route in routes
        if isinstance(route, APIRoute)
        and "multipart/form-data"
        in (route.openapi_extra or {}).get("requestBody", {}).get("content", {})
    )
