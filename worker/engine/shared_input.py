"""Linear layers that a model calls with one and the same input: their adapters in one go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from kernels.lora import LoraSegments, lora

if TYPE_CHECKING:
    from worker.engine.lora import LoraLinear

SIBLINGS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)
"""Names that models give them, side by side in one parent module."""


class SharedInput:
    """The member that is called first computes for all, the others find their outputs made.

    What names promise is checked by the inputs' identity: a member that is called with another
    input in the same step ends the sharing, and each computes for itself from then on.
    """

    def __init__(self, members: Sequence[LoraLinear]) -> None:
        self._members = members
        self._input: Tensor | None = None
        self._segments: LoraSegments | None = None
        self._outputs: dict[LoraLinear, Tensor] = {}

    def output(self, asked: LoraLinear, x: Tensor, segments: LoraSegments) -> Tensor:
        """What `asked` gives for `x`, with its adapters."""
        if x is not self._input and segments is self._segments and asked in self._outputs:
            self._part()
            return asked(x)  # type: ignore[no-any-return]
        if x is not self._input or asked not in self._outputs:
            self._outputs = {each: each.base_layer(x) for each in self._members}
            adapt(self._outputs, x, segments)
            self._input, self._segments = x, segments
        y = self._outputs.pop(asked)
        if not self._outputs:
            self._input = None
        return y

    def _part(self) -> None:
        for member in self._members:
            member.shared = None
        self._input, self._outputs = None, {}


def share_inputs(linears: Mapping[str, LoraLinear]) -> None:
    """Tell layers whose names say so that they share their input."""
    for name in linears:
        parent, _, own = name.rpartition(".")
        for siblings in SIBLINGS:
            members = [linears.get(f"{parent}.{sibling}") for sibling in siblings]
            found = [member for member in members if member is not None]
            if own == siblings[0] and len(found) == len(siblings):
                shared = SharedInput(found)
                for member in found:
                    member.shared = shared


def adapt(outputs: Mapping[LoraLinear, Tensor], x: Tensor, segments: LoraSegments) -> None:
    """Change `outputs`, of the base layers for `x`, in place. All have a pool."""
    changed, pools = [], []
    for linear, y in outputs.items():
        assert linear.pool is not None
        if not linear.live_rows.isdisjoint(segments.rows):
            changed.append(y.view(-1, linear.out_features))
            pools.append(linear.pool)
    if pools:
        lora(x.reshape(-1, x.shape[-1]), changed, pools, segments)
    for linear, y in outputs.items():
        linear.affect(x, y, segments)
