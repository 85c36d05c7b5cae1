"""A second, reordered copy of weights: the same bits, whoever calls the layer."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call

from worker.engine.packed_linear import PackedLinear, pack, packable


@pytest.fixture
def model():
    torch.manual_seed(0)
    layers = [nn.Linear(64, 96), nn.Linear(96, 33, bias=False), nn.LayerNorm(33)]
    model = nn.Sequential(*layers).bfloat16().requires_grad_(False)
    if not packable(model):
        pytest.skip("this processor doesn't multiply bfloat16")
    return model


@pytest.mark.parametrize("tokens", [1, 2, 8, 33, 200])
def test_the_bits_are_those_of_the_plain_layers(model, tokens):
    x = torch.randn(1, tokens, 64).bfloat16()
    with torch.inference_mode():
        expected = model(x)
        pack(packable(model))
        assert torch.equal(model(x), expected)
    assert [type(layer) for layer in model[:2]] == [PackedLinear] * 2
    assert not packable(model)


def test_other_parameters_are_respected_and_none_are_added(model):
    names = list(model.state_dict())
    pack(packable(model))
    x, weight = torch.randn(3, 64).bfloat16(), torch.randn(96, 64).bfloat16()
    expected = nn.functional.linear(x, weight, model[0].bias)
    with torch.inference_mode():
        assert torch.equal(functional_call(model[0], {"weight": weight}, (x,)), expected)
        assert torch.equal(copy.copy(model[0])(x), model[0](x))
    assert list(model.state_dict()) == names
    assert len(list(model.parameters(recurse=True))) == len(names)


def test_float32_is_left_alone(model):
    assert packable(model.float()) == []
