"""Layers that share their input compute their adapters together, and only then."""

import pytest
import torch
from torch import nn

from kernels.lora import LoraSegments
from worker.engine import shared_input
from worker.engine.lora import wrap_linears


class Model(nn.Module):
    def __init__(self, own_input: bool) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(8, 6), nn.Linear(8, 4), nn.Linear(8, 4)
        self.own_input = own_input

    def get_output_embeddings(self) -> None:
        return None

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        other = x * 2 if self.own_input else x
        return [self.q_proj(x), self.k_proj(other), self.v_proj(x)]


class Block(nn.Module):
    """Names are found below a parent."""

    def __init__(self, own_input: bool) -> None:
        super().__init__()
        self.attention = Model(own_input)

    def get_output_embeddings(self) -> None:
        return None


@pytest.fixture
def launches(monkeypatch):
    sizes = []
    whole = shared_input.lora

    def counted(x, outputs, pools, segments):
        sizes.append(len(outputs))
        whole(x, outputs, pools, segments)

    monkeypatch.setattr(shared_input, "lora", counted)
    return sizes


def adapted(own_input):
    torch.manual_seed(0)
    block = Block(own_input)
    linears = wrap_linears(block)
    for linear in linears.values():
        linear.attach(4, torch.float32, torch.device("cpu"))
        linear.pool.A.normal_()
        linear.pool.B.normal_()
        linear.pool.scales.fill_(0.5)
        linear.live_rows = frozenset({1, 2})
    return block.attention, linears


def run(model, x, monkeypatch):
    segments = LoraSegments.build([(-1, 1), (0, 2)], [(1, 2)])
    context = type("Context", (), {"lora": segments})()
    monkeypatch.setattr("worker.engine.lora.current_context", lambda: context)
    with torch.inference_mode():
        return model(x), segments


def expected(linear, x):
    y = linear.base_layer(x)
    y[1:] += 0.5 * x[1:] @ linear.pool.A[1:3].t() @ linear.pool.B[1:3]
    return y


@torch.inference_mode()
def test_the_first_called_computes_for_all(launches, monkeypatch):
    model, linears = adapted(own_input=False)
    for _ in range(2):
        x = torch.randn(3, 8)
        outputs, _ = run(model, x, monkeypatch)
        for output, linear in zip(outputs, linears.values(), strict=True):
            torch.testing.assert_close(output, expected(linear, x))
    assert launches == [3, 3]


@torch.inference_mode()
def test_a_layer_with_an_input_of_its_own_ends_the_sharing(launches, monkeypatch):
    model, linears = adapted(own_input=True)
    for _ in range(2):
        x = torch.randn(3, 8)
        outputs, _ = run(model, x, monkeypatch)
        inputs = [x, x * 2, x]
        for output, linear, own in zip(outputs, linears.values(), inputs, strict=True):
            torch.testing.assert_close(output, expected(linear, own))
    assert launches == [3, 1, 1, 1, 1, 1]


@torch.inference_mode()
def test_a_step_that_broke_off_leaves_nothing_to_the_next(launches, monkeypatch):
    model, linears = adapted(own_input=False)
    run(model.q_proj, torch.randn(3, 8), monkeypatch)
    x = torch.randn(3, 8)
    outputs, _ = run(model, x, monkeypatch)
    for output, linear in zip(outputs, linears.values(), strict=True):
        torch.testing.assert_close(output, expected(linear, x))
    assert launches == [3, 3]
