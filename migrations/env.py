"""Run by Alembic on the connection that `gateway.kit.migrations` (or a test) hands over."""

from __future__ import annotations

from alembic import context

from gateway.kit.migrations import check_schema
from gateway.models import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    compare_type=True,
    render_as_batch=context.config.attributes["connection"].dialect.name == "sqlite",
)
context.run_migrations()
if context.get_context().get_current_revision() == context.get_head_revision():
    check_schema(context.config.attributes["connection"], Base.metadata)
