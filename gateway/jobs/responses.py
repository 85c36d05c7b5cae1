"""A worker's Finished event as an OpenAI body, and failures as OpenAI errors."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.jobs.generation import CHAT
from gateway.jobs.locking import Standing
from gateway.kit.prompts import Prompts
from gateway.models import Request
from worker.protocol.messages import FailureCode, Finished
from worker.protocol.types import Choice, TokenLogprob, TokenUsage

JsonBody = dict[str, Any]

_LEAST_LOGPROB = -9999.0  # what OpenAI reports for tokens of no measurable probability

_STATUS: Mapping[FailureCode, int] = {
    "adapter_unavailable": 404,
    "adapter_invalid": 400,
    "store_unavailable": 503,
    "context_length_exceeded": 400,
    "capacity_exceeded": 400,
    "invalid_request": 400,
    "numerical_error": 500,
    "engine_error": 500,
}


@dataclass(frozen=True, slots=True)
class Answered:
    """What a response says of its request. `model` is the name that the client sent."""

    request_id: str
    endpoint: str
    model: str
    base_model: str
    adapter_revision_id: str | None
    created: int

    @property
    def answer_id(self) -> str:
        """`chatcmpl-…` or `cmpl-…`."""
        kind = "chatcmpl" if self.endpoint == CHAT else "cmpl"
        return f"{kind}-{self.request_id.partition('_')[2]}"


def answered(row: Request | Standing) -> Answered:
    return Answered(
        request_id=row.id,
        endpoint=row.endpoint,
        model=row.model,
        base_model=row.base_model,
        adapter_revision_id=row.adapter_revision_id,
        created=row.created_at // 1000,
    )


def response_body(of: Answered, finished: Finished, prompts: Prompts) -> JsonBody:
    """chat.completion or text_completion."""
    chat = of.endpoint == CHAT
    choices = sorted(finished.choices, key=lambda choice: choice.index)
    return {
        "id": of.answer_id,
        "object": "chat.completion" if chat else "text_completion",
        "created": of.created,
        "model": of.model,
        "choices": [
            _chat_choice(each, prompts) if chat else _text_choice(each, prompts) for each in choices
        ],
        "usage": usage_body(finished.usage),
        "system_fingerprint": fingerprint(of.base_model, of.adapter_revision_id),
    }


def usage_body(usage: TokenUsage) -> JsonBody:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }


def fingerprint(base_model: str, adapter_revision_id: str | None) -> str:
    """Names the weights: one base model with one adapter revision."""
    digest = hashlib.sha256(f"{base_model}\n{adapter_revision_id or ''}".encode()).hexdigest()
    return f"fp_{digest[:12]}"


def failure(code: FailureCode, message: str) -> tuple[int, JsonBody]:
    status = _STATUS[code]
    return status, error_body(status, code, message)


def not_recorded() -> tuple[int, JsonBody]:
    return 500, error_body(500, "internal_error", "The answer could not be recorded.")


def attempts_exhausted(attempts: int) -> tuple[int, JsonBody]:
    message = f"The worker died {attempts} times while it ran this request alone."
    return 500, error_body(500, "attempts_exhausted", message)


def error_body(status: int, code: str, message: str, param: str | None = None) -> JsonBody:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {
        "error": {"message": storable_text(message), "type": kind, "param": param, "code": code}
    }


def _chat_choice(choice: Choice, prompts: Prompts) -> JsonBody:
    logprobs = choice.logprobs
    return {
        "index": choice.index,
        "message": {"role": "assistant", "content": _text(choice), "refusal": None},
        "logprobs": None if logprobs is None else chat_logprobs(logprobs, prompts),
        "finish_reason": choice.finish_reason,
    }


def chat_logprobs(logprobs: Sequence[TokenLogprob], prompts: Prompts) -> JsonBody:
    return {"content": [_chat_logprob(each, prompts) for each in logprobs], "refusal": None}


def _chat_logprob(token: TokenLogprob, prompts: Prompts) -> JsonBody:
    top = [_token(token_id, logprob, prompts) for token_id, logprob in token.top]
    return {**_token(token.token_id, token.logprob, prompts), "top_logprobs": top}


def _token(token_id: int, logprob: float, prompts: Prompts) -> JsonBody:
    return {
        "token": storable_text(prompts.token_text(token_id)),
        "logprob": _finite(logprob),
        "bytes": list(prompts.token_bytes(token_id)),
    }


def _text_choice(choice: Choice, prompts: Prompts) -> JsonBody:
    return {
        "index": choice.index,
        "text": _text(choice),
        "logprobs": None if choice.logprobs is None else text_logprobs(choice.logprobs, prompts),
        "finish_reason": choice.finish_reason,
    }


def text_logprobs(logprobs: Sequence[TokenLogprob], prompts: Prompts, offset: int = 0) -> JsonBody:
    """`offset`: how long the tokens before these are, written out one by one."""
    texts = [storable_text(prompts.token_text(each.token_id)) for each in logprobs]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [_finite(each.logprob) for each in logprobs],
        "top_logprobs": [
            {
                storable_text(prompts.token_text(token_id)): _finite(logprob)
                for token_id, logprob in each.top
            }
            for each in logprobs
        ],
        "text_offset": offsets,
    }


def _text(choice: Choice) -> str:
    return storable_text(choice.text)


def storable_text(text: str) -> str:
    """Postgres keeps no NUL in JSON."""
    return text.replace("\0", "\ufffd")


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB) if math.isfinite(logprob) else _LEAST_LOGPROB
