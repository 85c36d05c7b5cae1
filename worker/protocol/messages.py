"""The contract between gateway and worker: one command and six events.

    gateway --GenerateRequest--> queue --claim--> worker --GenerationEvent--> collector

Every event names the request and the `attempt` it belongs to, so that SQL can refuse what a
superseded attempt still says.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from worker.protocol.types import (
    AdapterRef,
    Choice,
    ComputeTimes,
    RequestClass,
    RequestId,
    SamplingParams,
    TenantId,
    TokenLogprob,
    TokenUsage,
)

FailureCode = Literal[
    "adapter_unavailable",
    "adapter_invalid",
    "store_unavailable",
    "context_length_exceeded",
    "capacity_exceeded",
    "invalid_request",
    "numerical_error",
    "engine_error",
]


class GenerateRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """One generation, complete: a worker needs nothing but this and the object store.

    `epoch` names the life of Redis in which it was dispatched. `deadline` is Unix seconds.
    `cache_scope` isolates prefix caches (normally the tenant id), but for the first `shared_tokens`
    tokens: those are part of a prompt that the operator shares among tenants. `weight` is the
    tenant's fair share and `order` places the request within its tenant (lower first; the
    dispatcher makes neighbours of requests that share a prefix). `suspects` names the group of
    requests that a request whose earlier attempt died with its worker may run with, itself when it
    must be alone.
    """

    request_id: RequestId
    attempt: int
    epoch: str
    tenant: TenantId
    model: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    request_class: RequestClass = "batch"
    adapter: AdapterRef | None = None
    cache_scope: str = ""
    deadline: float | None = None
    weight: float = 1.0
    order: float = 0.0
    suspects: str = ""
    stream: bool = False
    shared_tokens: int = 0


class _Event(msgspec.Struct, frozen=True, tag_field="type", omit_defaults=True):
    request_id: RequestId
    attempt: int


class Started(_Event, frozen=True, tag="started"):
    """A worker began to compute. Never reverts a terminal state."""

    worker: str


class Delta(_Event, frozen=True, tag="delta"):
    """Tokens of choice `choice` from position `index` on, while the request runs. `logprobs`:
    one for each token, where they were asked for."""

    choice: int
    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] | None = None


class Finished(_Event, frozen=True, tag="finished"):
    """All choices are complete. `times` is None where an older release tells none."""

    choices: tuple[Choice, ...]
    usage: TokenUsage
    worker: str
    times: ComputeTimes | None = None


class Failed(_Event, frozen=True, tag="failed"):
    """The request cannot be answered. `retryable`: another attempt may succeed."""

    code: FailureCode
    message: str
    retryable: bool = False


class LeaseLost(_Event, frozen=True, tag="lease_lost"):
    """The worker died or stalled while it held the request. `alone`: it ran by itself."""

    worker: str
    alone: bool = False


class Cancelled(_Event, frozen=True, tag="cancelled"):
    """The worker stopped the request, or it never started, because its tombstone was set."""


GenerationEvent = Started | Delta | Finished | Failed | LeaseLost | Cancelled
TerminalEvent = Finished | Failed | Cancelled
