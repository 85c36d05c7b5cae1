"""What the queue must know of a request without decoding it."""

from __future__ import annotations

import hashlib

import msgspec

from worker.protocol.messages import GenerateRequest
from worker.protocol.types import RequestClass, RequestId, TenantId


class QueuedItem(msgspec.Struct, frozen=True):
    """The part of a GenerateRequest that decides when and where it runs.

    `digest` is empty without an adapter, `prefix` when no neighbour can share one. The output
    of one choice is predicted between `least` and `most` tokens. `suspects` is empty for whoever
    may run with anybody.
    """

    id: RequestId
    attempt: int
    tenant: TenantId
    request_class: RequestClass
    prompt: int
    n: int
    least: int
    most: int
    rank: int
    digest: str
    prefix: str
    order: float
    deadline: float | None
    weight: float
    suspects: str
    stream: bool

    @property
    def alone(self) -> bool:
        return self.suspects == self.id


def describe(request: GenerateRequest, prefix_tokens: int) -> QueuedItem:
    sampling, adapter = request.sampling, request.adapter
    return QueuedItem(
        id=request.request_id,
        attempt=request.attempt,
        tenant=request.tenant,
        request_class=request.request_class,
        prompt=len(request.prompt_ids),
        n=sampling.n,
        least=sampling.max_tokens if sampling.ignore_eos and not sampling.stop else 1,
        most=max(1, sampling.max_tokens),
        rank=adapter.rank if adapter else 0,
        digest=adapter.digest if adapter else "",
        prefix=_prefix_key(request, prefix_tokens),
        order=float(request.order),
        deadline=request.deadline,
        weight=float(request.weight),
        suspects=request.suspects,
        stream=request.stream,
    )


def _prefix_key(request: GenerateRequest, tokens: int) -> str:
    if len(request.prompt_ids) < tokens:
        return ""
    digest = request.adapter.digest if request.adapter else ""
    shared = repr((digest, request.cache_scope, request.prompt_ids[:tokens]))
    return hashlib.blake2b(shared.encode(), digest_size=8).hexdigest()
