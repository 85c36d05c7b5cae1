"""The definition in torch, in float32: two products a span."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.lora.pool import LoraPool
from kernels.lora.segments import LoraSegments


def lora(
    x: Tensor, outputs: Sequence[Tensor], pools: Sequence[LoraPool], segments: LoraSegments
) -> None:
    """See `kernels.lora.lora`."""
    for start, stop, rows in segments.spans:
        if not rows:
            continue
        inputs, own = x[start:stop].float(), _select(rows)
        for y, pool in zip(outputs, pools, strict=True):
            hidden = torch.mm(inputs, pool.A[own].float().t()) * pool.scales[own]
            total = y[start:stop].float() + torch.mm(hidden, pool.B[own].float())
            gain, shift = pool.affine(rows[0])
            if gain is not None:
                total = total * gain
            if shift is not None:
                total = total + shift
            y[start:stop] = total


def _select(rows: tuple[int, ...]) -> slice | list[int]:
    """A slice where the rows are neighbours, so that nothing is gathered."""
    if rows == tuple(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return list(rows)
