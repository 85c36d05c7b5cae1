"""Linear layers whose sums do not change with the number of rows that share a product.

A matrix product's library picks its loops by the shape, so a row's last bits depend on how many
others come with it: a token could come out differently beside other requests. Here every product
has ROWS rows, the last one padded with zeros, and within one shape all rows are summed alike. The
rest of a step (norms, our kernels) treats each row by itself anyway.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, cat, nn, split
from torch.nn.functional import pad
from transformers.pytorch_utils import Conv1D

ROWS = 32
"""A decode step of fewer sequences costs as much as one of so many."""


class RowsNotFixed(Exception):
    """A model with products that are none of its linear layers'; the message names one."""


def fix_rows(model: nn.Module) -> None:
    """Change all linear layers of `model`, in place. Raises RowsNotFixed."""
    for name, module in model.named_modules():
        fused = [key for key, value in module.named_parameters(recurse=False) if value.ndim > 2]
        if fused:
            raise RowsNotFixed(f"{name}.{fused[0]} multiplies outside of linear layers")
        if isinstance(module, nn.Linear | Conv1D):
            setattr(module, "forward", partial(_in_tiles, module.forward))  # noqa: B010


def _in_tiles(forward: Any, x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    padded = pad(rows, (0, 0, 0, -len(rows) % ROWS))
    out = cat([forward(tile) for tile in split(padded, ROWS)])[: len(rows)]
    return out.view(*x.shape[:-1], out.shape[-1])
