"""The scheduler's decision for one step, and the runner's answer to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import msgspec

from worker.engine.metrics import AdapterCounts
from worker.engine.sequence import Sequence
from worker.protocol.errors import AdapterLoadError as AdapterLoadError
from worker.protocol.types import AdapterRef, TokenLogprob


class ScheduledSequence(msgspec.Struct, frozen=True, gc=False):
    """Compute `num_tokens` tokens of `sequence` from position `start` on.

    `samples`: these reach the sequence's last token, so a next token is chosen.
    """

    sequence: Sequence
    start: int
    num_tokens: int

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens

    @property
    def samples(self) -> bool:
        return self.start + self.num_tokens == self.sequence.num_tokens


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """Everything one step computes. `block_copies` (source, target) are made first."""

    sequences: tuple[ScheduledSequence, ...]
    block_copies: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(scheduled.num_tokens for scheduled in self.sequences)


class SampledToken(msgspec.Struct, frozen=True, gc=False):
    """The token chosen after a sequence's last one. `error` says why none could be (NaN)."""

    token_id: int
    logprob: TokenLogprob | None = None
    error: str | None = None


class Runner(Protocol):
    """Executes a batch. One answer per scheduled sequence that `samples`, in batch order."""

    def execute(self, batch: ScheduledBatch) -> list[SampledToken]: ...


class AdapterResidency(Protocol):
    """What the scheduler asks of the adapter cache. A ready adapter that is pinned stays."""

    def prefetch(self, adapter: AdapterRef) -> None:
        """It will be asked for: bring it near, as far as nothing has to give way. Never raises."""

    def prepare(self, adapter: AdapterRef) -> bool:
        """True when ready on the device; else starts loading it (off this thread) if rank rows
        are or can be made free, and returns False. A load once begun ends without further calls.
        Raises AdapterLoadError once it failed."""

    def first_token(self, adapter: AdapterRef, prompt_ids: tuple[int, ...]) -> int:
        """First position that a ready adapter changes: 0, or for an activated LoRA where its
        invocation last begins in the prompt (`sys.maxsize` when it does not occur)."""

    def pin(self, adapter: AdapterRef) -> None:
        """One more running sequence uses it."""

    def unpin(self, adapter: AdapterRef) -> None: ...

    def free_rank(self) -> int:
        """Rows that are free or held by unpinned adapters."""

    def resident(self) -> tuple[str, ...]:
        """Digests on the device, and the last used ones in host memory."""

    def is_away(self, adapter: AdapterRef) -> bool:
        """Whether the store does not give it at present: asking for it now is for nothing."""

    def lacks_memory(self, adapter: AdapterRef) -> bool:
        """Whether it waits for memory besides rows that pinned adapters hold."""

    def counts(self) -> AdapterCounts: ...
