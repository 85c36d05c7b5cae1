"""An engine without a model: for load and crash tests of everything around it.

`NullRunner` and `NullResidency` fill the same ports as the model runner and the adapter cache.
Tokens depend on the request alone, so a repeated run gives the same answer.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from dataclasses import replace
from hashlib import blake2b
from weakref import WeakKeyDictionary

from worker.engine.batch import SampledToken, ScheduledBatch
from worker.engine.metrics import AdapterCounts
from worker.engine.sequence import Sequence
from worker.protocol.types import AdapterRef, TokenLogprob

_MASK = (1 << 64) - 1


class NullRunner:
    """Chooses tokens by hashing (seed, choice, adapter, prompt, position).

    Tokens lie in [`first_token`, `vocab_size`). `eos_token_id` is chosen with probability
    1 / `mean_tokens`, never if either is None. `delay` seconds pass in each step.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        first_token: int = 0,
        eos_token_id: int | None = None,
        mean_tokens: int | None = None,
        delay: float = 0.0,
    ) -> None:
        if not 0 <= first_token < vocab_size:
            raise ValueError(f"no tokens between {first_token} and {vocab_size}")
        self._first = first_token
        self._count = vocab_size - first_token
        self._eos = eos_token_id
        self._mean = mean_tokens
        self._delay = delay
        self._keys: WeakKeyDictionary[Sequence, int] = WeakKeyDictionary()

    def execute(self, batch: ScheduledBatch) -> list[SampledToken]:
        if self._delay:
            time.sleep(self._delay)
        return [self._sample(s.sequence) for s in batch.sequences if s.samples]

    def _sample(self, sequence: Sequence) -> SampledToken:
        number = _mix(self._key(sequence) + sequence.num_tokens)
        if self._eos is not None and self._mean and number % self._mean == 0:
            token_id = self._eos
        else:
            token_id = self._first + (number >> 16) % self._count
        if sequence.sampling.logprobs is None:
            return SampledToken(token_id)
        return SampledToken(token_id, TokenLogprob(token_id, 0.0))

    def _key(self, sequence: Sequence) -> int:
        key = self._keys.get(sequence)
        if key is None:
            digest = sequence.adapter.digest if sequence.adapter else ""
            content = sequence.sampling.seed, sequence.choice, digest, sequence.prompt_ids
            hashed = blake2b(repr(content).encode(), digest_size=8).digest()
            key = self._keys[sequence] = int.from_bytes(hashed, "big")
        return key


class NullResidency:
    """A rank pool whose adapters are ready at once; the least recently used give way."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._pins: Counter[str] = Counter()
        self._resident: OrderedDict[str, int] = OrderedDict()
        self._counts = AdapterCounts()

    def prefetch(self, adapter: AdapterRef) -> None:
        return None

    def prepare(self, adapter: AdapterRef) -> bool:
        if adapter.digest not in self._resident:
            if adapter.rank > self.free_rank():
                return False
            self._make_room(adapter.rank)
            self._counts = replace(self._counts, loads=self._counts.loads + 1)
            self._resident[adapter.digest] = adapter.rank
        self._resident.move_to_end(adapter.digest)
        return True

    def first_token(self, adapter: AdapterRef, prompt_ids: tuple[int, ...]) -> int:
        return 0

    def pin(self, adapter: AdapterRef) -> None:
        if adapter.digest not in self._resident:
            raise ValueError(f"adapter {adapter.digest} is not ready")
        self._pins[adapter.digest] += 1

    def unpin(self, adapter: AdapterRef) -> None:
        if not self._pins[adapter.digest]:
            raise ValueError(f"adapter {adapter.digest} is not pinned")
        self._pins[adapter.digest] -= 1

    def free_rank(self) -> int:
        return self._rank - sum(r for d, r in self._resident.items() if self._pins[d])

    def is_away(self, adapter: AdapterRef) -> bool:
        return False

    def lacks_memory(self, adapter: AdapterRef) -> bool:
        return False

    def resident(self) -> tuple[str, ...]:
        return tuple(self._resident)

    def counts(self) -> AdapterCounts:
        return self._counts

    def _make_room(self, rank: int) -> None:
        empty = self._rank - sum(self._resident.values())
        for digest in [d for d in self._resident if not self._pins[d]]:
            if empty >= rank:
                return
            empty += self._resident.pop(digest)
            self._counts = replace(self._counts, evictions=self._counts.evictions + 1)


def _mix(number: int) -> int:
    """SplitMix64's finaliser: neighbouring numbers become unrelated ones."""
    number = (number * 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)
