"""The C++ sampler against float64 and the reference, and a row's token alone and in batches."""

import inspect
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import native
from kernels.errors import KernelArgumentError
from kernels.sample import SamplingPlan, cpu, logprobs, reference

pytestmark = pytest.mark.skipif(native.library(cpu.SOURCE) is None, reason="no C++ compiler")

EDGE = 1e-5  # as `sample` says
TYPES = (torch.float32, torch.int64, torch.float64, torch.float32)
SETTINGS = {  # temperature, top_k, top_p, min_p
    "greedy": (0.0, 0, 1.0, 0.0),
    "plain": (1.0, 0, 1.0, 0.0),
    "cold": (0.3, 0, 1.0, 0.0),
    "hot": (30.0, 0, 1.0, 0.0),
    "top-k 1": (1.0, 1, 1.0, 0.0),
    "top-k 40": (1.0, 40, 1.0, 0.0),
    "top-k 900": (1.0, 900, 1.0, 0.0),
    "top-p 0.9": (1.0, 0, 0.9, 0.0),
    "top-p 0.9999": (1.0, 0, 0.9999, 0.0),
    "top-p 0.01": (1.0, 0, 0.01, 0.0),
    "min-p 0.02": (1.0, 0, 1.0, 0.02),
    "min-p 1e-12": (1.0, 0, 1.0, 1e-12),
    "top-k 50 top-p 0.9": (0.8, 50, 0.9, 0.0),
    "min-p 0.01 top-p 0.5": (0.8, 0, 0.5, 0.01),
    "all": (2.0, 300, 0.9, 0.01),
}
VOCABULARIES = [1, 2, 15, 16, 17, 1023, 1024, 1025, 5000, 49_152]


def random(rows, vocabulary, seed=0, spread=4.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocabulary, generator=generator) * spread


def uniforms(rows, seed=0):
    return torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def plan_of(rows, numbers):
    """One row of each setting."""
    columns = zip(*rows, strict=True)
    tensors = [torch.tensor(c, dtype=t) for c, t in zip(columns, TYPES, strict=True)]
    return SamplingPlan(*tensors, uniforms=numbers)


def same(rows, setting, numbers=None):
    return plan_of([setting] * rows, uniforms(rows) if numbers is None else numbers)


def kept(logits, temperature, top_k, top_p, min_p, slack):
    """float64 probabilities that pass; with more slack, more do."""
    p = torch.softmax((logits.double() - logits.double().max()) / max(temperature, 2.0**-126), 0)
    keep = p >= min(min_p * (1 - slack), 1) * p.max()
    if 0 < top_k <= len(p):
        keep &= logits >= logits.sort(descending=True).values[top_k - 1]
    p = p.where(keep, 0)
    if top_p < 1:
        ranked = p.sort(descending=True).values
        reached = ranked.cumsum(0) >= top_p * p.sum() * (1 + slack)
        last = int(reached.to(torch.uint8).argmax()) if reached.any() else -1
        p = p.where(p >= ranked[last] * (1 - max(slack, 0)), 0)
    return p / p.sum()


def certain(logits, setting, uniform):
    """The token that float64 chooses, None where its choice hangs on the last digits."""
    if setting[0] == 0:
        return int(logits.argmax())
    wide, narrow = (kept(logits, *setting, slack) for slack in (EDGE, -EDGE))
    if not torch.equal(wide > 0, narrow > 0):
        return None
    ends = wide.cumsum(0)
    if (ends - uniform).abs().min() < EDGE:
        return None
    return int((ends > uniform).to(torch.uint8).argmax())


def check_allowed(logits, setting, uniform, token):
    """Also where digits decide, it is one of those that they may choose."""
    if setting[0] == 0:
        assert token == int(logits.argmax())
        return
    intervals = [kept(logits, *setting, slack) for slack in (EDGE, -EDGE)]
    assert intervals[0][token] > 0
    ends = [p.cumsum(0)[token].item() for p in intervals]
    starts = [end - p[token].item() for end, p in zip(ends, intervals, strict=True)]
    assert min(starts) - EDGE <= uniform <= max(ends) + EDGE


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_chooses_as_float64_does(vocabulary):
    rows = 4 if vocabulary > 10_000 else 12
    cases = [setting for setting in SETTINGS.values() for _ in range(rows)]
    logits = random(len(cases), vocabulary, seed=vocabulary)
    logits[1::3] = logits[1::3].bfloat16().float()  # as models give them: many are equal
    plan = plan_of(cases, uniforms(len(cases), seed=vocabulary))
    found, defined = (op.sample(logits, plan).tolist() for op in (cpu, reference))
    decided = 0
    for row, setting, uniform, token, other in zip(
        logits, cases, plan.uniforms.tolist(), found, defined, strict=True
    ):
        wanted = certain(row, setting, uniform)
        if wanted is None:
            check_allowed(row, setting, uniform, token)
        else:
            assert token == other == wanted, setting
            decided += 1
    assert decided > 0.5 * len(cases)


