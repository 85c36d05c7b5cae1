"""Low-rank updates of packed tokens, each token with its own adapter, from one rank pool."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from kernels import backend
from kernels.errors import (
    KernelArgumentError,
    check_contiguous,
    check_device,
    check_rows,
    check_shape,
    check_type,
)


@dataclass(frozen=True, slots=True, eq=False)
class LoraSegments:
    """Which pool rows each packed token uses: launch metadata of one step, for all modules.

    Example: 3 base tokens, then 2 of an adapter that owns rows 4 and 5, then 1 of a third with
    rows 0 to 3.

        spans  ((3, 5, (4, 5)), (5, 6, (0, 1, 2, 3)))      start, stop, rows

    Base tokens are in no span: nothing is launched for them. `derived` holds what a backend
    computes from the spans once per step.
    """

    num_tokens: int
    spans: tuple[tuple[int, int, tuple[int, ...]], ...]
    derived: dict[object, object] = field(default_factory=dict)

    @property
    def rows(self) -> frozenset[int]:
        """All pool rows that the step uses."""
        if "rows" not in self.derived:
            self.derived["rows"] = frozenset(row for span in self.spans for row in span[2])
        return cast(frozenset[int], self.derived["rows"])

    @property
    def last_row(self) -> int:
        """The largest of them; -1 if there is none."""
        if "last row" not in self.derived:
            self.derived["last row"] = max(self.rows, default=-1)
        return cast(int, self.derived["last row"])

    @classmethod
    def build(
        cls, runs: Sequence[tuple[int, int]], adapter_rows: Sequence[Sequence[int]]
    ) -> LoraSegments:
        """From `runs` (adapter, tokens) in packed order, where adapter -1 is the base model.

        Neighbouring runs of one adapter become one span. Raises KernelArgumentError for an
        adapter that `adapter_rows` does not list.
        """
        spans: list[tuple[int, int, tuple[int, ...]]] = []
        start, previous = 0, -1
        for adapter, tokens in runs:
            if not -1 <= adapter < len(adapter_rows):
                raise KernelArgumentError("runs", f"adapter {adapter} of {len(adapter_rows)}")
            if tokens < 0:
                raise KernelArgumentError("runs", f"{tokens} tokens")
            if adapter >= 0 and adapter == previous:
                first, _, rows = spans.pop()
                spans.append((first, start + tokens, rows))
            elif adapter >= 0:
                spans.append((start, start + tokens, tuple(adapter_rows[adapter])))
            start, previous = start + tokens, adapter
        return cls(num_tokens=start, spans=tuple(spans))


def lora(
    x: Tensor, y: Tensor, A: Tensor, B: Tensor, scales: Tensor, segments: LoraSegments
) -> None:
    """Add every adapted token's low-rank update to `y`, in place.

    Semantics:
        for start, stop, rows in segments.spans:
            for t in range(start, stop):
                for row in rows:
                    y[t] += scales[row] * dot(A[row], x[t]) * B[row]

    Shapes:
        x       [tokens, in]
        y       [tokens, out]       x's type, as A and B; each row without gaps
        A       [pool rows, in]
        B       [pool rows, out]    a module's B, transposed: row i is its i-th column
        scales  [pool rows]         float32: alpha / r, or alpha / sqrt(r), of row's adapter

    Sums are float32. Tokens outside the spans keep their bits. What other adapters' rows hold,
    infinities included, has no effect on a token.
    """
    if not _fits(x, y, A, B, scales, segments):
        _refuse(x, y, A, B, scales, segments)
        x = x.contiguous()
    if segments.spans:
        _implementation(x.device.type, x.dtype)(x, y, A, B, scales, segments)


@dataclass(frozen=True, slots=True, eq=False)
class LoraTarget:
    """One module's part of `lora_shared`; the fields are arguments of `lora`."""

    y: Tensor
    A: Tensor
    B: Tensor
    scales: Tensor


def lora_shared(x: Tensor, targets: Sequence[LoraTarget], segments: LoraSegments) -> None:
    """`lora` for modules that have the same input, which may cost fewer launches.

    Semantics:
        for target in targets:
            lora(x, target.y, target.A, target.B, target.scales, segments)

    The bits are the same, too.
    """
    for target in targets:
        arguments = (x, target.y, target.A, target.B, target.scales, segments)
        if not _fits(*arguments):
            _refuse(*arguments)
            x = x.contiguous()
    if not segments.spans:
        return
    if backend.triton_serves(x.device.type):
        from kernels.lora import triton_kernel

        triton_kernel.lora_shared(x, targets, segments)
        return
    run = _implementation(x.device.type, x.dtype)
    for target in targets:
        run(x, target.y, target.A, target.B, target.scales, segments)


def _fits(
    x: Tensor, y: Tensor, A: Tensor, B: Tensor, scales: Tensor, segments: LoraSegments
) -> bool:
    """Whether all is as `lora` says, and `x` contiguous."""
    tokens, ranks, dtype, device = segments.num_tokens, len(A), x.dtype, x.device
    width, out = A.shape[-1], B.shape[-1]
    return (
        x.shape == (tokens, width)
        and y.shape == (tokens, out)
        and A.shape == (ranks, width)
        and B.shape == (ranks, out)
        and scales.shape == (ranks,)
        and y.dtype is A.dtype is B.dtype is dtype
        and dtype.is_floating_point
        and scales.dtype is torch.float32
        and y.device == A.device == B.device == scales.device == device
        and x.is_contiguous()
        and y.is_contiguous()
        and A.is_contiguous()
        and B.is_contiguous()
        and scales.is_contiguous()
        and segments.last_row < ranks
    )


def _refuse(
    x: Tensor, y: Tensor, A: Tensor, B: Tensor, scales: Tensor, segments: LoraSegments
) -> None:
    """Raise KernelArgumentError for the first argument that doesn't fit, if one doesn't."""
    if x.ndim != 2 or not x.dtype.is_floating_point:
        raise KernelArgumentError("x", f"{x.dtype} {list(x.shape)}, expected numbers [tokens, in]")
    check_shape("x", x, segments.num_tokens, None)
    check_shape("y", y, segments.num_tokens, None)
    check_shape("A", A, None, x.shape[1])
    check_shape("B", B, A.shape[0], y.shape[1])
    check_shape("scales", scales, A.shape[0])
    for name, tensor in (("y", y), ("A", A), ("B", B)):
        check_type(name, tensor, x.dtype)
        check_device(name, tensor, x.device)
    check_type("scales", scales, torch.float32)
    check_device("scales", scales, x.device)
    check_rows("y", y)
    for name, tensor in (("A", A), ("B", B), ("scales", scales)):
        check_contiguous(name, tensor)
    if segments.last_row >= len(A):
        raise KernelArgumentError("segments", f"row {segments.last_row} of {len(A)}")


@functools.cache
def _implementation(device: str, dtype: torch.dtype) -> Callable[..., None]:
    """See `kernels.backend`."""
    if backend.triton_serves(device):
        from kernels.lora import triton_kernel

        return triton_kernel.lora
    from kernels.lora import cpu, reference

    return cpu.lora if cpu.is_available(device, dtype) else reference.lora
