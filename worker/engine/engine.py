"""The engine: requests in, tokens and answers out, one step at a time.

    add ──> waiting ──schedule──> running ──execute──> sampled tokens ──> outputs
                                     ^───────────────────────┘

Pure compute: no threads, no clock but for batch formation, no network, no tensors. Call it from
one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from worker.engine.active_request import ActiveRequest
from worker.engine.batch import AdapterResidency, Runner, SampledToken, ScheduledBatch
from worker.engine.config import SchedulerConfig
from worker.engine.detokenizer import ChoiceText, Detokenizer, TextDecoder, byte_tokens
from worker.engine.errors import InvalidRequest
from worker.engine.latency import Latencies, RequestTimes
from worker.engine.metrics import EngineCounters, EngineStats, unused_slots
from worker.engine.outputs import (
    CancelledOutput,
    EngineOutput,
    FailedOutput,
    StartedOutput,
    StepFailureCode,
)
from worker.engine.request_check import check_request
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import Sequence
from worker.engine.snapshot import engine_stats
from worker.protocol.types import (
    AdapterRef,
    Capacity,
    RequestId,
    SamplingParams,
    SharedPrefix,
    WorkerLimits,
)

PREDICTED_OUTPUT = 128
"""Answer length to expect of a request whose tenant and adapter have no history."""


class Engine:
    """Answers many requests in shared steps.

    When the runner raises, the exception passes through `step` and nothing has advanced: the
    same step may be tried again, or requests cancelled first.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        runner: Runner,
        adapters: AdapterResidency,
        tokenizer: TextDecoder,
        eos_token_ids: frozenset[int],
        model_revision: str,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.counters = EngineCounters()
        self.latencies = Latencies()
        self._now = now
        self.scheduler = Scheduler(
            config, adapters, model_revision, counters=self.counters, now=now
        )
        self._runner = runner
        self._adapters = adapters
        self._tokenizer = tokenizer
        self._byte_tokens = byte_tokens(tokenizer)
        self._eos = eos_token_ids
        self._requests: dict[RequestId, ActiveRequest] = {}
        self._outputs: list[EngineOutput] = []
        self._arrivals = 0
        self._last_batch = ScheduledBatch(())

    def add(
        self,
        request_id: RequestId,
        prompt_ids: Iterable[int],
        sampling: SamplingParams,
        *,
        adapter: AdapterRef | None = None,
        priority: int = 0,
        cache_scope: str = "",
        shared_tokens: int = 0,
        predicted_output: int | None = None,
        stream: bool = True,
    ) -> None:
        """Queue a request.

        `priority` is smaller for more urgent classes. `cache_scope` isolates cached prefixes; the
        first `shared_tokens` tokens are a prefix that all scopes may share. `predicted_output` is
        the expected answer length (memory is reserved for it). Without `stream` no DeltaOutput is
        made, which is cheaper.

        Raises InvalidRequest, ContextLengthExceeded or CapacityExceeded.
        """
        prompt = tuple(prompt_ids)
        if request_id in self._requests:
            raise InvalidRequest(f"request {request_id} is already here")
        check_request(self.config, prompt, sampling, adapter)
        if adapter is not None:
            self._adapters.prefetch(adapter)
        predicted = PREDICTED_OUTPUT if predicted_output is None else predicted_output
        sequences = tuple(
            Sequence(
                request_id=request_id,
                choice=choice,
                prompt_ids=prompt,
                sampling=sampling,
                arrival=self._arrivals,
                priority=priority,
                adapter=adapter,
                cache_scope=cache_scope,
                shared_tokens=shared_tokens,
                predicted_output=max(1, min(predicted, sampling.max_tokens)),
            )
            for choice in range(sampling.n)
        )
        texts = tuple(
            ChoiceText(
                Detokenizer(self._tokenizer, self._byte_tokens), sampling.stop, streamed=stream
            )
            for _ in sequences
        )
        self._arrivals += 1
        times = RequestTimes(added=self._now())
        most = min(sampling.max_tokens, self.config.context_tokens - len(prompt))
        self._requests[request_id] = ActiveRequest(
            request_id, sequences, texts, most, stream, times
        )
        for sequence in sequences:
            self.scheduler.add(sequence)

    def cancel(self, request_ids: Iterable[RequestId]) -> None:
        """Drop requests now; the next step says so. Unknown ids are ignored."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._drop(request)
                self.counters.cancelled += 1
                self._outputs.append(CancelledOutput(request_id))

    def share(self, prefixes: Iterable[SharedPrefix]) -> int:
        """Keep the KV of these prefixes from now on, used or not, until they are left out of a
        later call: at most `pinned_blocks`, the first prefixes first. Returns how many blocks of
        tokens that are."""
        most = self.config.pinned_blocks // len(self.config.windows)
        return self.scheduler.blocks.cache.share(prefixes, most)

    def step(self) -> list[EngineOutput]:
        """Schedule, execute and account for one step. Exceptions of the runner pass through."""
        began = self._now()
        batch = self.scheduler.schedule()
        for sequence, error in self.scheduler.take_failed():
            self._fail(sequence.request_id, error.code, str(error))
        if batch.sequences:
            batch = self._without_failed(batch)
        self._last_batch = batch
        if batch.sequences:
            self._account(batch, self._runner.execute(batch), began, self._now())
        self.counters.steps += 1
        outputs, self._outputs = self._outputs, []
        return outputs

    def has_work(self) -> bool:
        return bool(self._requests or self._outputs)

    @property
    def stalled(self) -> bool:
        """The last step computed nothing though requests wait (for an adapter, or for a batch to
        fill): the caller may sleep a little before the next."""
        return bool(self._requests) and not self._last_batch.sequences

    def limits(self) -> WorkerLimits:
        """The most that one request may need."""
        config = self.config
        return WorkerLimits(config.context_tokens, config.kv_tokens, config.adapter_rank)

    def capacity(self) -> Capacity:
        """What could be added now, net of what running and waiting requests will need. Without
        any it is everything, so that whatever fits the limits can be handed to an idle engine."""
        scheduler, waiting = self.scheduler, self.scheduler.admission
        promised = scheduler.outstanding() + waiting.promised_to_waiting
        blocks = self.config.watermark_blocks - scheduler.blocks.num_used - promised
        tokens = max(0, blocks) // len(self.config.windows) * self.config.block_size
        places = self.config.max_sequences - len(scheduler.running) - len(waiting.queue)
        return Capacity(
            kv_tokens=tokens if self._requests else self.config.kv_tokens,
            adapter_rank=max(0, waiting.gate.free_rank() - waiting.rank_wanted()),
            requests=max(0, places),
            running=len(self._requests),
            resident=self._adapters.resident(),
        )

    def stats(self) -> EngineStats:
        counts = self._adapters.counts()
        return engine_stats(self.scheduler, self._last_batch, counts, self.latencies)

    def _account(
        self, batch: ScheduledBatch, tokens: list[SampledToken], began: float, ended: float
    ) -> None:
        sampling = [scheduled.sequence for scheduled in batch.sequences if scheduled.samples]
        pairs = list(zip(sampling, tokens, strict=True))
        self.scheduler.complete(batch)
        self._count_slots()
        requests = self._requests
        for scheduled in batch.sequences:
            request = requests[scheduled.sequence.request_id]
            if request.times.computed is None:
                request.times.computed = began
                self._outputs.append(StartedOutput(request.request_id))
        for sequence, sampled in pairs:
            if (found := requests.get(sequence.request_id)) is not None:
                self._append(found, sequence, sampled, ended)

    def _count_slots(self) -> None:
        size, groups, scheduler = self.config.block_size, len(self.config.windows), self.scheduler
        self.counters.allocated_slots += scheduler.blocks.num_held * size
        self.counters.unused_slots += unused_slots(scheduler.running, size, groups)

    def _append(
        self, request: ActiveRequest, sequence: Sequence, sampled: SampledToken, now: float
    ) -> None:
        if sampled.error is not None:
            self._fail(sequence.request_id, "numerical_error", sampled.error)
            return
        self.counters.output_tokens += 1
        if request.times.answered is None:
            request.times.answered = now
        delta = request.append(sequence.choice, sampled, self._eos)
        if delta is not None:
            self._outputs.append(delta)
        if sequence.finish_reason is None:
            return
        self.scheduler.remove(sequence)
        if not request.open_choices:
            del self._requests[request.request_id]
            self.counters.finished += 1
            self.latencies.finished(request.times, now)
            self._outputs.append(request.finished(now))

    def _fail(self, request_id: RequestId, code: StepFailureCode, message: str) -> None:
        request = self._requests.get(request_id)
        if request is None:
            return
        self._drop(request, trusted=code != "numerical_error")
        self.counters.failed += 1
        retryable = code in ("adapter_unavailable", "store_unavailable")
        self._outputs.append(FailedOutput(request_id, code, message, retryable))

    def _drop(self, request: ActiveRequest, *, trusted: bool = True) -> None:
        del self._requests[request.request_id]
        for sequence in request.sequences:
            self.scheduler.remove(sequence, trusted=trusted)

    def _without_failed(self, batch: ScheduledBatch) -> ScheduledBatch:
        """A choice that runs leaves the batch when the adapter of a waiting one failed."""
        kept = tuple(s for s in batch.sequences if s.sequence.request_id in self._requests)
        return batch if len(kept) == len(batch.sequences) else ScheduledBatch(kept)
