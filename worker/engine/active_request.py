"""A request inside the engine: its choices, their text, and when each is complete."""

from __future__ import annotations

from dataclasses import dataclass, field

from worker.engine.batch import SampledToken
from worker.engine.detokenizer import ChoiceText
from worker.engine.latency import RequestTimes
from worker.engine.outputs import DeltaOutput, FinishedOutput
from worker.engine.sequence import Sequence
from worker.protocol.types import Choice, FinishReason, RequestId, TokenUsage


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """`sequences[i]` and `texts[i]` are choice i. `streamed`: somebody reads along."""

    request_id: RequestId
    sequences: tuple[Sequence, ...]
    texts: tuple[ChoiceText, ...]
    streamed: bool
    times: RequestTimes
    open_choices: int = field(init=False)

    def __post_init__(self) -> None:
        self.open_choices = len(self.sequences)

    def append(
        self, choice: int, sampled: SampledToken, eos: frozenset[int], context_tokens: int
    ) -> DeltaOutput | None:
        """Add a token to a choice; sets the sequence's `finish_reason` when that completes it.

        The end-of-sequence token counts and is listed, but has no text.
        """
        sequence, text = self.sequences[choice], self.texts[choice]
        sequence.output_ids.append(sampled.token_id)
        if sampled.logprob is not None:
            sequence.logprobs.append(sampled.logprob)
        ended = sampled.token_id in eos and not sequence.sampling.ignore_eos
        new, stopped = ("", False) if ended else text.push(sampled.token_id)
        reason = _finish_reason(sequence, ended or stopped, context_tokens)
        if reason is not None and not stopped:
            rest, stopped = text.finish()
            new += rest
        if reason is not None:
            sequence.finish_reason = "stop" if stopped else reason
            self.open_choices -= 1
        if not self.streamed:
            return None
        index = len(sequence.output_ids) - 1
        logprobs = None if sampled.logprob is None else (sampled.logprob,)
        return DeltaOutput(self.request_id, choice, index, (sampled.token_id,), new, logprobs)

    def finished(self) -> FinishedOutput:
        """The answer. Prompt tokens count once, those cached as the first choice found them."""
        first = self.sequences[0]
        completion = sum(len(sequence.output_ids) for sequence in self.sequences)
        usage = TokenUsage(len(first.prompt_ids), first.num_cached, completion)
        choices = tuple(map(_choice, self.sequences, self.texts))
        return FinishedOutput(self.request_id, choices, usage)


def _finish_reason(sequence: Sequence, ended: bool, context_tokens: int) -> FinishReason | None:
    if ended:
        return "stop"
    if len(sequence.output_ids) >= sequence.sampling.max_tokens:
        return "length"
    return "length" if sequence.num_tokens >= context_tokens else None


def _choice(sequence: Sequence, text: ChoiceText) -> Choice:
    if sequence.finish_reason is None:
        raise ValueError(f"choice {sequence.choice} of {sequence.request_id} is not complete")
    return Choice(
        index=sequence.choice,
        text=text.text,
        token_ids=tuple(sequence.output_ids),
        finish_reason=sequence.finish_reason,
        logprobs=tuple(sequence.logprobs) if sequence.sampling.logprobs is not None else None,
    )
