"""What adapters do to the outputs of a module, besides the rows of the pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from kernels.lora import LoraSegments
from worker.engine.fixed_rows import in_tiles

Effect = Callable[[nn.Module, Tensor, Tensor], Tensor]  # module, x, y -> y, of one adapter's tokens


@dataclass(frozen=True, slots=True, eq=False)
class Affine:
    """`y * gain + shift`, float32 [out] each: DoRA's norm and the biases."""

    gain: Tensor | None
    shift: Tensor | None

    def __call__(self, module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        total = y.float()
        if self.gain is not None:
            total = total * self.gain
        if self.shift is not None:
            total = total + self.shift
        return total.to(y.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class HeadLora:
    A: Tensor  # [rank, in]
    B: Tensor  # [out, rank]
    scale: float

    def __call__(self, module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return y + (x @ self.A.t() * self.scale) @ self.B.t()


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingLora:
    A: Tensor  # [vocabulary, rank]
    B: Tensor  # [hidden, rank]
    scale: float

    def __call__(self, module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return y + scaled(module, (self.A[x] @ self.B.t()) * self.scale)


@dataclass(frozen=True, slots=True, eq=False)
class Replaced:
    parameters: dict[str, Tensor]

    def __call__(self, module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        result: Tensor = functional_call(module, self.parameters, (x,))
        return result


@dataclass(frozen=True, slots=True, eq=False)
class ReplacedLinear:
    weight: Tensor  # as the module stores it
    bias: Tensor | None

    def __call__(self, module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        weight = self.weight.t() if isinstance(module, Conv1D) else self.weight
        return F.linear(x, weight, self.bias)


@dataclass(frozen=True, slots=True, eq=False)
class Gain:
    """DoRA's norm of an embedding."""

    gain: Tensor  # [hidden]

    def __call__(self, module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return y * self.gain


@dataclass(frozen=True, slots=True, eq=False)
class TokenRows:
    """Rows of an embedding, in place of the base's."""

    slots: Tensor  # int32 [vocabulary]: row of `rows`, or -1
    rows: Tensor  # [rows, hidden]

    def __call__(self, module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        slots = self.slots[x]
        rows = scaled(module, self.rows[slots.clamp(min=0)])
        return torch.where((slots >= 0)[..., None], rows, y)


@dataclass(frozen=True, slots=True, eq=False)
class HeadTokenRows:
    """Rows of an output head's weight, its own or those of the embedding that it shares."""

    ids: Tensor  # int64 [rows]
    rows: Tensor  # [rows, hidden]

    def __call__(self, module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return y.index_copy(-1, self.ids, x @ self.rows.t())


class Effects:
    """One module's effects, by the first pool row of the adapter that they belong to."""

    def __init__(self) -> None:
        self._effects: dict[int, tuple[Effect, ...]] = {}

    def __bool__(self) -> bool:
        return bool(self._effects)

    def put(self, row: int, effects: tuple[Effect, ...]) -> None:
        self._effects[row] = effects

    def drop(self, row: int) -> None:
        self._effects.pop(row, None)

    def of(self, row: int) -> tuple[Effect, ...]:
        return self._effects.get(row, ())

    def kept(self, row: int) -> list[Tensor]:
        """All tensors of a row's effects."""
        values = [value for effect in self.of(row) for value in _values(effect)]
        nested = [each for value in values if isinstance(value, dict) for each in value.values()]
        return [value for value in [*values, *nested] if isinstance(value, Tensor)]

    def apply(
        self, module: nn.Module, x: Tensor, y: Tensor, segments: LoraSegments, *, fixed: bool
    ) -> None:
        """Change `y` in place. `x` and `y` are [tokens, ...] or [1, tokens, ...]. `fixed`: no bit
        may depend on how many tokens there are (`worker.engine.fixed_rows`)."""
        dim = 1 if y.ndim > 2 else 0
        for start, stop, rows in segments.spans:
            effects = self._effects.get(rows[0])
            if effects is None:
                continue
            if y.shape[dim] != segments.num_tokens:
                raise RuntimeError(f"{y.shape[dim]} rows, the step has {segments.num_tokens}")
            inputs, target = (tensor.narrow(dim, start, stop - start) for tensor in (x, y))
            result = target
            for effect in effects:
                result = (
                    _tiled(effect, module, inputs, result)
                    if fixed
                    else effect(module, inputs, result)
                )
            target.copy_(result)


def _tiled(effect: Effect, module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    lead = y.ndim - 1
    rows = in_tiles(partial(effect, module), x.flatten(0, lead - 1), y.flatten(0, lead - 1))
    return rows.view(y.shape)


def _values(effect: Any) -> list[Any]:
    return [getattr(effect, field.name) for field in fields(effect)]


def scaled(module: nn.Module, rows: Tensor) -> Tensor:
    """Rows of an embedding as the module gives them: some scale theirs (Gemma)."""
    factor: Tensor | None = getattr(module, "embed_scale", None)
    return rows if factor is None else rows * factor
