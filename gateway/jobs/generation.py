"""From an OpenAI body to prompt ids and sampling parameters.

    body → parse (shape, ranges, names) → Generation → fit (context, what workers can hold)

Parsing is pure: the same body, seed and model files give the same Generation at submission and
at dispatch.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

from gateway.errors import BadRequest
from gateway.jobs import parameters
from gateway.jobs.messages import parse_messages, system_prompt
from gateway.jobs.parameters import Body
from gateway.kit.prompts import NoChatTemplate, Prompts
from gateway.kit.templates import TemplateRefused
from worker.protocol.types import SamplingParams, WorkerLimits

Endpoint = Literal["/v1/chat/completions", "/v1/completions"]
CHAT: Endpoint = "/v1/chat/completions"
COMPLETIONS: Endpoint = "/v1/completions"
ENDPOINTS: tuple[Endpoint, ...] = (CHAT, COMPLETIONS)

_SHARED = frozenset(
    {
        "max_tokens",
        "top_k",
        "logit_bias",
        "logprobs",
        "n",
        "stop",
        "seed",
        "ignore_eos",
        "stream",
        *parameters.FLOATS,
    }
)
_HONOURED: Mapping[str, frozenset[str]] = {
    CHAT: _SHARED | {"messages", "max_completion_tokens", "top_logprobs"},
    COMPLETIONS: _SHARED | {"prompt"},
}


@dataclass(frozen=True, slots=True)
class Generation:
    """`max_tokens` is None when the body names none. `prefix` is text that requests share."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int | None
    prefix: str
    stream: bool = False


def text_length(body: Body) -> int:
    """Roughly how many characters will be tokenised: nothing is checked yet."""
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return len(prompt)
    messages = body.get("messages")
    return sum(len(str(each)) for each in messages) if isinstance(messages, list) else 0


def new_seed() -> int:
    return secrets.randbits(63)


def parse_generation(endpoint: str, body: Body, prompts: Prompts, seed: int | None) -> Generation:
    """`seed` overrides the body's: pinned at submission. Raises BadRequest."""
    parameters.refuse_unsupported(body, _HONOURED[endpoint])
    stream = parameters.boolean(body, "stream")
    max_tokens = _max_tokens(body)
    sampling = _sampling(endpoint, body, prompts, max_tokens, seed)
    if endpoint == CHAT:
        messages = parse_messages(body.get("messages"))
        ids = _chat_ids(messages, prompts)
        return Generation(ids, sampling, max_tokens, system_prompt(messages), stream)
    ids = _prompt_ids(body.get("prompt"), prompts)
    return Generation(ids, sampling, max_tokens, "", stream)


def fit(
    generation: Generation, context_tokens: int, limits: WorkerLimits | None, default_max: int
) -> int:
    """The `max_tokens` to pin. Raises BadRequest: longer than the context, or than any worker
    could hold."""
    prompt = len(generation.prompt_ids)
    context = min(context_tokens, limits.context_tokens) if limits else context_tokens
    left = context - prompt
    wanted = generation.max_tokens or min(default_max, left)
    if left < 1 or wanted > left:
        raise BadRequest(
            f"This model's maximum context length is {context} tokens. However, you requested "
            f"{prompt + max(wanted, 1)} tokens ({prompt} in the prompt, {max(wanted, 1)} in the "
            "completion). Please reduce the length of the prompt or of the completion.",
            code="context_length_exceeded",
            param="max_tokens" if left > 0 else None,
        )
    needed = prompt + generation.sampling.n * wanted
    if limits and needed > limits.kv_tokens:
        raise BadRequest(
            f"This request may need {needed} tokens of cache; a worker holds {limits.kv_tokens}. "
            "Please reduce n, max_tokens or the prompt.",
            code="capacity_exceeded",
            param="n" if generation.sampling.n > 1 else "max_tokens",
        )
    return wanted


def _max_tokens(body: Body) -> int | None:
    newer = parameters.integer(body, "max_completion_tokens", 1, 2**31 - 1)
    older = parameters.integer(body, "max_tokens", 1, 2**31 - 1)
    if newer is not None and older is not None and newer != older:
        raise parameters.wrong_value("max_tokens", "it contradicts 'max_completion_tokens'")
    return newer or older


def _sampling(
    endpoint: str, body: Body, prompts: Prompts, max_tokens: int | None, seed: int | None
) -> SamplingParams:
    asked = parameters.integer(body, "seed", -(2**63), parameters.MAX_SEED)
    pinned = seed if seed is not None else new_seed() if asked is None else asked
    return SamplingParams(
        max_tokens=max_tokens or 0,
        seed=pinned & parameters.MAX_SEED,
        n=parameters.integer(body, "n", 1, parameters.MAX_CHOICES) or 1,
        top_k=parameters.top_k(body, prompts.sampling_defaults),
        logit_bias=parameters.logit_bias(body, prompts.vocabulary),
        logprobs=_chat_logprobs(body) if endpoint == CHAT else _completion_logprobs(body),
        stop=parameters.stops(body),
        ignore_eos=parameters.boolean(body, "ignore_eos"),
        stop_token_ids=prompts.stop_token_ids,
        **{
            name: parameters.number(body, name, prompts.sampling_defaults)
            for name in parameters.FLOATS
        },
    )


def _chat_logprobs(body: Body) -> int | None:
    wanted = parameters.boolean(body, "logprobs")
    top = parameters.integer(body, "top_logprobs", 0, parameters.MAX_TOP_LOGPROBS)
    if top is not None and not wanted:
        raise parameters.wrong_value("top_logprobs", "it needs 'logprobs' to be true")
    return (top or 0) if wanted else None


def _completion_logprobs(body: Body) -> int | None:
    return parameters.integer(body, "logprobs", 0, parameters.MAX_TOP_LOGPROBS)


def _chat_ids(messages: list[dict[str, str]], prompts: Prompts) -> tuple[int, ...]:
    try:
        return prompts.encode_chat(messages)
    except NoChatTemplate:
        raise BadRequest(
            "This model has no chat template. Use /v1/completions.",
            code="chat_template_missing",
            param="messages",
        ) from None
    except TemplateRefused as error:
        raise parameters.wrong_value(
            "messages", f"the model's chat template refuses them: {error}"
        ) from error


def _prompt_ids(value: Any, prompts: Prompts) -> tuple[int, ...]:
    if value is None:
        raise parameters.missing("prompt")
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        ids = prompts.encode(value)
    elif _is_ids(value):
        if not all(0 <= each < prompts.vocabulary for each in value):
            raise parameters.wrong_value("prompt", "token ids must be of the model's vocabulary")
        ids = tuple(value)
    else:
        raise parameters.wrong_type("prompt", "one string or one array of token ids")
    if not ids:
        raise parameters.wrong_value("prompt", "must not be empty")
    return ids


def _is_ids(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        isinstance(each, int) and not isinstance(each, bool) for each in value
    )
