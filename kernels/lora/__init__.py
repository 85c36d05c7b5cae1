"""Low-rank updates of packed tokens, each token with its own adapter, from one rank pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from torch import Tensor

from kernels import backend
from kernels.errors import KernelArgumentError, check_shape


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
        y       [tokens, out]
        A       [pool rows, in]
        B       [pool rows, out]    a module's B, transposed: row i is its i-th column
        scales  [pool rows]         float32: alpha / r, or alpha / sqrt(r), of row's adapter

    Sums are float32. Tokens outside the spans keep their bits. What other adapters' rows hold,
    infinities included, has no effect on a token.
    """
    tokens, width = x.shape[0], x.shape[1]
    check_shape("x", x, segments.num_tokens, None)
    check_shape("y", y, tokens, None)
    check_shape("A", A, None, width)
    check_shape("B", B, A.shape[0], y.shape[1])
    check_shape("scales", scales, A.shape[0])
    if not segments.spans:
        return
    if backend.uses_triton(x):
        from kernels.lora import triton_kernel

        triton_kernel.lora(x, y, A, B, scales, segments)
        return
    from kernels.lora import reference

    reference.lora(x, y, A, B, scales, segments)
