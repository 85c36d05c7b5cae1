"""What all resident adapters change in one module."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.errors import (
    KernelArgumentError,
    check_contiguous,
    check_device,
    check_shape,
    check_type,
)

Affine = tuple[Tensor | None, Tensor | None]
"""Gain and shift of a module's output, [out] each: DoRA's norm and the biases."""


class LoraPool:
    """A module's share of the rank pool.

    A          [rows, in]
    B          [rows, out]    a module's B, transposed: row i is its i-th column. A's type
    scales     [rows]         float32: alpha / r, or alpha / sqrt(r), of row's adapter
    addresses  [rows, 2]      int64: of the gain and the shift of the adapter that begins at the
                              row, for the kernels; 0 is none

    Raises KernelArgumentError for what has another shape, type, device or layout.
    """

    def __init__(self, A: Tensor, B: Tensor, scales: Tensor) -> None:
        if A.ndim != 2 or not A.dtype.is_floating_point:
            raise KernelArgumentError("A", f"{A.dtype} {list(A.shape)}, expected [rows, in]")
        check_shape("B", B, A.shape[0], None)
        check_shape("scales", scales, A.shape[0])
        check_type("B", B, A.dtype)
        check_type("scales", scales, torch.float32)
        for name, tensor in (("A", A), ("B", B), ("scales", scales)):
            check_device(name, tensor, A.device)
            check_contiguous(name, tensor)
        self.A, self.B, self.scales = A, B, scales
        self.addresses = torch.zeros(len(A), 2, dtype=torch.int64, device=A.device)
        self.num_rows, self.width = A.shape
        self.out = B.shape[1]
        self.dtype, self.device, self.device_type = A.dtype, A.device, A.device.type
        self.derived: dict[object, object] = {}  # what a backend computes of it once
        self._affines: dict[int, Affine] = {}

    @staticmethod
    def bytes_per_row(width: int, out: int, dtype: torch.dtype) -> int:
        return (width + out) * dtype.itemsize + torch.float32.itemsize + 2 * torch.int64.itemsize

    def put(self, row: int, gain: Tensor | None, shift: Tensor | None) -> None:
        """The adapter that begins at `row` multiplies the output with `gain` and adds `shift`,
        float32 [out]. None: it does not. Raises KernelArgumentError."""
        if not 0 <= row < self.num_rows:
            raise KernelArgumentError("row", f"{row} of {self.num_rows}")
        for name, tensor in (("gain", gain), ("shift", shift)):
            if tensor is not None:
                check_shape(name, tensor, self.out)
                check_type(name, tensor, torch.float32)
                check_device(name, tensor, self.device)
                check_contiguous(name, tensor)
        self._affines[row] = gain, shift
        self._point(row, gain, shift)

    def drop(self, row: int) -> None:
        """No step uses the row's adapter any more."""
        if self._affines.pop(row, None) is not None:
            self._point(row, None, None)

    def affine(self, row: int) -> Affine:
        """Of the adapter that begins at `row`."""
        return self._affines.get(row, (None, None))

    def _point(self, row: int, *tensors: Tensor | None) -> None:
        found = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        self.addresses[row] = torch.tensor(found, dtype=torch.int64)
