"""Linear layers that add each token's adapter, and the rank pool that holds the adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from kernels.lora import lora
from worker.engine.adapter_extras import Effects, ExtraTensors, ModuleExtras, effects_of
from worker.engine.attention import current_context
from worker.protocol.errors import AdapterLoadError


class LoraWeights(Protocol):
    """One module's update: `scale * B @ A`, A [rank, in], B [out, rank]."""

    @property
    def A(self) -> Tensor: ...  # noqa: N802
    @property
    def B(self) -> Tensor: ...  # noqa: N802
    @property
    def scale(self) -> float: ...


class LoadedAdapter(Protocol):
    """An adapter in host memory, checked against the model. `invocation`: the tokens from which
    on an activated LoRA applies, empty for one that applies throughout."""

    @property
    def modules(self) -> Mapping[str, LoraWeights]: ...
    @property
    def extras(self) -> Mapping[str, ExtraTensors]: ...
    @property
    def rank(self) -> int: ...
    @property
    def invocation(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...


class LoraLinear(nn.Module):
    """`base_layer`, then the low-rank update of every token that has an adapter.

    `base_layer` stays the model's own module. It is all that runs before a pool is attached,
    and where no adapter of the batch has a row in `live_rows`.
    """

    A: Tensor | None
    B: Tensor | None
    scales: Tensor | None

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.out_features, self.in_features = _features(base_layer)
        self.A = self.B = self.scales = None
        self.live_rows: frozenset[int] = frozenset()
        self.effects = Effects()

    def attach(self, rank: int, dtype: torch.dtype, device: torch.device) -> None:
        """Give this module `rank` pool rows, zeroed."""
        self.A = torch.zeros(rank, self.in_features, dtype=dtype, device=device)
        self.B = torch.zeros(rank, self.out_features, dtype=dtype, device=device)
        self.scales = torch.zeros(rank, dtype=torch.float32, device=device)

    @property
    def weight(self) -> Tensor:
        """The base weight: models look at its type and device."""
        return self.base_layer.weight  # type: ignore[return-value]

    @property
    def bias(self) -> Tensor | None:
        return self.base_layer.bias  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base_layer(x)
        segments = current_context().lora
        if segments is None or self.A is None or self.B is None or self.scales is None:
            return y
        if not self.live_rows.isdisjoint(segments.rows):
            packed = y.view(-1, self.out_features)
            lora(x.reshape(-1, self.in_features), packed, self.A, self.B, self.scales, segments)
        self.effects.apply(self.base_layer, x, y, segments)
        return y


def _features(layer: nn.Module) -> tuple[int, int]:
    """(out, in)"""
    if isinstance(layer, nn.Linear):
        return layer.out_features, layer.in_features
    assert isinstance(layer, Conv1D)
    rows, columns = layer.weight.shape
    return int(columns), int(rows)


def wrap_linears(model: nn.Module) -> dict[str, LoraLinear]:
    """Replace every linear module but the output head; returns them by their own names."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    linears = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    }
    wrapped = {}
    for name, module in linears.items():
        parent, _, attribute = name.rpartition(".")
        wrapped[name] = LoraLinear(module)
        setattr(model.get_submodule(parent), attribute, wrapped[name])
    return wrapped


class HookedModule:
    """A module that adapters may change and that keeps its place in the model: embeddings,
    norms, and the output head, which runs on sampled rows only (`is_head`)."""

    def __init__(self, module: nn.Module, *, is_head: bool = False) -> None:
        self.module = module
        self.effects = Effects()
        self._is_head = is_head
        self._applying = False
        module.register_forward_hook(self._after)

    def _after(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        context = current_context()
        segments = context.head if self._is_head else context.lora
        if segments is None or self._applying:
            return
        self._applying = True  # an effect may call the module with other parameters
        try:
            self.effects.apply(module, inputs[0], output, segments)
        finally:
            self._applying = False


def hook_others(model: nn.Module) -> dict[str, HookedModule]:
    """The output head, the embeddings and the norms over the hidden size, by their own names."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    hidden = model.get_input_embeddings().weight.shape[-1]  # type: ignore[operator]
    return {
        name: HookedModule(module, is_head=module is head)
        for name, module in model.named_modules()
        if module is head or isinstance(module, nn.Embedding) or _is_norm(module, hidden)
    }


def _is_norm(module: nn.Module, hidden: int) -> bool:
    parameters = dict(module.named_parameters())
    return (
        "weight" in parameters
        and parameters.keys() <= {"weight", "bias"}
        and all(parameter.shape == (hidden,) for parameter in parameters.values())
    )


class RankPool:
    """`rank` rows in every wrapped module; an adapter of rank r owns the same r rows in each.

    Modules that an adapter doesn't change, or changes with a smaller rank, have scale 0 there.
    """

    def __init__(
        self,
        modules: Mapping[str, LoraLinear],
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        others: Mapping[str, HookedModule] | None = None,
    ) -> None:
        self.rank = rank
        self._modules = modules
        self._others = others or {}
        self._dtype, self._device = dtype, device
        for module in modules.values():
            module.attach(rank, dtype, device)

    @staticmethod
    def bytes_per_rank(modules: Mapping[str, LoraLinear], dtype: torch.dtype) -> int:
        """Device memory of one row in all modules."""
        widths = sum(module.in_features + module.out_features for module in modules.values())
        return widths * dtype.itemsize + 4 * len(modules)

    @torch.inference_mode()
    def write(self, rows: Sequence[int], adapter: LoadedAdapter) -> None:
        """Copy `adapter` into `rows`, which no running sequence uses.

        Raises KeyError when the model has no module of a name that the adapter changes, and
        AdapterLoadError when a copy of a base weight that the file holds is not the base's.
        """
        known = self._modules.keys() | self._others.keys()
        unknown = (adapter.modules.keys() - self._modules.keys()) | (adapter.extras.keys() - known)
        if unknown:
            raise KeyError(sorted(unknown)[0])
        self.release(rows)
        for name, module in self._modules.items():
            _write(module, list(rows), adapter.modules.get(name))
        for name, extras in adapter.extras.items():
            self._put(name, rows[0], extras, adapter)

    def release(self, rows: Sequence[int]) -> None:
        """Free what the adapter of `rows` keeps besides them. None of its sequences runs."""
        kept = [module.effects for module in self._modules.values()]
        for effects in [*kept, *(other.effects for other in self._others.values())]:
            effects.drop(rows[0])

    def _put(self, name: str, row: int, host: ExtraTensors, adapter: LoadedAdapter) -> None:
        linear = self._modules.get(name)
        module = self._others[name].module if linear is None else linear.base_layer
        copy = host.tensors.get("base_copy")
        if copy is not None and not _same(copy.to(self._device), module):
            message = f"{name}: the file's base_layer.weight is not the base model's"
            raise AdapterLoadError("adapter_invalid", message)
        extras = ModuleExtras.on(self._device, self._dtype, host)
        weights = adapter.modules.get(name)
        pooled = None
        if weights is not None:
            a, b = (tensor.to(self._device, self._dtype) for tensor in (weights.A, weights.B))
            pooled = (a, b, weights.scale)
        effects = self._others[name].effects if linear is None else linear.effects
        effects.put(row, effects_of(module, extras, pooled))
        self._tie(name, row, extras)

    def _tie(self, name: str, row: int, extras: ModuleExtras) -> None:
        """Trained token rows of an embedding count in an output head that shares its weight."""
        if extras.token_rows is None:
            return
        source = self._others[name].module
        for other in self._others.values():
            if other.module is not source and other.module.weight is source.weight:
                other.effects.put(row, effects_of(other.module, extras, None))


def _same(copy: Tensor, module: nn.Module) -> bool:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return torch.equal(copy.to(weight.dtype), weight) or torch.equal(copy, weight.to(copy.dtype))


def _write(module: LoraLinear, rows: list[int], weights: LoraWeights | None) -> None:
    assert module.A is not None
    assert module.B is not None
    assert module.scales is not None
    rank = 0 if weights is None else weights.A.shape[0]
    used, spare = rows[:rank], rows[rank:]
    module.live_rows = (module.live_rows - set(rows)) | set(used)
    for pool in (module.A, module.B, module.scales):
        pool[spare] = 0
    if weights is not None:
        module.A[used] = weights.A.to(module.A.device, module.A.dtype)
        module.B[used] = weights.B.t().to(module.B.device, module.B.dtype)
        module.scales[used] = weights.scale
