"""Errors of every kernel.

KernelArgumentError    an argument has the wrong shape, type or device
"""

from __future__ import annotations

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
