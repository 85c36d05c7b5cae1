"""What adapters change in one linear layer besides their rank rows: DoRA's norm and biases."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kernels.lora import LoraSegments
from worker.adapters.loader import ExtraTensors, ModuleWeights
from worker.engine.adapter_extras import ModuleExtras
from worker.engine.lora import LoraLinear

ROW = 2
CPU = torch.device("cpu")
SEGMENTS = LoraSegments.build([(-1, 1), (0, 2)], [(ROW, ROW + 1)])


def vector(seed):
    return torch.randn(6, generator=torch.Generator().manual_seed(seed))


EXTRAS = {
    "bias": {"bias": vector(1)},
    "lora_bias": {"lora_bias": vector(2)},
    "DoRA": {"magnitude": vector(3).abs()},
    "DoRA and biases": {
        "magnitude": vector(3).abs(),
        "lora_bias": vector(2),
        "bias": vector(1),
    },
}


@pytest.fixture(params=[True, False], ids=["with a bias", "without"])
def linear(request):
    torch.manual_seed(0)
    linear = LoraLinear(nn.Linear(8, 6, bias=request.param))
    linear.attach(5, torch.float32, CPU)
    return linear


def put(linear, tensors, weights):
    host = ExtraTensors(tensors)
    linear.write([ROW, ROW + 1], weights)
    linear.put(ROW, ModuleExtras.on(CPU, torch.float32, host, weights))
    kept = sum(tensor.numel() for tensor in linear.kept(ROW))
    assert 0 < kept <= linear.held(weights, host)


def served(linear):
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(4))
    y = linear.base_layer(x)
    linear.adapt(x, y, SEGMENTS)
    return x, y


@torch.inference_mode()
@pytest.mark.parametrize("name", EXTRAS)
def test_merged_weights_give_the_same(linear, name):
    tensors = EXTRAS[name]
    weights = ModuleWeights(torch.randn(2, 8), torch.randn(6, 2), 0.7)
    put(linear, tensors, weights)
    weight = linear.weight + weights.scale * weights.B @ weights.A
    if "magnitude" in tensors:
        weight = weight * (tensors["magnitude"] / weight.norm(dim=1))[:, None]
    bias = torch.zeros(6) if linear.bias is None else linear.bias
    if "bias" in tensors:
        bias = tensors["bias"]
    if "lora_bias" in tensors:
        added = weights.scale * tensors["lora_bias"]
        if "magnitude" in tensors:
            merged = linear.weight + weights.scale * weights.B @ weights.A
            added = added * tensors["magnitude"] / merged.norm(dim=1)
        bias = bias + added
    x, y = served(linear)
    torch.testing.assert_close(y[1:], F.linear(x[1:], weight, bias))
    assert torch.equal(y[:1], linear.base_layer(x)[:1])


@torch.inference_mode()
def test_a_bias_counts_where_the_adapter_has_no_rows(linear):
    put(linear, EXTRAS["bias"], None)
    x, y = served(linear)
    torch.testing.assert_close(y[1:], F.linear(x[1:], linear.weight, EXTRAS["bias"]["bias"]))
    assert torch.equal(y[:1], linear.base_layer(x)[:1])


@torch.inference_mode()
def test_what_is_dropped_counts_no_more(linear):
    put(linear, EXTRAS["bias"], None)
    linear.drop(ROW)
    assert linear.kept(ROW) == []
    x, y = served(linear)
    assert torch.equal(y, linear.base_layer(x))
