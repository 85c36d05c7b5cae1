"""The definition in torch.

Few adapters: one product with the rows of all of them, then each token keeps the columns that
are its own. Many adapters: a product per span. Both sum the same terms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from kernels.lora import LoraSegments

SPAN_COST = 1024  # token-rows whose arithmetic takes as long as launching one more span


@dataclass(frozen=True, slots=True, eq=False)
class _Launch:
    """One pair of products: tokens [start, stop) with pool rows `rows`."""

    start: int
    stop: int
    rows: slice | Tensor
    foreign: Tensor | None  # bool [tokens, rows]: the row is another adapter's; None: none is


def lora(
    x: Tensor, y: Tensor, A: Tensor, B: Tensor, scales: Tensor, segments: LoraSegments
) -> None:
    """See `kernels.lora.lora`."""
    for launch in _launches(segments, x.device):
        hidden = torch.mm(x[launch.start : launch.stop], A[launch.rows].t()) * scales[launch.rows]
        if launch.foreign is not None:
            hidden = hidden.masked_fill_(launch.foreign, 0)
        y[launch.start : launch.stop].addmm_(hidden.to(x.dtype), B[launch.rows])


def _launches(segments: LoraSegments, device: torch.device) -> list[_Launch]:
    if "reference" not in segments.derived:
        segments.derived["reference"] = _plan(segments, device)
    return cast(list[_Launch], segments.derived["reference"])


def _plan(segments: LoraSegments, device: torch.device) -> list[_Launch]:
    spans = segments.spans
    start, stop = spans[0][0], spans[-1][1]
    active = sorted(segments.rows)
    together = (stop - start) * len(active)
    apart = sum((last - first) * len(rows) for first, last, rows in spans)
    if len(spans) == 1 or together > apart + SPAN_COST * len(spans):
        return [_Launch(first, last, _select(rows, device), None) for first, last, rows in spans]
    foreign = torch.ones(stop - start, len(active), dtype=torch.bool)
    column = {row: index for index, row in enumerate(active)}
    for first, last, rows in spans:
        foreign[first - start : last - start, [column[row] for row in rows]] = False
    return [_Launch(start, stop, _select(active, device), foreign.to(device))]


def _select(rows: tuple[int, ...] | list[int], device: torch.device) -> slice | Tensor:
    """A slice where the rows are neighbours, so that nothing is gathered."""
    if list(rows) == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return torch.tensor(rows, dtype=torch.int64, device=device)
