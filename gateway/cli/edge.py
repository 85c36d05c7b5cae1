"""Where a command's errors become one line and an exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

import click

from gateway.cli.root import root

INTERRUPTED = 130


def run(args: Sequence[str]) -> int:
    """Run one command line; BATTEN_TRACEBACK=1 lets unexpected errors through."""
    try:
        result = root.main(args=list(args), prog_name="batten", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("Interrupted.", err=True)
        return INTERRUPTED
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - the interpreter flushes it at exit
        return 1
    except Exception as error:
        if os.environ.get("BATTEN_TRACEBACK"):
            raise
        click.echo(f"Error: {describe(error)}", err=True)
        return 1


def describe(error: Exception) -> str:
    """One line that a person can act on: of errors in a group, the first one's."""
    if isinstance(error, ExceptionGroup):
        return describe(error.exceptions[0])
    for (module, name), phrase in _PHRASES.items():
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and isinstance(error, kind):
            return phrase(error)
    return f"{_first_line(error)} (BATTEN_TRACEBACK=1 shows where)"


def _first_line(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _message(error: Exception) -> str:
    return str(error).strip().replace("\n", " ")


def _database(error: Exception) -> str:
    cause = str(getattr(error, "orig", error)).strip().partition("\n")[0]
    if "no such table" in cause or "no such column" in cause or "does not exist" in cause:
        return (
            f"the database has no tables of this release ({cause}); run `batten migrate`, or name "
            "another one by BATTEN_DATA or DATABASE_URL (`batten config` shows which it is)"
        )
    return (
        f"the database cannot be used: {cause} (see BATTEN_DATA, DATABASE_URL and `batten config`)"
    )


def _redis(error: Exception) -> str:
    return f"Redis cannot be used: {_message(error)} (see REDIS_URL and `batten config`)"


def _server(error: Exception) -> str:
    which = "the server"
    with suppress(RuntimeError):  # an error without a request
        url = error.request.url  # type: ignore[attr-defined]
        which += f" at {url.scheme}://{url.netloc.decode()}"
    return f"{which} cannot be reached: {_message(error)} (see --url and BATTEN_URL)"


# Keyed by name, so that describing an error imports nothing: a class that was raised is loaded.
_PHRASES: dict[tuple[str, str], Callable[[Exception], str]] = {
    ("gateway.errors", "ApiError"): _message,
    ("gateway.kit.context", "MissingSetting"): _message,
    ("gateway.kit.migrations", "ForeignSchema"): _message,
    ("worker.queue.base", "QueueUnavailable"): _redis,
    ("redis.exceptions", "RedisError"): _redis,
    ("sqlalchemy.exc", "DBAPIError"): _database,
    ("sqlalchemy.exc", "ArgumentError"): _database,
    ("httpx", "HTTPError"): _server,
}
