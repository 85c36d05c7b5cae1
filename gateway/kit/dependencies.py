"""What endpoints are given: the process's context."""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import Depends, Request

from gateway.kit.context import Context
from gateway.kit.tasks import Tasks


def current_context(request: Request) -> Context:
    return cast(Context, request.app.state.context)


def current_tasks(request: Request) -> Tasks:
    return cast(Tasks, request.app.state.tasks)


AppContext = Annotated[Context, Depends(current_context)]
AppTasks = Annotated[Tasks, Depends(current_tasks)]
