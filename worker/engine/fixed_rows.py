"""Linear layers whose sums do not change with the number of rows that share a product.

A matrix product's library picks its loops by the shape, so a row's last bits depend on how many
others come with it: a token could come out differently beside other requests. Here every product
has ROWS rows, the last one padded with zeros, and within one shape all rows are summed alike; so
has every product that an adapter adds beside the rank pool. The rest of a step (norms, our
kernels) treats each row by itself anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, cat, nn, split
from torch.nn.functional import pad
from transformers.pytorch_utils import Conv1D

ROWS = 32
"""A decode step of fewer sequences costs as much as one of so many."""

_FIXED = "rows_are_fixed"


class RowsNotFixed(Exception):
    """A model with products that are none of its linear layers'; the message names one."""


def fix_rows(model: nn.Module) -> None:
    """Change all linear layers of `model`, in place. Raises RowsNotFixed."""
    for name, module in model.named_modules():
        fused = [key for key, value in module.named_parameters(recurse=False) if value.ndim > 2]
        if fused:
            raise RowsNotFixed(f"{name}.{fused[0]} multiplies outside of linear layers")
        setattr(module, _FIXED, True)
        if isinstance(module, nn.Linear | Conv1D):
            setattr(module, "forward", partial(_forward, module.forward))  # noqa: B010


def are_rows_fixed(module: nn.Module) -> bool:
    return getattr(module, _FIXED, False)


def in_tiles(product: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """`product` of inputs [rows, ...], ROWS of them at a time -> [rows, out]."""
    count = len(inputs[0])
    padded = [pad(x, (0, 0) * (x.ndim - 1) + (0, -count % ROWS)) for x in inputs]
    tiles = zip(*(split(x, ROWS) for x in padded), strict=True)
    return cat([product(*tile) for tile in tiles])[:count]


def _forward(forward: Any, x: Tensor) -> Tensor:
    out = in_tiles(forward, x.reshape(-1, x.shape[-1]))
    return out.view(*x.shape[:-1], out.shape[-1])
