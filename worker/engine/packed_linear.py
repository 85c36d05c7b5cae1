"""Weights reordered once for the CPU's products, instead of in every product of every step.

The results have the same bits; the reordered copy takes as much memory as the weights. In torch's
own words: what its compiler does to the linear layers of a frozen model.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_ops: Any = torch.ops.mkldnn
_mkldnn: Any = torch.backends.mkldnn


class PackedLinear(nn.Linear):
    """A linear layer with a second, reordered copy of its weight."""

    source: Tensor
    packed: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.weight is not self.source:  # somebody runs it with other parameters
            return F.linear(x, self.weight, self.bias)
        y: Tensor = _ops._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return y


def packable(model: nn.Module) -> list[nn.Linear]:
    """Layers that gain from it: bfloat16 on a CPU that multiplies it (on `meta`: would gain)."""
    if not (_mkldnn.is_available() and _ops._is_mkldnn_bf16_supported()):
        return []
    return [
        module
        for module in model.modules()
        if type(module) is nn.Linear
        and module.weight.device.type in ("cpu", "meta")
        and module.weight.dtype == torch.bfloat16
    ]


@torch.inference_mode()
def pack(linears: list[nn.Linear]) -> None:
    for linear in linears:
        linear.__class__ = PackedLinear
        assert isinstance(linear, PackedLinear)
        linear.packed = _ops._reorder_linear_weight(linear.weight)
        object.__setattr__(linear, "source", linear.weight)  # not a parameter of its own