@settings(max_examples=150, deadline=None)
@given(
    vocabulary=st.integers(1, 2100),
    spread=st.sampled_from([0.0, 0.01, 1.0, 5.0, 1e4, 1e37]),
    infinite=st.floats(0, 1),
    temperature=st.one_of(st.floats(0, 5, width=32), st.sampled_from([1e-45, 1e-38, 1e37])),
    top_k=st.one_of(st.integers(0, 60), st.integers(0, 3000), st.just(2**62)),
    top_p=st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1e-300, 1 - 2**-53])),
    min_p=st.one_of(st.just(0.0), st.floats(0, 1, width=32)),
    uniform=st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 1 - 2**-53])),
    seed=st.integers(0, 99),
)
def test_any_parameters_choose_a_token_that_float64_may(
    vocabulary, spread, infinite, temperature, top_k, top_p, min_p, uniform, seed
):
    logits = random(1, vocabulary, seed, spread).clamp(-3e38, 3e38)
    gone = torch.rand(1, vocabulary, generator=torch.Generator().manual_seed(seed)) < infinite
    gone[0, seed % vocabulary] = False
    logits[gone] = -torch.inf
    setting = (temperature, top_k, top_p, min_p)
    plan = same(1, setting, torch.tensor([uniform], dtype=torch.float64))
    token = cpu.sample(logits, plan).item()
    assert logits[0, token] > -torch.inf
    check_allowed(logits[0], setting, uniform, token)


def test_falls_on_every_token_as_often_as_it_is_likely():
    rows = 20_000
    numbers = (torch.arange(rows, dtype=torch.float64) + 0.5) / rows
    logits = random(1, 3000, spread=1.0)
    found = cpu.sample(logits.expand(rows, -1), same(rows, SETTINGS["plain"], numbers))
    shares = torch.bincount(found, minlength=3000) / rows
    torch.testing.assert_close(shares, torch.softmax(logits[0], 0), rtol=0, atol=1.5 / rows)


@pytest.mark.parametrize("at", [0, 15, 16, 1000, 1024, 1500, 2049])
def test_the_first_of_equal_logits_wins_and_nan_is_found_anywhere(at):
    logits = random(5, 2050, spread=1.0).clamp_max(5)
    logits[0, at:] = 9.0
    logits[1, at] = torch.nan
    logits[2, at] = torch.inf
    logits[3] = -torch.inf
    logits[4, at] = 9.0
    logits[4, -1] = 9.0
    for name in ("greedy", "plain", "top-k 40", "top-p 0.9", "all"):
        setting = (*SETTINGS[name][:2], 1e-9, 0.0) if name != "greedy" else SETTINGS[name]
        plan = same(5, setting, torch.zeros(5, dtype=torch.float64))
        for op in (cpu, reference):
            assert op.sample(logits, plan).tolist() == [at, -1, -1, -1, at]


def test_zeros_of_both_signs_are_equal():
    logits = torch.tensor([[-1.0, -0.0, 0.0, -2.0]])
    assert cpu.sample(logits, same(1, SETTINGS["greedy"])).item() == 1
    half = torch.tensor([0.75], dtype=torch.float64)
    assert cpu.sample(logits, same(1, SETTINGS["top-k 1"], half)).item() == 2


def test_filters_at_their_ends_keep_the_largest_and_its_equals():
    logits = random(64, 2000).clamp_max(6)
    logits[:, 700] = logits[:, 1300] = 7.0
    logits[:, 900] = 7.0 - 5e-6
    for setting in ((1.0, 0, 0.0, 0.0), (1.0, 0, 1.0, 1.0), (1.0, 1, 1.0, 0.0), (1e-38, 0, 1.0, 0)):
        assert set(cpu.sample(logits, same(64, setting)).tolist()) == {700, 1300}


