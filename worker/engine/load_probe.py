"""Looks at an adapter that was just loaded, before it serves: does it change anything, are its
numbers finite in the type that is served, and do its rows give what its weights say?

The same code that serves runs on a few made-up inputs, and is compared with the weights of the
file in float32. For every low-rank update alone; for one linear layer of each kind with all that
the adapter changes there, against merged weights (PEFT's `merge_and_unload`).

Numbers and weights are the same at every load of an adapter, as its digest names its content; its
rows are not. A process therefore looks at everything once, and later at the merged weights alone.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.lora import LoraPool, LoraSegments, lora
from worker.engine.adapter_extras import ExtraTensors, LoraWeights, base_weight
from worker.engine.lora import LoraLinear
from worker.protocol.errors import AdapterLoadError

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest difference, relative to the norm of what is expected."""

TOKENS = 2
OUTPUTS = 64  # of a merged weight, so that a large one costs no more than a small one
NEGLIGIBLE = 1e-6  # an update this small beside its input may be lost in rounding


@dataclass(frozen=True, slots=True, eq=False)
class Probed:
    """What a target serves for a few inputs and what it should; `kept`: all that it holds of
    the adapter. `size`: the norm of the inputs."""

    kept: Sequence[Tensor]
    served: Tensor | None = None
    expected: Tensor | None = None
    size: float = 1.0


class Matrices(NamedTuple):
    """Implements LoraWeights."""

    A: Tensor
    B: Tensor
    scale: float


def check(name: str, probed: Probed, dtype: torch.dtype) -> None:
    """Raises AdapterLoadError `adapter_invalid`."""
    for tensor in probed.kept:
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise _invalid(f"{name}: its values are not finite in {dtype}")
    if probed.served is None or probed.expected is None:
        return
    served, expected = probed.served.float(), probed.expected
    if not torch.isfinite(served).all():
        raise _invalid(f"{name}: what it computes is not finite in {dtype}")
    error, norm = float((served - expected).norm()), float(expected.norm())
    if not error <= TOLERANCE[dtype] * max(norm, NEGLIGIBLE * probed.size):
        raise _invalid(f"{name}: what is served differs from its weights by {error:g} of {norm:g}")


@functools.cache
def inputs(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[TOKENS, width], the same at all times: not to be written to."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(TOKENS, width, generator=generator).to(device, dtype)


def low_rank(x: Tensor, weights: LoraWeights) -> Tensor:
    """The update that `weights` say, in float32."""
    a, b = (tensor.to(x.device, torch.float32) for tensor in (weights.A, weights.B))
    return (x.float() @ a.t()) @ b.t() * weights.scale


def probe_update(linear: LoraLinear, rows: Sequence[int], weights: LoraWeights) -> Probed:
    """The rank rows of one module, without what follows them."""
    pool = linear.pool
    assert pool is not None
    x = inputs(pool.width, pool.dtype, pool.device)
    y = x.new_zeros(TOKENS, pool.out)
    segments = LoraSegments.build([(0, TOKENS)], [rows])
    lora(x, [y], [LoraPool(pool.A, pool.B, pool.scales)], segments)
    return Probed((), y, low_rank(x, weights), float(x.norm()))


def probe_merged(
    linear: LoraLinear,
    rows: Sequence[int],
    weights: LoraWeights | None,
    host: ExtraTensors | None,
) -> Probed:
    """All that an adapter changes in one module, on the first outputs."""
    assert linear.pool is not None
    x = inputs(linear.in_features, linear.pool.dtype, linear.pool.device)
    segments = LoraSegments.build([(0, TOKENS)], [rows])
    y: Tensor = linear.base_layer(x)
    linear.adapt(x, y, segments)
    weight, bias = _merged(linear, weights, {} if host is None else host.tensors)
    return Probed((), y[:, :OUTPUTS], F.linear(x.float(), weight, bias), float(x.norm()))


def _merged(
    linear: LoraLinear, weights: LoraWeights | None, tensors: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor | None]:
    """float32 weight and bias of the first OUTPUTS outputs."""
    weight = base_weight(linear.base_layer)
    device = weight.device
    if "weight" in tensors:
        saved = tensors["weight"].t() if weight.shape != linear.weight.shape else tensors["weight"]
        weight = saved.to(device)
    weight = weight[:OUTPUTS].float()
    bias = None if linear.bias is None else linear.bias[:OUTPUTS].float()
    if "bias" in tensors:
        bias = tensors["bias"][:OUTPUTS].to(device, torch.float32)
    if weights is None:
        return weight, bias
    a, b = (tensor.to(device, torch.float32) for tensor in (weights.A, weights.B[:OUTPUTS]))
    weight = weight + weights.scale * (b @ a)
    if "magnitude" in tensors:
        magnitude = tensors["magnitude"][:OUTPUTS].to(device, torch.float32)
        weight = weight * (magnitude / weight.norm(dim=1))[:, None]
    if "lora_bias" in tensors:
        added = weights.scale * tensors["lora_bias"][:OUTPUTS].to(device, torch.float32)
        bias = added if bias is None else bias + added
    return weight, bias


def _invalid(message: str) -> AdapterLoadError:
    return AdapterLoadError("adapter_invalid", message)
