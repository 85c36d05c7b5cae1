"""Chat messages of a body, as a template wants them: a role and one string."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.errors import BadRequest
from gateway.jobs.parameters import missing, wrong_type, wrong_value

_TEMPLATE_ROLES: Mapping[str, str] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}


def parse_messages(value: Any) -> list[dict[str, str]]:
    """Raises BadRequest. Text parts are joined with a line break, as vLLM does."""
    if value is None:
        raise missing("messages")
    if not isinstance(value, list):
        raise wrong_type("messages", "an array of objects")
    if not value:
        raise wrong_value("messages", "must not be empty")
    return [_message(each, f"messages[{index}]") for index, each in enumerate(value)]


def system_prompt(messages: list[dict[str, str]]) -> str:
    """What requests with the same instructions share; "" when there are none."""
    return messages[0]["content"] if messages[0]["role"] == "system" else ""


def _message(value: Any, param: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise wrong_type(param, "an object")
    role = value.get("role")
    if role is None:
        raise missing(f"{param}.role")
    if not isinstance(role, str) or role not in _TEMPLATE_ROLES:
        raise wrong_value(f"{param}.role", f"supported roles are {', '.join(_TEMPLATE_ROLES)}")
    for name, field in value.items():
        if name not in {"role", "content", "name"} and field is not None:
            raise _unsupported(f"{param}.{name}")
    message = {"role": _TEMPLATE_ROLES[role], "content": _content(value, f"{param}.content")}
    if isinstance(name := value.get("name"), str):
        message["name"] = name
    return message


def _content(message: Mapping[str, Any], param: str) -> str:
    content = message.get("content")
    if content is None:
        raise missing(param)
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong_type(param, "a string or an array of text parts")
    return "\n".join(_part(part, f"{param}[{index}]") for index, part in enumerate(content))


def _part(part: Any, param: str) -> str:
    if not isinstance(part, dict):
        raise wrong_type(param, "an object")
    if part.get("type") != "text":
        raise _unsupported(f"{param}.type")
    if not isinstance(text := part.get("text"), str):
        raise wrong_type(f"{param}.text", "a string")
    return text


def _unsupported(param: str) -> BadRequest:
    return BadRequest(
        f"Unsupported parameter: '{param}' is not supported.",
        code="unsupported_parameter",
        param=param,
    )
