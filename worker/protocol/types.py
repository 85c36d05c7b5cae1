"""Values that the gateway, the queue and the engine share: ids and numbers only.

Nothing here knows of tensors, rows or HTTP. All types are frozen and compare by value.
"""

from __future__ import annotations

from typing import Literal, NewType

import msgspec

RequestId = NewType("RequestId", str)
TenantId = NewType("TenantId", str)

RequestClass = Literal["interactive", "standard", "batch"]
REQUEST_CLASSES: tuple[RequestClass, ...] = ("interactive", "standard", "batch")

FinishReason = Literal["stop", "length"]


class AdapterRef(msgspec.Struct, frozen=True):
    """One immutable LoRA revision.

    `digest` is the sha256 (hex) of its normalised config and tensors, so a re-upload under the
    same name never changes what a queued request runs with. `rank` is the largest rank of any
    module: the rows it takes in every rank pool.
    """

    digest: str
    rank: int


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How tokens are chosen. Defaults leave the model's distribution untouched.

    `seed` is pinned at submission: random numbers are a function of (seed, choice index,
    position) alone, so a repeated run gives the same text. `temperature` 0 is greedy.
    `top_k` 0, `top_p` 1 and `min_p` 0 switch the filter off. `logprobs` is the number of
    alternatives reported for each token (None: no log-probabilities). Penalties: presence and
    frequency as OpenAI and vLLM define them (generated tokens only), repetition as Hugging Face
    does (prompt and generated tokens). `stop` strings end a choice and are not part of the text;
    `stop_token_ids` end one like the model's own end-of-sequence tokens.
    """

    max_tokens: int
    seed: int = 0
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """The log-probability of one chosen token and of the likeliest alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Choice(msgspec.Struct, frozen=True, omit_defaults=True):
    """One finished answer. `text` is `token_ids` decoded, without stop strings."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] | None = None


class TokenUsage(msgspec.Struct, frozen=True):
    """Tokens of one request. `cached` of the `prompt` tokens were read from the prefix cache."""

    prompt: int
    cached: int
    completion: int


class ComputeTimes(msgspec.Struct, frozen=True):
    """Seconds that a worker computed for a request: until its first token, and from there on."""

    prefill: float
    decode: float


class Capacity(msgspec.Struct, frozen=True):
    """What a worker can take right now; `claim` answers with requests that fit in it.

    `kv_tokens` and `adapter_rank` are free now; `requests` is the most to hand out;
    `running` counts what the worker holds already (isolation of suspects needs it);
    `resident` lists digests of adapters on the device or in host memory.
    """

    kv_tokens: int
    adapter_rank: int
    requests: int
    running: int = 0
    resident: tuple[str, ...] = ()


class SharedPrefix(msgspec.Struct, frozen=True, omit_defaults=True):
    """A prompt's beginning that the operator shares among tenants, as computed with the adapter
    `digest` ("": the base model)."""

    token_ids: tuple[int, ...]
    digest: str = ""


class WorkerLimits(msgspec.Struct, frozen=True):
    """The most that one request may need on a worker: announced, and checked at submission."""

    context_tokens: int
    kv_tokens: int
    adapter_rank: int
