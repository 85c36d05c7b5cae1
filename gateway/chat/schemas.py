"""Completions on the wire, for the OpenAPI document. Bodies are checked parameter by parameter
(`gateway.jobs.parameters`): its tables are what is shown here."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import BaseModel

from gateway.jobs import parameters
from gateway.jobs.generation import CHAT, Endpoint

Schema = dict[str, Any]
FinishReason = Literal["stop", "length"]


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class CompletionUsage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ChatMessage(BaseModel):
    role: Literal["assistant"]
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: CompletionUsage
    system_fingerprint: str


class TextChoice(BaseModel):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason


class TextCompletion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: CompletionUsage
    system_fingerprint: str


def documented(endpoint: Endpoint) -> dict[str, Any]:
    """Arguments of the route."""
    return {
        "openapi_extra": {"requestBody": {"required": True, "content": _request(endpoint)}},
        "responses": {
            200: {
                "model": ChatCompletion if endpoint == CHAT else TextCompletion,
                "description": "The answer; with `stream` its chunks as server-sent events",
                "content": {"text/event-stream": {"schema": {"type": "string"}}},
            }
        },
    }


def _request(endpoint: Endpoint) -> Schema:
    chat = endpoint == CHAT
    properties = {"model": {"type": "string", "description": _MODEL}, **_shared()}
    properties |= _CHAT if chat else _TEXT
    prompt = "messages" if chat else "prompt"
    said: Any = [{"role": "user", "content": "Hello!"}] if chat else "Once upon a time"
    schema = {"type": "object", "required": ["model", prompt], "properties": properties}
    example = {"model": "smollm2-135m-instruct", prompt: said, "max_tokens": 64, "temperature": 0}
    return {"application/json": {"schema": schema, "example": example}}


def _shared() -> Schema:
    return {
        "max_tokens": _whole(1, 2**31 - 1),
        "n": _whole(1, parameters.MAX_CHOICES),
        "seed": _whole(-(2**63), parameters.MAX_SEED),
        "top_k": _whole(-1, 2**31 - 1),
        "stop": {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {
                    "type": "array",
                    "maxItems": parameters.MAX_STOPS,
                    "items": {"type": "string", "minLength": 1},
                },
                {"type": "null"},
            ]
        },
        "logit_bias": {
            "type": ["object", "null"],
            "description": "Token id → what is added to its logit",
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        },
        "ignore_eos": {"type": ["boolean", "null"]},
        "stream": {"type": ["boolean", "null"]},
        "stream_options": {
            "type": ["object", "null"],
            "properties": {"include_usage": {"type": ["boolean", "null"]}},
        },
        **{name: _number(*each) for name, each in parameters.FLOATS.items()},
    }


def _whole(low: int, high: int) -> Schema:
    return {"type": ["integer", "null"], "minimum": low, "maximum": high}


def _number(default: float, allowed: parameters.Range) -> Schema:
    low = "exclusiveMinimum" if allowed.above_low else "minimum"
    schema: Schema = {"type": ["number", "null"], low: allowed.low}
    return schema if math.isinf(allowed.high) else {**schema, "maximum": allowed.high}


_MODEL = "A base model, an adapter (its promoted revision), or `name@revision`"
_PART: Schema = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_MESSAGE: Schema = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]},
        "name": {"type": ["string", "null"]},
    },
}
_CHAT: Schema = {
    "messages": {"type": "array", "minItems": 1, "items": _MESSAGE},
    "max_completion_tokens": _whole(1, 2**31 - 1),
    "logprobs": {"type": ["boolean", "null"]},
    "top_logprobs": _whole(0, parameters.MAX_TOP_LOGPROBS),
}
_TEXT: Schema = {
    "prompt": {
        "description": "A text, or token ids",
        "anyOf": [
            {"type": "string", "minLength": 1},
            {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
            {"type": "array", "minItems": 1, "maxItems": 1, "items": {"type": "string"}},
        ],
    },
    "logprobs": _whole(0, parameters.MAX_TOP_LOGPROBS),
}
