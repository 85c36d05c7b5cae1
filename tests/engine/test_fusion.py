"""What a model's own code computes in many passes and a kernel in one."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call
from transformers.models.llama import modeling_llama

from kernels import native
from kernels.pointwise import cpu
from tests.engine.driver import save_tiny_model
from worker.engine import fusion
from worker.engine.fusion import fuse
from worker.engine.model_loader import load_model

pytestmark = pytest.mark.skipif(native.library(cpu.SOURCE) is None, reason="no C++ compiler")


class Norm(nn.Module):
    def __init__(self, *shape, offset=0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(shape))
        self.variance_epsilon = 1e-5
        self.offset = offset

    def forward(self, x):
        factor = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight + self.offset) * (x.float() * factor).to(x.dtype)


class Mlp(nn.Module):
    def __init__(self, width, act_fn):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(width, 48), nn.Linear(width, 48)
        self.down_proj = nn.Linear(48, width)
        self.act_fn = act_fn

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class ClampedMlp(Mlp):
    def forward(self, x):
        gate, up = self.gate_proj(x).clamp(max=10), self.up_proj(x).clamp(-10, 10)
        return self.down_proj(self.act_fn(gate) * up)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_computes_the_same_is_replaced_and_nothing_else(dtype):
    modules = [
        Norm(32),
        Norm(32, offset=1.0),
        Mlp(32, nn.SiLU()),
        Mlp(32, nn.GELU("tanh")),
        nn.LayerNorm(32),
        ClampedMlp(32, nn.SiLU()),
    ]
    model = nn.Sequential(*modules).to(dtype)
    plain = copy.deepcopy(model)
    assert fuse(model) == 2
    fused = [type(module).forward in (fusion._norm, fusion._gated_mlp) for module in model]
    assert fused == [True, False, True, False, False, False]
    x = torch.randn(1, 5, 32).to(dtype)
    for ours, theirs in zip(model, plain, strict=True):
        torch.testing.assert_close(ours(x), theirs(x))


def test_a_norm_with_a_weight_for_each_head_is_left_alone():
    """As Cohere's of queries and keys."""
    model = nn.Sequential(Norm(4, 32))
    assert fuse(model) == 0
    assert model(torch.randn(1, 5, 4, 32)).shape == (1, 5, 4, 32)


def test_copies_and_other_parameters_are_respected():
    model = nn.Sequential(Norm(16))
    fuse(model)
    x, weight = torch.randn(2, 16), torch.randn(16)
    twin = copy.copy(model[0])
    twin._parameters = {"weight": nn.Parameter(weight)}
    expected = functional_call(Norm(16), {"weight": weight}, (x,))
    torch.testing.assert_close(twin(x), expected)
    torch.testing.assert_close(functional_call(model[0], {"weight": weight}, (x,)), expected)


def test_a_loaded_model_is_fused_and_other_users_of_its_file_are_not(tmp_path):
    served = load_model(save_tiny_model(tmp_path, "llama"), "float32", certified=True)
    layer = served.packed.module.model.layers[0]
    assert type(layer.input_layernorm).forward is fusion._norm
    assert type(layer.mlp).forward is fusion._gated_mlp
    assert type(layer.mlp).__name__ == "LlamaMLP"
    apply = modeling_llama.apply_rotary_pos_emb
    q, k, cos, sin = (torch.randn(1, *shape) for shape in [(4, 3, 8), (2, 3, 8), (3, 8), (3, 8)])
    for ours, theirs in zip(apply(q, k, cos, sin), apply.original(q, k, cos, sin), strict=True):
        assert torch.equal(ours, theirs)
