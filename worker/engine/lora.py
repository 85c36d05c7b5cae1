"""Linear layers that add each token's adapter."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from kernels.lora import LoraPool, LoraSegments
from worker.engine.adapter_extras import (
    ExtraTensors,
    LoraWeights,
    ModuleExtras,
    affine_of,
    effects_of,
)
from worker.engine.attention import current_context
from worker.engine.effects import Effects
from worker.engine.fixed_rows import are_rows_fixed
from worker.engine.shared_input import SharedInput, adapt, share_inputs


class LoraLinear(nn.Module):
    """`base_layer`, then what every token's adapter changes.

    `base_layer` stays the model's own module. It is all that runs before a pool is attached,
    and where no adapter of the batch has a row in `live_rows`: one with numbers of this module,
    or the first of an adapter that has a gain or a shift here.
    """

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.out_features, self.in_features = _features(base_layer)
        self.pool: LoraPool | None = None
        self.live_rows: frozenset[int] = frozenset()
        self._effects = Effects()
        self.shared: SharedInput | None = None

    def attach(self, rank: int, dtype: torch.dtype, device: torch.device) -> None:
        """Give this module `rank` pool rows, zeroed."""
        self.pool = LoraPool(
            torch.zeros(rank, self.in_features, dtype=dtype, device=device),
            torch.zeros(rank, self.out_features, dtype=dtype, device=device),
            torch.zeros(rank, dtype=torch.float32, device=device),
        )

    @property
    def module(self) -> nn.Module:
        return self.base_layer

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """See `worker.engine.rank_pool.Target`. A Conv1D's weight is [in, out]."""
        shapes: dict[str, tuple[int, ...]] = {"": (self.out_features, self.in_features)}
        if self.bias is not None:
            shapes[".bias"] = (self.out_features,)
        if isinstance(self.base_layer, Conv1D):
            shapes[".weight"] = (self.in_features, self.out_features)
        return shapes

    def write(self, rows: list[int], weights: LoraWeights | None) -> None:
        """Fill `rows` with an adapter's matrices; None: it doesn't change this module."""
        pool = self.pool
        assert pool is not None
        rank = 0 if weights is None else weights.A.shape[0]
        used, stale = rows[:rank], [row for row in rows[rank:] if row in self.live_rows]
        if not used and not stale:  # as for most modules of most adapters: rows not live are zero
            return
        self.live_rows = (self.live_rows - set(rows)) | set(used)
        for tensor in (pool.A, pool.B, pool.scales):
            tensor[stale] = 0
        if weights is not None:
            pool.A[used] = weights.A.to(pool.device, pool.dtype)
            pool.B[used] = weights.B.t().to(pool.device, pool.dtype)
            pool.scales[used] = weights.scale

    def held(self, lora: LoraWeights | None, host: ExtraTensors | None) -> int:
        """A weight and a bias, or a gain and a shift in float32."""
        if host is None:
            return 0
        if "weight" in host.tensors:
            return (self.in_features + 1) * self.out_features
        vectors = 2 if "magnitude" in host.tensors else 1
        return vectors * self.out_features * torch.float32.itemsize // self.weight.dtype.itemsize

    def put(self, row: int, extras: ModuleExtras) -> None:
        """What else the adapter changes here. `extras.A` and `B` are those of its rows."""
        assert self.pool is not None
        if extras.weight is not None:
            self._effects.put(row, effects_of(self.base_layer, extras))
            return
        affine = affine_of(self.base_layer, extras)
        if affine is not None:
            self.pool.put(row, affine.gain, affine.shift)
            self.live_rows |= {row}

    def kept(self, row: int) -> list[Tensor]:
        assert self.pool is not None
        affine = [tensor for tensor in self.pool.affine(row) if tensor is not None]
        return self._effects.kept(row) + affine

    def drop(self, row: int) -> None:
        assert self.pool is not None
        self._effects.drop(row)
        self.pool.drop(row)

    @property
    def weight(self) -> Tensor:
        """The base weight: models look at its type and device."""
        return self.base_layer.weight  # type: ignore[return-value]

    @property
    def bias(self) -> Tensor | None:
        return self.base_layer.bias  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        segments = current_context().lora
        if segments is None or self.pool is None:
            y: Tensor = self.base_layer(x)
            return y
        if self.shared is not None:
            return self.shared.output(self, x, segments)
        y = self.base_layer(x)
        self.adapt(x, y, segments)
        return y

    def adapt(self, x: Tensor, y: Tensor, segments: LoraSegments) -> None:
        """Change `y`, the base layer's output for `x`, in place. Needs a pool."""
        adapt({self: y}, x, segments)

    def affect(self, x: Tensor, y: Tensor, segments: LoraSegments) -> None:
        """The part of `adapt` that is not the pool's: weights that an adapter replaces."""
        if self._effects:  # few modules have any, and finding `base_layer` takes a microsecond
            fixed = are_rows_fixed(self.base_layer)
            self._effects.apply(self.base_layer, x, y, segments, fixed=fixed)


def _features(layer: nn.Module) -> tuple[int, int]:
    """(out, in)"""
    if isinstance(layer, nn.Linear):
        return layer.out_features, layer.in_features
    assert isinstance(layer, Conv1D)
    rows, columns = layer.weight.shape
    return int(columns), int(rows)


def is_linear(module: nn.Module) -> bool:
    """Whether it multiplies with its weight and does nothing else: a subclass may."""
    plain = (nn.Linear.forward, Conv1D.forward)
    return isinstance(module, nn.Linear | Conv1D) and type(module).forward in plain


def wrap_linears(model: nn.Module) -> dict[str, LoraLinear]:
    """Replace every linear module but the output head; returns them by their own names."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    linears = {
        name: module
        for name, module in model.named_modules()
        if is_linear(module) and module is not head
    }
    wrapped = {}
    for name, module in linears.items():
        parent, _, attribute = name.rpartition(".")
        wrapped[name] = LoraLinear(module)
        setattr(model.get_submodule(parent), attribute, wrapped[name])
    share_inputs(wrapped)
    return wrapped
