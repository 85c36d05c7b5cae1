"""The definition in torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """See `kernels.pointwise.rms_norm`."""
    wide = x.float()
    factor = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * (wide * factor).to(x.dtype)


def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    """See `kernels.pointwise.gated_silu`."""
    return F.silu(gate) * up


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `kernels.pointwise.rotate`."""
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]
