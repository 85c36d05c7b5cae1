"""What an adapter changes in a module besides `scale * B @ A`: held per adapter, not in the pool.

Each part of a file becomes an effect on the tokens of the adapter's spans:

    lora_magnitude_vector, lora_B.bias, bias      Affine
    LoRA of the output head                       HeadLora
    LoRA of the embeddings                        EmbeddingLora
    modules_to_save                               Replaced
    trainable_token_indices                       TokenRows, HeadTokenRows (tied weights)

Formulas: PEFT 0.21, `peft.tuners.lora` and `peft.tuners.trainable_tokens`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers.pytorch_utils import Conv1D

from kernels.lora import LoraSegments

Effect = Callable[[nn.Module, Tensor, Tensor], Tensor]  # module, x, y -> y, of one adapter's tokens


class LoraWeights(Protocol):
    """One module's update: `scale * B @ A`, A [rank, in], B [out, rank]. All experts' of fused
    weights together: A [experts * rank, in], B [out, rank * experts]."""

    @property
    def A(self) -> Tensor: ...  # noqa: N802
    @property
    def B(self) -> Tensor: ...  # noqa: N802
    @property
    def scale(self) -> float: ...


class ExtraTensors(Protocol):
    """What an adapter file holds of one module besides LoraWeights, in host memory.

    `tensors` are named like the fields of ModuleExtras, with `base_copy`, the base weight that
    PEFT saves beside the LoRA of embeddings and heads. `A` and `B` among them are an
    embedding's, [rank, vocabulary] and [hidden, rank], and `scale` is theirs.
    """

    @property
    def tensors(self) -> Mapping[str, Tensor]: ...
    @property
    def scale(self) -> float: ...
    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ModuleExtras:
    """One module's tensors on the device.

    `A` and `B`: see LoraWeights and ExtraTensors. `token_ids` and `token_rows` replace rows of
    an embedding.
    """

    A: Tensor | None = None
    B: Tensor | None = None
    scale: float = 1.0
    magnitude: Tensor | None = None  # [out]
    lora_bias: Tensor | None = None  # [out]
    weight: Tensor | None = None
    bias: Tensor | None = None
    token_ids: Tensor | None = None  # int64 [rows]
    token_rows: Tensor | None = None  # [rows, hidden]

    @staticmethod
    def on(
        device: torch.device,
        dtype: torch.dtype,
        host: ExtraTensors | None,
        lora: LoraWeights | None,
    ) -> ModuleExtras:
        moved: dict[str, Any] = {}
        if host is not None:
            moved["scale"] = host.scale
            for name, tensor in host.tensors.items():
                if name != "base_copy":
                    to = dtype if tensor.is_floating_point() else tensor.dtype
                    moved[name] = tensor.to(device, to)
        if lora is not None:
            moved |= {"A": lora.A.to(device, dtype), "B": lora.B.to(device, dtype)}
            moved["scale"] = lora.scale
        return ModuleExtras(**moved)


@dataclass(frozen=True, slots=True, eq=False)
class Affine:
    """`(y + before) * gain + after`, each [out]: DoRA's norm and the biases."""

    before: Tensor
    gain: Tensor | None
    after: Tensor | None

    def __call__(self, module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        y = y + self.before
        if self.gain is not None:
            y = y * self.gain
        return y if self.after is None else y + self.after


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
    """The same rows in an output head that shares the embedding's weight."""

    ids: Tensor  # int64 [rows]
    rows: Tensor  # [rows, hidden]

    def __call__(self, module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return y.index_copy(-1, self.ids, x @ self.rows.t())


class Effects:
    """One module's effects, by the first pool row of the adapter that they belong to."""

    def __init__(self) -> None:
        self._effects: dict[int, tuple[Effect, ...]] = {}

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

    def apply(self, module: nn.Module, x: Tensor, y: Tensor, segments: LoraSegments) -> None:
        """Change `y` in place. `x` and `y` are [tokens, ...] or [1, tokens, ...]."""
        if not self._effects:
            return
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
                result = effect(module, inputs, result)
            target.copy_(result)


def _values(effect: Any) -> list[Any]:
    return [getattr(effect, field.name) for field in fields(effect)]


def scaled(module: nn.Module, rows: Tensor) -> Tensor:
    """Rows of an embedding as the module gives them: some scale theirs (Gemma)."""
    factor: Tensor | None = getattr(module, "embed_scale", None)
    return rows if factor is None else rows * factor


def base_weight(module: nn.Module) -> Tensor:
    """[out, in] of a linear layer, [vocabulary, hidden] of an embedding."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.t() if isinstance(module, Conv1D) else weight


def effects_of(
    module: nn.Module, extras: ModuleExtras, *, pooled: bool = False
) -> tuple[Effect, ...]:
    """`extras` is on the device; `pooled`: its `A` and `B` are added from the rank pool."""
    if isinstance(module, nn.Embedding):
        return _embedding_effects(module, extras)
    effects: list[Effect] = []
    if extras.weight is not None:
        parameters = {"weight": extras.weight}
        if extras.bias is not None:
            parameters["bias"] = extras.bias
        return (Replaced(parameters),)
    if not isinstance(module, nn.Linear | Conv1D):
        return () if extras.bias is None else (Replaced({"bias": extras.bias}),)
    update = None
    if extras.A is not None and extras.B is not None:
        update = (extras.A, extras.B, extras.scale)
        if not pooled:
            effects.append(HeadLora(*update))
    if extras.token_ids is not None and extras.token_rows is not None:
        effects.append(HeadTokenRows(extras.token_ids, extras.token_rows))
    affine = _affine(module, extras, update)
    return tuple(effects if affine is None else [*effects, affine])


def _embedding_effects(module: nn.Embedding, extras: ModuleExtras) -> tuple[Effect, ...]:
    if extras.weight is not None:
        return (Replaced({"weight": extras.weight}),)
    if extras.token_ids is not None and extras.token_rows is not None:
        count = len(extras.token_ids)
        device = extras.token_ids.device
        slots = torch.full((module.num_embeddings,), -1, dtype=torch.int32, device=device)
        slots[extras.token_ids] = torch.arange(count, dtype=torch.int32, device=device)
        return (TokenRows(slots, extras.token_rows),)
    if extras.A is not None and extras.B is not None:
        return (EmbeddingLora(extras.A.t().contiguous(), extras.B, extras.scale),)
    return ()


def _affine(
    module: nn.Module, extras: ModuleExtras, update: tuple[Tensor, Tensor, float] | None
) -> Affine | None:
    weight, bias = base_weight(module), getattr(module, "bias", None)
    zero = weight.new_zeros(weight.shape[0])
    added = zero if extras.lora_bias is None or update is None else extras.lora_bias * update[2]
    old = zero if bias is None else bias
    new = old if extras.bias is None else extras.bias
    if extras.magnitude is not None and update is not None:
        a, b, scale = update
        norm = torch.linalg.norm(weight + scale * (b @ a), dim=1)
        return Affine(added - old, extras.magnitude / norm, new)
    if extras.lora_bias is None and extras.bias is None:
        return None
    return Affine(added - old + new, None, None)
