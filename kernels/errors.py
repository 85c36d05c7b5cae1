"""Errors of every kernel.

KernelArgumentError    an argument has the wrong shape, type, device or layout

Ops look at their arguments at every call, so they first ask in one expression whether all is well,
and only where it is not, which argument is wrong.
"""

from __future__ import annotations

import torch
from torch import Tensor


class KernelArgumentError(ValueError):
    """A kernel was called with an argument it can't take. `argument` is its name."""

    def __init__(self, argument: str, message: str) -> None:
        super().__init__(f"{argument}: {message}")
        self.argument = argument


def check_shape(argument: str, tensor: Tensor, *shape: int | None) -> None:
    """Require `tensor` to have `shape`, where None stands for any size."""
    found = tuple(tensor.shape)
    fits = len(found) == len(shape) and all(
        wanted is None or size == wanted for size, wanted in zip(found, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise KernelArgumentError(argument, f"shape {list(found)}, expected [{wanted}]")


def check_type(argument: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Require `tensor` to hold numbers of `dtype`."""
    if tensor.dtype != dtype:
        raise KernelArgumentError(argument, f"{tensor.dtype}, expected {dtype}")


def check_device(argument: str, tensor: Tensor, device: torch.device) -> None:
    """Require `tensor` to be on `device`."""
    if tensor.device != device:
        raise KernelArgumentError(argument, f"on {tensor.device}, expected {device}")


def check_contiguous(argument: str, tensor: Tensor) -> None:
    """Require the numbers of `tensor` to lie in order, without gaps."""
    if not tensor.is_contiguous():
        raise KernelArgumentError(argument, f"strides {list(tensor.stride())}, not contiguous")


def check_rows(argument: str, tensor: Tensor) -> None:
    """Require each row of `tensor` to lie in order; there may be gaps between rows."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise KernelArgumentError(argument, f"strides {list(tensor.stride())}, the last is not 1")