@pytest.mark.parametrize("name", ["plain", "top-k 900", "top-p 0.9999", "min-p 1e-12"])
def test_the_ends_of_the_unit_interval_choose_what_is_possible(name):
    logits = torch.full((2, 5000), -torch.inf)
    logits[:, 2500:3500] = random(1, 1000, spread=1.0)
    numbers = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    first, last = cpu.sample(logits, same(2, SETTINGS[name], numbers)).tolist()
    assert 2500 <= first < 2520
    assert 3480 < last < 3500


def test_an_infinite_temperature_makes_all_finite_logits_equal():
    logits = random(400, 300)
    logits[:, ::3] = -torch.inf
    numbers = (torch.arange(400, dtype=torch.float64) + 0.5) / 400
    for op in (cpu, reference):
        found = op.sample(logits, same(400, (torch.inf, 0, 1.0, 0.0), numbers))
        assert torch.bincount(found, minlength=300).tolist() == [0, 2, 2] * 100


def test_equal_probabilities_at_an_edge_are_all_kept():
    logits = torch.full((3000, 3000), -5.0)
    logits[:, 1000:2500] = 5.0
    numbers = (torch.arange(3000, dtype=torch.float64) + 0.5) / 3000
    for setting in (
        (1.0, 5, 1.0, 0.0),
        (1.0, 0, 0.01, 0.0),
        (1.0, 0, 1.0, 0.9),
        (1.0, 900, 0.5, 0),
    ):
        found = cpu.sample(logits, same(3000, setting, numbers))
        assert set(found.tolist()) == set(range(1000, 2500))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_row_has_the_same_token_alone_and_in_any_batch(threads):
    """Random numbers close to edges, so that another order of a sum would show."""
    cases = [*SETTINGS.values()] * 4
    logits = random(len(cases), 4099)
    edges = [
        torch.softmax(row.double() / max(setting[0], 0.1), 0).cumsum(0)[2000 + 16 * index]
        for index, (row, setting) in enumerate(zip(logits, cases, strict=True))
    ]
    plan = plan_of(cases, torch.stack(edges).clamp(0, 1 - 2**-53))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = cpu.sample(logits, plan)
    finally:
        torch.set_num_threads(before)
    for row, setting in enumerate(cases):
        alone = same(1, setting, plan.uniforms[row : row + 1])
        assert cpu.sample(logits[row : row + 1], alone).item() == together[row]


@pytest.fixture
def poisoned(monkeypatch):
    """What nobody wrote is NaN, or far from any token."""
    empty = torch.empty

    def poison(*shape, **options):
        tensor = empty(*shape, **options)
        return tensor.fill_(torch.nan if tensor.is_floating_point() else -(2**40))

    monkeypatch.setattr(torch, "empty", poison)


def test_every_result_is_written_and_nothing_beside_a_row_is_read(poisoned):
    wide = torch.full((40, 1700), torch.nan)
    wide[:, 33:1650] = random(40, 1617)
    logits = wide[:, 33:1650]
    cases = [*SETTINGS.values()] * 2
    plan = plan_of(cases, uniforms(len(cases)))
    found = cpu.sample(logits[: len(cases)], plan)
    assert torch.equal(found, cpu.sample(logits[: len(cases)].contiguous(), plan))
    assert found.min() >= 0
    assert torch.equal(found, cpu.sample(logits[: len(cases)].t().contiguous().t(), plan))
    some = cpu.logprobs(logits, [3, 39, 0], [5, 1616, 0], 7)
    assert some.chosen.isfinite().all()
    assert some.top.isfinite().all()
    assert some.top_tokens.min() >= 0


def test_no_rows():
    logits = torch.empty(0, 50)
    assert cpu.sample(logits, plan_of([SETTINGS["plain"]], uniforms(1)[:0])).shape == (0,)
    assert cpu.logprobs(random(3, 50), [], [], 4).top.shape == (0, 4)


