"""Settings for a command: the environment, overridden by flags."""

from __future__ import annotations

import os
from typing import Any

from pydantic import AliasChoices, ValidationError

from gateway.cli.errors import CommandError
from gateway.settings import Settings


def load_settings(**flags: Any) -> Settings:
    """Flags that are None were not given. Raises CommandError naming each wrong variable."""
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        return Settings(**given)
    except ValidationError as error:
        problems = (f"{_variable(item['loc'][0])}: {item['msg']}" for item in error.errors())
        raise CommandError("; ".join(problems)) from error


def variable(name: str) -> str:
    """The environment variable that sets field `name`."""
    alias = Settings.model_fields[name].validation_alias
    if isinstance(alias, AliasChoices):
        return str(alias.choices[0])
    return str(alias) if alias else f"BATTEN_{name.upper()}"


def _variable(location: Any) -> str:
    """Of alternatives, the one that is set."""
    if location in Settings.model_fields:
        return variable(location)
    for field in Settings.model_fields.values():
        alias = field.validation_alias
        if isinstance(alias, AliasChoices) and location in alias.choices:
            return next((str(each) for each in alias.choices if os.getenv(str(each))), location)
    return str(location)
