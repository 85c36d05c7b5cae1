"""Logits to tokens: bias and penalties, then the choice, then what is reported about it."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Rows
from typing import Any

import torch
from torch import Tensor

from kernels.penalise import PenaltyPlan, penalise
from kernels.sample import SamplingPlan, logprobs, sample
from worker.engine.batch import SampledToken
from worker.engine.random_numbers import uniform
from worker.engine.sequence import Sequence
from worker.engine.token_counts import TokenCounts
from worker.protocol.types import SamplingParams, TokenLogprob


@torch.inference_mode()
def sample_tokens(logits: Tensor, sequences: Rows[Sequence]) -> list[SampledToken]:
    """One token per row of `logits`, float32 [sequences, vocabulary], which stays as it was.

    Order, as in vLLM: logit bias, repetition, frequency and presence penalties, temperature,
    min-p, top-k, top-p. Log-probabilities are those of the model itself, before all that. A
    row whose logits are not numbers, are not once they are penalised, or whose bias names no
    token, gets an `error` instead.
    """
    errors = [_bias_error(sequence, logits.shape[1]) for sequence in sequences]
    with _adjusted(logits, sequences, errors):
        chosen = sample(logits, _plan(sequences, logits.device)).tolist()
    errors = [
        error or (_not_finite(logits[row]) if token < 0 else None)
        for row, (token, error) in enumerate(zip(chosen, errors, strict=True))
    ]
    reports = _reports(logits, sequences, chosen, errors)
    return [
        SampledToken(token, report) if error is None else SampledToken(-1, error=error)
        for token, report, error in zip(chosen, reports, errors, strict=True)
    ]


def _bias_error(sequence: Sequence, vocabulary: int) -> str | None:
    biased = [token for token, _ in sequence.sampling.logit_bias]
    if biased and not 0 <= min(biased) <= max(biased) < vocabulary:
        return f"logit_bias names a token outside of the {vocabulary} there are"
    return None


def _not_finite(logits: Tensor) -> str:
    if bool(logits.amax().isfinite()):
        return "bias and penalties make the logits overflow"
    return "the model's logits are not finite"


@contextlib.contextmanager
def _adjusted(
    logits: Tensor, sequences: Rows[Sequence], errors: Rows[str | None]
) -> Iterator[None]:
    """Biased and penalised meanwhile, where few numbers change: a copy would take all of them."""
    rows = [
        (row, sequence)
        for row, (sequence, error) in enumerate(zip(sequences, errors, strict=True))
        if error is None and _adjusts(sequence.sampling)
    ]
    if not rows:
        yield
        return
    plan = _penalties(rows, logits.device)
    places = (
        torch.cat([plan.bias_rows, plan.seen_rows]),
        torch.cat([plan.bias_tokens, plan.seen_tokens]),
    )
    before = logits[places]
    penalise(logits, plan)
    try:
        yield
    finally:
        logits[places] = before


def _adjusts(sampling: SamplingParams) -> bool:
    return bool(
        sampling.logit_bias
        or sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.repetition_penalty != 1
    )


def _penalties(rows: Rows[tuple[int, Sequence]], device: torch.device) -> PenaltyPlan:
    biased = [(row, *entry) for row, seq in rows for entry in seq.sampling.logit_bias]
    counted = [(row, sequence, _counts(sequence)) for row, sequence in rows]
    lengths = torch.tensor([len(counts.tokens) for _, _, counts in counted])
    strengths = torch.tensor(
        [
            (
                s.sampling.repetition_penalty,
                s.sampling.frequency_penalty,
                s.sampling.presence_penalty,
            )
            for _, s, _ in counted
        ]
    )
    seen_rows = torch.tensor([row for row, _, _ in counted]).repeat_interleave(lengths)
    tokens = _joined([counts.tokens for _, _, counts in counted], torch.int64)
    times = _joined([counts.times for _, _, counts in counted], torch.float32)
    repetition, frequency, presence = strengths.repeat_interleave(lengths, 0).to(device).unbind(1)
    return PenaltyPlan(
        bias_rows=torch.tensor([row for row, _, _ in biased], dtype=torch.int64, device=device),
        bias_tokens=torch.tensor([t for _, t, _ in biased], dtype=torch.int64, device=device),
        biases=torch.tensor([bias for _, _, bias in biased], dtype=torch.float32, device=device),
        seen_rows=seen_rows.to(device),
        seen_tokens=tokens.to(device),
        times=times.to(device),
        repetition=repetition,
        frequency=frequency,
        presence=presence,
    )


def _joined(arrays: Rows[array[Any]], dtype: torch.dtype) -> Tensor:
    numbers = bytearray().join(arrays)
    return torch.frombuffer(numbers, dtype=dtype) if numbers else torch.empty(0, dtype=dtype)


def _counts(sequence: Sequence) -> TokenCounts:
    """Only the repetition penalty looks at the prompt."""
    sampling = sequence.sampling
    if sequence.token_counts is None:
        repeats = sampling.repetition_penalty != 1
        sequence.token_counts = TokenCounts(sequence.prompt_ids if repeats else ())
    if sampling.repetition_penalty != 1 or sampling.frequency_penalty or sampling.presence_penalty:
        sequence.token_counts.update(sequence.output_ids)
    return sequence.token_counts


def _plan(sequences: Rows[Sequence], device: torch.device) -> SamplingPlan:
    params = [sequence.sampling for sequence in sequences]

    def column(values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    uniforms = [
        uniform(sequence.sampling.seed, sequence.choice, sequence.num_tokens)
        if sequence.sampling.temperature
        else 0.0
        for sequence in sequences
    ]
    return SamplingPlan(
        temperatures=column([p.temperature for p in params], torch.float32),
        top_ks=column([p.top_k for p in params], torch.int64),
        top_ps=column([p.top_p for p in params], torch.float64),
        min_ps=column([p.min_p for p in params], torch.float32),
        uniforms=column(uniforms, torch.float64),
    )


def _reports(
    logits: Tensor, sequences: Rows[Sequence], chosen: Rows[int], errors: Rows[str | None]
) -> list[TokenLogprob | None]:
    reports: list[TokenLogprob | None] = [None] * len(sequences)
    counts = {
        row: sequence.sampling.logprobs
        for row, (sequence, error) in enumerate(zip(sequences, errors, strict=True))
        if sequence.sampling.logprobs is not None and error is None
    }
    if not counts:
        return reports
    most = min(max(counts.values()), logits.shape[1])
    found = logprobs(logits, [*counts], [chosen[row] for row in counts], most)
    tops = zip(found.top_tokens.tolist(), found.top.tolist(), strict=True)
    for (row, count), logprob, (tokens, top) in zip(
        counts.items(), found.chosen.tolist(), tops, strict=True
    ):
        pairs = tuple(zip(tokens[:count], top[:count], strict=True))
        reports[row] = TokenLogprob(chosen[row], logprob, pairs)
    return reports