@pytest.mark.parametrize("op", [cpu, reference])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_log_probabilities_are_right_to_the_last_digits(op, vocabulary):
    logits = random(6, vocabulary)
    logits[1, ::3] = -torch.inf
    logits[1, 0] = 60.0
    logits[2] = logits[2].bfloat16().float()
    rows, tokens, count = [4, 1, 2], [vocabulary - 1, 0, vocabulary // 2], min(20, vocabulary)
    found = op.logprobs(logits, rows, tokens, count)
    exact = torch.log_softmax(logits[rows].double(), 1)
    close = {"rtol": 3e-7, "atol": 1e-5 if op is reference else 3e-7}
    chosen = exact.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    torch.testing.assert_close(found.chosen.double(), chosen, **close)
    top = exact.topk(count, dim=1).values
    torch.testing.assert_close(found.top.double(), top, **close)
    torch.testing.assert_close(exact.gather(1, found.top_tokens), top)
    assert all(len(set(row)) == count for row in found.top_tokens.tolist())
    assert op.logprobs(logits, rows, tokens, 0).top.shape == (3, 0)


@pytest.mark.parametrize("op", [cpu, reference])
@pytest.mark.parametrize("far", [-3e38, -1e30, 1e12, 3e38])
def test_log_probabilities_of_logits_far_from_zero_keep_their_digits(far, op):
    logits = torch.full((1, 1500), far)
    logits[0, ::3] = -torch.inf
    found = op.logprobs(logits, [0], [1], 9)
    for tensor in (found.chosen, found.top):
        torch.testing.assert_close(tensor, torch.full_like(tensor, -math.log(1000)))


def test_of_equal_log_probabilities_the_first_token_comes_first():
    logits = torch.zeros(1, 3000)
    logits[0, 5:2500:7] = 3.0
    assert cpu.logprobs(logits, [0], [9], 5).top_tokens.tolist() == [[5, 12, 19, 26, 33]]


def test_all_of_a_vocabulary_with_infinities_can_be_listed():
    logits = torch.tensor([[1.0, -torch.inf, 2.0, -torch.inf]])
    found = cpu.logprobs(logits, [0], [1], 4)
    assert found.top_tokens.tolist() == [[2, 0, 1, 3]]
    assert found.chosen.item() == -math.inf


@pytest.mark.parametrize("op", [cpu, reference])
def test_log_probabilities_of_a_broken_row_are_not_numbers(op):
    logits = random(4, 200)
    logits[0, 150] = torch.nan
    logits[1, 150] = torch.inf
    logits[2] = -torch.inf
    found = op.logprobs(logits, range(4), [7] * 4, 3)
    assert found.chosen.isnan().tolist() == [True, True, True, False]
    assert found.top[:3].isnan().all()
    assert 0 <= found.top_tokens.min() <= found.top_tokens.max() < 200


def test_log_probabilities_have_the_same_bits_alone_and_in_any_batch():
    logits = random(70, 5001)
    together = cpu.logprobs(logits, range(70), [7] * 70, 5)
    for row in (0, 33, 69):
        alone = cpu.logprobs(logits[row : row + 1], [0], [7], 5)
        for name in ("chosen", "top", "top_tokens"):
            assert torch.equal(getattr(alone, name)[0], getattr(together, name)[row])


@pytest.mark.parametrize(
    ("argument", "arguments"),
    [
        ("logits", (torch.zeros(5), [0], [0], 1)),
        ("logits", (torch.zeros(2, 5).double(), [0], [0], 1)),
        ("rows", (torch.zeros(2, 5), [2], [0], 1)),
        ("rows", (torch.zeros(2, 5), [0, -1], [0, 0], 1)),
        ("tokens", (torch.zeros(2, 5), [0, 1], [0], 1)),
        ("tokens", (torch.zeros(2, 5), [0, 1], [0, 5], 1)),
        ("tokens", (torch.zeros(2, 5), [0], [-1], 1)),
        ("count", (torch.zeros(2, 5), [0], [0], 6)),
        ("count", (torch.zeros(2, 5), [0], [0], -1)),
    ],
)
def test_a_wrong_argument_is_named(argument, arguments):
    with pytest.raises(KernelArgumentError) as error:
        logprobs(*arguments)
    assert error.value.argument == argument


def test_all_implementations_have_one_signature():
    for name in ("sample", "logprobs"):
        ours, defined = (inspect.signature(getattr(op, name)) for op in (cpu, reference))
        assert ours == defined
