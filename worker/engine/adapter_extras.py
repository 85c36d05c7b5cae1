"""What an adapter changes in a module besides `scale * B @ A`: held per adapter, not in the pool.

Each part of a file becomes an effect on the tokens of the adapter's spans; the Affine of a linear
layer in the pool is applied there:

    lora_magnitude_vector, lora_B.bias, bias      Affine, Gain (embeddings)
    LoRA of the output head                       HeadLora
    LoRA of the embeddings                        EmbeddingLora
    modules_to_save                               ReplacedLinear, Replaced
    trainable_token_indices                       TokenRows, HeadTokenRows

Formulas: PEFT 0.21, `peft.tuners.lora` and `peft.tuners.trainable_tokens`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from worker.engine.effects import (
    Affine,
    Effect,
    EmbeddingLora,
    Gain,
    HeadLora,
    HeadTokenRows,
    Replaced,
    ReplacedLinear,
    TokenRows,
)

NORM_ROWS = 1024  # of a weight that are held in float32 at a time


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


def base_weight(module: nn.Module) -> Tensor:
    """[out, in] of a linear layer, [vocabulary, hidden] of an embedding."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.t() if isinstance(module, Conv1D) else weight


def effects_of(module: nn.Module, extras: ModuleExtras) -> tuple[Effect, ...]:
    """`extras` is on the device."""
    if isinstance(module, nn.Embedding):
        return _embedding_effects(module, extras)
    if isinstance(module, nn.Linear | Conv1D):
        return tuple(_linear_effects(module, extras))
    parameters = {"weight": extras.weight, "bias": extras.bias}
    return (Replaced({name: value for name, value in parameters.items() if value is not None}),)


def _linear_effects(module: nn.Linear | Conv1D, extras: ModuleExtras) -> Iterator[Effect]:
    """Trained rows stand in for the head's own weight, so they come before its LoRA."""
    if extras.weight is not None:
        yield ReplacedLinear(extras.weight, module.bias if extras.bias is None else extras.bias)
        return
    if extras.token_ids is not None and extras.token_rows is not None:
        yield HeadTokenRows(extras.token_ids, extras.token_rows)
    if extras.A is not None and extras.B is not None:
        yield HeadLora(extras.A, extras.B, extras.scale)
    affine = affine_of(module, extras)
    if affine is not None:
        yield affine


def _embedding_effects(module: nn.Embedding, extras: ModuleExtras) -> tuple[Effect, ...]:
    if extras.weight is not None:
        return (Replaced({"weight": extras.weight}),)
    if extras.token_ids is not None and extras.token_rows is not None:
        count, device = len(extras.token_ids), extras.token_ids.device
        slots = torch.full((module.num_embeddings,), -1, dtype=torch.int32, device=device)
        slots[extras.token_ids] = torch.arange(count, dtype=torch.int32, device=device)
        return (TokenRows(slots, extras.token_rows),)
    if extras.A is None or extras.B is None:
        return ()
    update = EmbeddingLora(extras.A.t().contiguous(), extras.B, extras.scale)
    if extras.magnitude is None:
        return (update,)
    columns = module.weight.t() + extras.scale * (extras.B @ extras.A)
    return (update, Gain(extras.magnitude / torch.linalg.norm(columns, dim=1)))


def affine_of(module: nn.Module, extras: ModuleExtras) -> Affine | None:
    """What follows the low-rank update of a linear layer, which DoRA scales with all but the bias:
    `(y + added - old) * gain + new`. None: nothing does."""
    weight, bias = base_weight(module), getattr(module, "bias", None)
    zero = torch.zeros(len(weight), device=weight.device)
    added = zero if extras.lora_bias is None else extras.lora_bias.float() * extras.scale
    old = zero if bias is None else bias.float()
    new = old if extras.bias is None else extras.bias.float()
    if extras.magnitude is None or extras.A is None or extras.B is None:
        gain, shift = None, added + (new - old)
    else:
        gain = extras.magnitude.float() / _row_norms(weight, extras.A, extras.B, extras.scale)
        shift = (added - old) * gain + new
    if gain is None and not shift.any():
        return None
    return Affine(gain, shift if shift.any() else None)


def _row_norms(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """float32 [out]: of `weight + scale * b @ a`, some rows at a time."""
    parts = zip(torch.split(weight, NORM_ROWS), torch.split(b, NORM_ROWS), strict=True)
    norms = [
        torch.linalg.norm(rows.float() + scale * (own.float() @ a.float()), dim=1)
        for rows, own in parts
    ]
    return torch.cat(norms)
