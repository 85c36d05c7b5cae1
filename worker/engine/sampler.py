"""Logits to tokens: bias and penalties, then the choice, then what is reported about it."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from kernels.penalise import PenaltyPlan, penalise
from kernels.sample import SamplingPlan, sample
from worker.engine.batch import SampledToken
from worker.engine.random_numbers import uniform
from worker.engine.sequence import Sequence
from worker.engine.token_counts import TokenCounts
from worker.protocol.types import SamplingParams, TokenLogprob


def sample_tokens(logits: Tensor, sequences: Rows[Sequence]) -> list[SampledToken]:
    """One token per row of `logits`, float32 [sequences, vocabulary], which stays untouched.

    Order, as in vLLM: logit bias, repetition, frequency and presence penalties, temperature,
    min-p, top-k, top-p. Log-probabilities are those of the model itself, before all that. A
    row whose logits are not numbers, are not once they are penalised, or whose bias names no
    token, gets an `error` instead.
    """
    errors = _errors(logits, sequences)
    logits = _without_broken(logits, errors)
    adjusted = _adjust(logits, sequences, errors)
    if adjusted is not logits:
        errors = _overflows(adjusted, errors)
        adjusted = _without_broken(adjusted, errors)
    chosen = sample(adjusted, _plan(sequences, logits.device)).tolist()
    reports = _logprobs(logits, sequences, chosen)
    return [
        SampledToken(token, report) if error is None else SampledToken(-1, error=error)
        for token, report, error in zip(chosen, reports, errors, strict=True)
    ]


def _errors(logits: Tensor, sequences: Rows[Sequence]) -> list[str | None]:
    finite = torch.isfinite(logits.amax(1)).tolist()
    vocabulary = logits.shape[1]
    errors: list[str | None] = []
    for is_finite, sequence in zip(finite, sequences, strict=True):
        biased = [token for token, _ in sequence.sampling.logit_bias]
        if not is_finite:
            errors.append("the model's logits are not finite")
        elif biased and not 0 <= min(biased) <= max(biased) < vocabulary:
            errors.append(f"logit_bias names a token outside of the {vocabulary} there are")
        else:
            errors.append(None)
    return errors


def _overflows(adjusted: Tensor, errors: Rows[str | None]) -> list[str | None]:
    finite = torch.isfinite(adjusted.amax(1)).tolist()
    return [
        error or (None if is_finite else "bias and penalties make the logits overflow")
        for is_finite, error in zip(finite, errors, strict=True)
    ]


def _without_broken(logits: Tensor, errors: Rows[str | None]) -> Tensor:
    """Rows with an error are sampled like others, from zeros; nobody sees what comes out."""
    if not any(errors):
        return logits
    broken = torch.tensor([error is not None for error in errors], device=logits.device)
    return logits.masked_fill(broken[:, None], 0)


def _adjust(logits: Tensor, sequences: Rows[Sequence], errors: Rows[str | None]) -> Tensor:
    rows = [
        (row, sequence)
        for row, (sequence, error) in enumerate(zip(sequences, errors, strict=True))
        if error is None and _adjusts(sequence.sampling)
    ]
    if not rows:
        return logits
    adjusted = logits.clone()
    penalise(adjusted, _penalties(rows, logits.device))
    return adjusted


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
    tokens = torch.tensor([token for _, _, counts in counted for token in counts.tokens])
    times = torch.tensor([float(n) for _, _, counts in counted for n in counts.times])
    repetition, frequency, presence = strengths.repeat_interleave(lengths, 0).to(device).unbind(1)
    return PenaltyPlan(
        bias_rows=torch.tensor([row for row, _, _ in biased], dtype=torch.int64, device=device),
        bias_tokens=torch.tensor([t for _, t, _ in biased], dtype=torch.int64, device=device),
        biases=torch.tensor([bias for _, _, bias in biased], dtype=torch.float32, device=device),
        seen_rows=seen_rows.to(device),
        seen_tokens=tokens.to(device, torch.int64),
        times=times.to(device),
        repetition=repetition,
        frequency=frequency,
        presence=presence,
    )


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


def _logprobs(
    logits: Tensor, sequences: Rows[Sequence], chosen: Rows[int]
) -> list[TokenLogprob | None]:
    reports: list[TokenLogprob | None] = [None] * len(sequences)
    rows = [row for row, seq in enumerate(sequences) if seq.sampling.logprobs is not None]
    if not rows:
        return reports
    wanted = max(sequences[row].sampling.logprobs or 0 for row in rows)
    logprobs = torch.log_softmax(logits[rows], 1)
    tokens = torch.tensor([chosen[row] for row in rows], device=logits.device)
    of_chosen = logprobs.gather(1, tokens[:, None])[:, 0].tolist()
    top = logprobs.topk(min(wanted, logits.shape[1]), dim=1)
    tops = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    for row, logprob, (ids, values) in zip(rows, of_chosen, tops, strict=True):
        count = sequences[row].sampling.logprobs or 0
        pairs = tuple(zip(ids[:count], values[:count], strict=True))
        reports[row] = TokenLogprob(chosen[row], logprob, pairs)
    return reports
