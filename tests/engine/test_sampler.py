"""Penalties, bias, log-probabilities, seeds and broken rows."""

import math

import pytest
import torch

from tests.engine.driver import sequence
from worker.engine import sampler
from worker.engine.random_numbers import uniform
from worker.engine.sampler import sample_tokens
from worker.protocol.types import SamplingParams

VOCABULARY = 20


def params(**changes):
    return SamplingParams(**{"max_tokens": 9, "temperature": 0.0, **changes})


def one(logits, prompt=(3,), output=(), choice=0, **changes):
    item = sequence(prompt, sampling=params(**changes), choice=choice)
    item.output_ids = list(output)
    return sample_tokens(torch.tensor([logits], dtype=torch.float32), [item])[0]


def ramp(**raised):
    """Logits 0 but for the named tokens."""
    logits = [0.0] * VOCABULARY
    for name, value in raised.items():
        logits[int(name[1:])] = value
    return logits


def test_greedy_takes_the_largest():
    assert one(ramp(t4=2.0, t9=3.0)).token_id == 9


@pytest.mark.parametrize(
    ("changes", "winner"),
    [
        ({"presence_penalty": 0.5}, 9),
        ({"presence_penalty": 1.5}, 4),
        ({"frequency_penalty": 0.45}, 9),
        ({"frequency_penalty": 0.55}, 4),
        ({"presence_penalty": 0.5, "frequency_penalty": 0.3}, 4),
        ({"presence_penalty": -5.0}, 9),
    ],
)
def test_presence_and_frequency_count_generated_tokens_only(changes, winner):
    """9 leads 4 by one and was generated twice; 4 only stands in the prompt."""
    assert one(ramp(t4=2.0, t9=3.0), prompt=(4, 4, 4), output=(9, 9), **changes).token_id == winner


def test_repetition_penalty_divides_and_multiplies_like_hugging_face():
    from transformers import RepetitionPenaltyLogitsProcessor

    torch.manual_seed(0)
    logits = torch.randn(1, VOCABULARY)
    item = sequence((3, 5, 5), sampling=params(repetition_penalty=1.7, logprobs=0))
    item.output_ids = [7, 3]
    ids = torch.tensor([[3, 5, 5, 7, 3]])
    want = RepetitionPenaltyLogitsProcessor(1.7)(ids, logits.clone()).argmax().item()
    assert sample_tokens(logits, [item])[0].token_id == want
    logits[0, 7] = logits.max() + 0.5
    want = RepetitionPenaltyLogitsProcessor(1.7)(ids, logits.clone()).argmax().item()
    assert sample_tokens(logits, [item])[0].token_id == want != 7


def test_bias_moves_a_token_and_bans_another():
    logits = ramp(t4=2.0, t9=3.0)
    assert one(logits, logit_bias=((4, 1.5),)).token_id == 4
    assert one(logits, logit_bias=((9, -100.0),)).token_id == 4


def test_bias_outside_of_the_vocabulary_fails_its_row_only():
    logits = torch.tensor([ramp(t4=2.0), ramp(t5=2.0)])
    rows = [sequence((3,), sampling=params(logit_bias=((20, 1.0),))), sequence((3,))]
    bad, good = sample_tokens(logits, rows)
    assert "logit_bias" in bad.error
    assert (good.token_id, good.error) == (5, None)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_that_is_not_finite_fails_alone(value):
    logits = torch.tensor([ramp(t4=2.0), ramp(t5=value), [-math.inf] * VOCABULARY])
    rows = [sequence((3,), sampling=params(temperature=1.0, top_p=0.1)) for _ in range(3)]
    tokens = sample_tokens(logits, rows)
    assert tokens[0].error is None
    assert tokens[0].token_id == 4
    assert all("not finite" in token.error for token in tokens[1:])


