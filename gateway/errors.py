"""Every error a client can see.

ApiError
├── BadRequest            400  what is wrong, and where (`param`)
├── Unauthorized          401  no key, or one that is unknown, expired or revoked
├── Forbidden             403  the key lacks a scope
├── NotFound              404  unknown id, or another tenant's: the two look the same
├── Conflict              409  the object's state forbids it
├── PayloadTooLarge       413
├── UnsupportedMedia      415
├── TooManyRequests       429  with Retry-After, unless waiting does not help
└── Unavailable           503  with Retry-After: the queue or database cannot be reached

The body is OpenAI's: {"error": {"message", "type", "param", "code"}}.
"""

from __future__ import annotations

from typing import Any, ClassVar


class ApiError(Exception):
    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str | None] = None

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.param = param
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


class BadRequest(ApiError):
    status = 400
    type = "invalid_request_error"


class Unauthorized(ApiError):
    status = 401
    type = "authentication_error"
    default_code = "invalid_api_key"


class Forbidden(ApiError):
    status = 403
    type = "permission_error"
    default_code = "insufficient_permissions"


class NotFound(ApiError):
    status = 404
    type = "invalid_request_error"


class Conflict(ApiError):
    status = 409
    type = "invalid_request_error"


class PayloadTooLarge(ApiError):
    status = 413
    type = "invalid_request_error"


class UnsupportedMedia(ApiError):
    status = 415
    type = "invalid_request_error"


class TooManyRequests(ApiError):
    status = 429
    type = "rate_limit_error"
    default_code = "rate_limit_exceeded"


class Unavailable(ApiError):
    status = 503
    type = "server_error"
    default_code = "service_unavailable"
