"""The Triton sampler: in Triton's interpreter, or on a GPU, against float64."""

import inspect

import pytest
import torch

pytest.importorskip("triton")

from kernels.sample import SamplingPlan, reference, triton_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SETTINGS = [  # temperature, top_k, top_p, min_p
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.3, 0, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 40, 1.0, 0.0),
    (1.0, 100_000, 1.0, 0.0),
    (1.0, 0, 0.5, 0.0),
    (1.0, 0, 0.999, 0.0),
    (1.0, 0, 1e-9, 0.0),
    (1.0, 0, 1.0, 0.2),
    (2.0, 300, 0.9, 0.01),
    (1e-45, 0, 1.0, 0.0),
]


def plan(rows):
    """`rows` rows of every setting."""
    columns = list(zip(*[setting for setting in SETTINGS for _ in range(rows)], strict=True))
    types = (torch.float32, torch.int64, torch.float64, torch.float32)
    generator = torch.Generator().manual_seed(5)
    uniforms = torch.rand(rows * len(SETTINGS), dtype=torch.float64, generator=generator)
    uniforms[::rows] = 0
    tensors = [torch.tensor(c, dtype=t) for c, t in zip(columns, types, strict=True)]
    return SamplingPlan(*(tensor.to(DEVICE) for tensor in [*tensors, uniforms]))


def interval(logits, temperature, top_k, top_p, min_p):
    """float64 [vocabulary, 2]: the random numbers that each token is chosen for."""
    shifted = (logits - logits.max()).double()
    p = torch.softmax(shifted / max(temperature, 1e-38), 0)
    floor = min_p * p.max()
    if 0 < top_k <= len(p):
        floor = max(floor, p.sort(descending=True).values[top_k - 1])
    p = p.where(p >= floor * (1 - 1e-6), 0)
    if top_p < 1:
        ranked = p.sort(descending=True).values
        last = int((ranked.cumsum(0) >= top_p * p.sum()).to(torch.uint8).argmax())
        p = p.where(p >= ranked[last] * (1 - 1e-6), 0)
    ends = (p / p.sum()).cumsum(0)
    return p, torch.stack([ends - p / p.sum(), ends], 1)


def check(vocabulary, rows=3):
    generator = torch.Generator().manual_seed(3)
    sampling = plan(rows)
    logits = torch.randn(len(sampling.uniforms), vocabulary, generator=generator) * 2
    got = triton_kernel.sample(logits.to(DEVICE), sampling).tolist()
    for index, token in enumerate(got):
        setting = SETTINGS[index // rows]
        if setting[0] == 0:
            assert token == int(logits[index].argmax())
            continue
        kept, ends = interval(logits[index], *setting)
        uniform = float(sampling.uniforms[index])
        assert kept[token] > 0
        assert ends[token, 0] - 1e-6 <= uniform <= ends[token, 1] + 1e-6, (setting, token)


def test_falls_on_the_token_of_the_random_number():
    check(700)


@pytest.mark.full
@pytest.mark.parametrize("vocabulary", [1, 7, 4096, 4097, 49_152])
def test_falls_on_the_token_of_the_random_number_at_every_size(vocabulary):
    check(vocabulary)


def test_equal_weights_at_an_edge_are_all_kept():
    logits = torch.tensor([[1.0, 3.0, 1.0, 1.0, -5.0]]).repeat(24, 1)
    uniforms = (torch.arange(24, dtype=torch.float64) + 0.5) / 24
    full = SamplingPlan(
        torch.ones(24), torch.full((24,), 2), torch.ones(24, dtype=torch.float64),
        torch.zeros(24), uniforms,
    )  # fmt: skip
    on_device = SamplingPlan(*(getattr(full, name).to(DEVICE) for name in full.__slots__))
    got = triton_kernel.sample(logits.to(DEVICE), on_device).cpu()
    assert set(got.tolist()) == {0, 1, 2, 3}
    assert torch.equal(got, reference.sample(logits, full))


def test_a_row_is_sampled_the_same_alone_and_with_infinities_around():
    sampling = plan(1)
    logits = torch.randn(len(SETTINGS), 300, generator=torch.Generator().manual_seed(1))
    logits[:, ::7] = -torch.inf
    together = triton_kernel.sample(logits.to(DEVICE), sampling)
    for row in range(len(SETTINGS)):
        one = SamplingPlan(*(getattr(sampling, n)[row : row + 1] for n in sampling.__slots__))
        alone = triton_kernel.sample(logits[row : row + 1].to(DEVICE), one)
        assert alone.item() == together[row].item()
        assert alone.item() % 7 or not torch.isinf(logits[row, alone.item()])


def test_both_implementations_have_one_signature():
    assert inspect.signature(triton_kernel.sample) == inspect.signature(reference.sample)
