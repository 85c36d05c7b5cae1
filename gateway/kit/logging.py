"""Structured logs: one JSON object a line on standard error, secrets masked."""

from __future__ import annotations

import re
import sys

import structlog
from structlog.typing import EventDict, WrappedLogger

from gateway.settings import LogLevel

_SECRET_NAMES = re.compile(r"(authorization|secret|password|api_key|token)$", re.IGNORECASE)
_SECRET_TEXT = re.compile(
    r"\b(bt_|whsec_)[A-Za-z0-9_\-+/=]{8,}|(?<=://)([^/@\s:]*:)[^/@\s]+(?=@)|(password=)[^&\s]+"
)


def configure_logging(level: LogLevel) -> None:
    """Once per process, at its edge."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            mask_secrets,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )


def mask_secrets(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    for name, value in event.items():
        if _SECRET_NAMES.search(name):
            event[name] = "***"
        elif isinstance(value, str):
            event[name] = _SECRET_TEXT.sub(_mask, value)
    return event


def _mask(match: re.Match[str]) -> str:
    return f"{match[match.lastindex or 0]}***"
