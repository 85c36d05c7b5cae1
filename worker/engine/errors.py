"""What `Engine.add` refuses.

RequestRefused               code, as the gateway reports it
├── InvalidRequest           invalid_request: no prompt, no answer asked for, an id in use
├── ContextLengthExceeded    context_length_exceeded: no room for an answer after the prompt
└── CapacityExceeded         capacity_exceeded: it could not run even alone on this worker
"""

from __future__ import annotations

from typing import ClassVar, Literal

RefusalCode = Literal["invalid_request", "context_length_exceeded", "capacity_exceeded"]


class RequestRefused(Exception):
    """The engine will never be able to answer this request."""

    code: ClassVar[RefusalCode]


class InvalidRequest(RequestRefused):
    code = "invalid_request"


class ContextLengthExceeded(RequestRefused):
    code = "context_length_exceeded"


class CapacityExceeded(RequestRefused):
    code = "capacity_exceeded"
