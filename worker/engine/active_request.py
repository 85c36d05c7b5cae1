"""A request inside the engine: its choices, their text, and when each is complete."""

from __future__ import annotations

from dataclasses import dataclass, field

from worker.engine.batch import SampledToken
from worker.engine.detokenizer import ChoiceText
from worker.engine.latency import RequestTimes
from worker.engine.outputs import DeltaOutput, FinishedOutput
from worker.engine.sequence import Sequence
from worker.protocol.types import Choice, RequestId, TokenUsage


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """`sequences[i]` and `texts[i]` are choice i. `most_tokens` ends each of them. `streamed`:
    somebody reads along."""

    request_id: RequestId
    sequences: tuple[Sequence, ...]
    texts: tuple[ChoiceText, ...]
    most_tokens: int
    streamed: bool
    times: RequestTimes
    open_choices: int = field(init=False)

    def __post_init__(self) -> None:
        self.open_choices = len(self.sequences)

    def append(self, choice: int, sampled: SampledToken, eos: frozenset[int]) -> DeltaOutput | None:
        """Add a token to a choice; sets the sequence's `finish_reason` when that completes it.

        The end-of-sequence token counts and is listed, but has no text.
        """
        sequence, text = self.sequences[choice], self.texts[choice]
        token_id, logprob = sampled.token_id, sampled.logprob
        sequence.output_ids.append(token_id)
        index = len(sequence.output_ids) - 1
        if logprob is not None:
            sequence.logprobs.append(logprob)
        ends = token_id in eos or token_id in sequence.sampling.stop_token_ids
        ended = ends and not sequence.sampling.ignore_eos
        new, stopped = ("", False) if ended else text.push(token_id)
        if ended or stopped or index + 1 >= self.most_tokens:
            if not stopped:
                rest, stopped = text.finish()
                new += rest
            sequence.finish_reason = "stop" if ended or stopped else "length"
            self.open_choices -= 1
        if not self.streamed:
            return None
        logprobs = None if logprob is None else (logprob,)
        return DeltaOutput(self.request_id, choice, index, (token_id,), new, logprobs)

    def finished(self, now: float) -> FinishedOutput:
        """The answer, at this time of the engine's clock. Prompt tokens count once, those cached
        as the first choice found them."""
        first = self.sequences[0]
        completion = sum(len(sequence.output_ids) for sequence in self.sequences)
        usage = TokenUsage(len(first.prompt_ids), first.num_cached, completion)
        choices = tuple(map(_choice, self.sequences, self.texts))
        return FinishedOutput(self.request_id, choices, usage, self.times.computing(now))


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
