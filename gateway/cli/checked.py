"""What a command is given, held to what the API takes."""

from __future__ import annotations

from typing import Any, TypeVar

import click
from pydantic import BaseModel, ValidationError

M = TypeVar("M", bound=BaseModel)


def checked(schema: type[M], **given: Any) -> M:
    """`given` as a body of the API. Raises UsageError naming each value that it refuses."""
    try:
        return schema(**given)
    except ValidationError as error:
        problems = (f"{item['loc'][0]}: {item['msg']}" for item in error.errors())
        raise click.UsageError("; ".join(problems)) from error
