"""The worker's log: one event a line on standard error, as JSON or for a terminal."""

from __future__ import annotations

import sys
from typing import Any

import structlog

from worker.settings import LogFormat, LogLevel


def configure_logs(level: LogLevel, format: LogFormat) -> None:
    """Once per process."""
    console = format == "console" or (format == "auto" and sys.stderr.isatty())
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *_renderers(console),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )


def _renderers(console: bool) -> list[Any]:
    if console:
        # Not rich's tracebacks: those print local variables, and with them prompts.
        plain = structlog.dev.plain_traceback
        return [structlog.dev.ConsoleRenderer(exception_formatter=plain)]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
