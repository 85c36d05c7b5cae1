"""What an operator may tune about the queue. Every process of one deployment uses the same."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """Seconds are the server's; tokens are prompt + `output_price` times output.

    Leases
        lease_seconds         a lease lives this long after its claim or renewal
        tombstone_seconds     how long a cancelled request id is refused
    Choice
        look_ahead            requests of a tenant looked at for one that fits or fits better
        tenant_look_ahead     tenants looked at, lowest counter first, before a class is left
        pass_over_limit       claims that may pass a request over; then its class waits for it
    Classes
        standard_share        part of the tokens handed out that is standard's, come what may
        batch_share           part that is batch's
        escalation_seconds    a deadline this near makes a request urgent
        escalation_share      most of the tokens handed out that urgent requests may take
        credit_limit          tokens of share that may be saved up or owed
    Counters
        output_price          tokens that one output token counts for (prompt tokens count 1)
        default_output_tokens predicted output of a tenant and adapter without history
        length_smoothing      weight of the newest output length in the running mean
        length_seconds        that mean is forgotten when unused for so long
        rebase_at             counters are moved back towards 0 when the lowest passes this
    Streams
        stream_limit          claims stop while more events than this wait for the collector
        reclaim_seconds       events of a collector silent for so long go to another
        token_stream_limit    most entries kept of one request's token stream
        token_stream_seconds  a token stream is gone this long after its last entry
        dead_letter_limit     most dead letters kept, about
    Other
        prefix_tokens         first prompt tokens that make two requests neighbours
        worker_seconds        an announced worker is live for so long
    """

    lease_seconds: float = 60.0
    tombstone_seconds: float = 86_400.0
    look_ahead: int = 16
    tenant_look_ahead: int = 8
    pass_over_limit: int = 8
    standard_share: float = 0.10
    batch_share: float = 0.05
    escalation_seconds: float = 900.0
    escalation_share: float = 0.5
    credit_limit: float = 65_536.0
    output_price: float = 2.0
    default_output_tokens: int = 256
    length_smoothing: float = 0.2
    length_seconds: float = 30 * 86_400.0
    rebase_at: float = 1e9
    stream_limit: int = 10_000
    reclaim_seconds: float = 60.0
    token_stream_limit: int = 16_384
    token_stream_seconds: float = 600.0
    dead_letter_limit: int = 1_000
    prefix_tokens: int = 64
    worker_seconds: float = 15.0

    @classmethod
    def with_lease(cls, seconds: float) -> Self:
        """What notices a death sooner or later, with the leases: workers' and collectors'."""
        return cls(lease_seconds=seconds, reclaim_seconds=seconds)

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value < 0 or (value == 0 and not field.name.endswith("_share")):
                raise ValueError(f"{field.name} must be positive, not {value}")
        if self.standard_share + self.batch_share + self.escalation_share >= 1:
            raise ValueError("shares must leave something for the highest class: sum below 1")
        if self.length_smoothing > 1:
            raise ValueError("length_smoothing is at most 1")