def test_logprobs_are_the_models_own():
    torch.manual_seed(0)
    logits = torch.randn(2, VOCABULARY)
    rows = [
        sequence((3,), sampling=params(logprobs=3, temperature=0.1, logit_bias=((4, 100.0),))),
        sequence((3,), sampling=params()),
    ]
    biased, silent = sample_tokens(logits.clone(), rows)
    want = torch.log_softmax(logits[0], 0)
    assert biased.token_id == biased.logprob.token_id == 4
    assert biased.logprob.logprob == pytest.approx(want[4].item())
    top = want.topk(3)
    assert [token for token, _ in biased.logprob.top] == top.indices.tolist()
    assert [value for _, value in biased.logprob.top] == pytest.approx(top.values.tolist())
    assert silent.logprob is None
    assert one(logits[1].tolist(), logprobs=0).logprob.top == ()


def test_the_given_logits_stay_untouched():
    logits = torch.tensor([ramp(t4=2.0)])
    before = logits.clone()
    item = sequence((3,), sampling=params(temperature=1.0, logit_bias=((4, 1.0),), top_k=3))
    sample_tokens(logits, [item])
    assert torch.equal(logits, before)


def test_an_error_says_whether_the_model_or_the_penalties_broke_a_row():
    logits = torch.tensor([ramp(t4=2.0), ramp(t4=-math.inf, t5=math.nan), ramp(t9=3.0)])
    heavy = params(repetition_penalty=1e-300, logprobs=2)
    rows = [sequence((4,), sampling=changes) for changes in (heavy, heavy, params(logprobs=0))]
    tokens = sample_tokens(logits, rows)
    assert [token.error for token in tokens] == [
        "bias and penalties make the logits overflow",
        "the model's logits are not finite",
        None,
    ]
    assert [token.logprob is None for token in tokens] == [True, True, False]
    assert tokens[2].token_id == 9


def test_logits_are_as_they_were_also_where_sampling_fails(monkeypatch):
    def fail(logits, plan):
        assert logits[0, 4] == -98
        raise MemoryError

    monkeypatch.setattr(sampler, "sample", fail)
    logits = torch.tensor([ramp(t4=2.0)])
    before = logits.clone()
    with pytest.raises(MemoryError):
        sample_tokens(logits, [sequence((3,), sampling=params(logit_bias=((4, -50), (4, -50))))])
    assert torch.equal(logits, before)


def sampled(seed, choice=0, position=1, mates=0):
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(1, 500, generator=generator)
    item = sequence(
        range(position), sampling=params(seed=seed, temperature=1.0, top_p=0.95), choice=choice
    )
    others = [sequence((1, 2), sampling=params(temperature=2.0, seed=i)) for i in range(mates)]
    noise = torch.randn(mates, 500, generator=generator)
    return sample_tokens(torch.cat([noise, logits]), [*others, item])[-1].token_id


def test_a_token_depends_on_seed_choice_and_position_and_on_nothing_else():
    assert sampled(1) == sampled(1) == sampled(1, mates=7)
    assert len({sampled(seed) for seed in range(40)}) > 20
    assert len({sampled(1, choice=choice) for choice in range(40)}) > 20
    assert len({sampled(1, position=position) for position in range(1, 41)}) > 20


def test_uniforms_are_uniform_and_unrelated():
    by_seed = torch.tensor([uniform(seed, 0, 9) for seed in range(4000)], dtype=torch.float64)
    by_position = torch.tensor([uniform(9, 0, p) for p in range(4000)], dtype=torch.float64)
    for values in (by_seed, by_position):
        assert 0 <= values.min() < values.max() < 1
        counts = torch.histc(values, bins=20, min=0, max=1)
        assert ((counts - 200) ** 2 / 200).sum() < 45  # chi-square, 19 degrees: p about 0.001
        assert torch.corrcoef(torch.stack([values[:-1], values[1:]]))[0, 1].abs() < 0.06
    assert uniform(-1, 0, 0) == uniform(2**64 - 1, 0, 0)
