"""Modules that adapters change and that keep their place in the model."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from worker.engine.adapter_extras import (
    ExtraTensors,
    LoraWeights,
    ModuleExtras,
    base_weight,
    effects_of,
)
from worker.engine.attention import current_context
from worker.engine.effects import Effects, EmbeddingLora, HeadLora, scaled
from worker.engine.expert_lora import hook_experts
from worker.engine.fixed_rows import are_rows_fixed
from worker.engine.load_probe import Probed, inputs, low_rank
from worker.engine.lora import is_linear
from worker.engine.rank_pool import OtherTarget
from worker.protocol.errors import AdapterLoadError

Shape = tuple[int, ...]


def twin(module: nn.Module) -> nn.Module:
    """The same module and weights without hooks. What calls it with other weights puts them in
    the twin's place for that time, so that `module` can be read by other threads."""
    other = copy.copy(module)
    other._parameters = dict(module._parameters)
    other._forward_hooks = OrderedDict()
    return other


class HookedModule:
    """Embeddings, norms, and the output head, which runs on sampled rows only (`is_head`) and
    may share the weight of the input embeddings (`is_tied`)."""

    def __init__(self, module: nn.Module, *, is_head: bool = False, is_tied: bool = False) -> None:
        self.module = module
        self._is_tied = is_tied
        self._twin = twin(module)
        self._effects = Effects()
        self._is_head = is_head
        module.register_forward_hook(self._after)

    @property
    def shapes(self) -> Mapping[str, Shape]:
        shapes = _shapes(self.module)
        return {**shapes, ".tied": ()} if self._is_tied else shapes

    def held(self, lora: LoraWeights | None, host: ExtraTensors | None) -> int:
        tensors = {} if host is None else host.tensors
        held = [tensor for name, tensor in tensors.items() if name != "base_copy"]
        if lora is not None:
            held += [lora.A, lora.B]
        slots = 2 * len(base_weight(self.module)) if "token_rows" in tensors else 0
        return sum(tensor.numel() for tensor in held) + slots

    def put(self, row: int, extras: ModuleExtras) -> None:
        self._effects.put(row, effects_of(self.module, extras))

    def drop(self, row: int) -> None:
        self._effects.drop(row)

    def _after(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        context = current_context()
        segments = context.head if self._is_head else context.lora
        if segments is not None and self._effects:
            fixed = are_rows_fixed(module)
            self._effects.apply(self._twin, inputs[0], output, segments, fixed=fixed)

    def probe(self, row: int, lora: LoraWeights | None, host: ExtraTensors | None) -> Probed:
        kept = self._effects.kept(row)
        weight = base_weight(self.module)
        if lora is not None:
            x = inputs(weight.shape[1], weight.dtype, weight.device)
            return self._probe_update(kept, row, x, low_rank(x, lora))
        if host is None or "A" not in host.tensors:
            return Probed(kept)
        ids = torch.tensor([0, len(weight) - 1], device=weight.device)
        a, b = (host.tensors[name].to(weight.device, torch.float32) for name in "AB")
        return self._probe_update(
            kept, row, ids, scaled(self.module, host.scale * (a[:, ids].t() @ b.t()))
        )

    def _probe_update(self, kept: list[Tensor], row: int, x: Tensor, expected: Tensor) -> Probed:
        zero = torch.zeros_like(expected, dtype=base_weight(self.module).dtype)
        updates = [e for e in self._effects.of(row) if isinstance(e, HeadLora | EmbeddingLora)]
        served = [update(self.module, x, zero) for update in updates]
        return Probed(kept, served[0] if served else None, expected)


class HookedRouter:
    """A module that chooses experts by a matrix of its own, [experts, hidden], and a bias maybe,
    which an adapter replaces for its tokens by its own or by the sum with its update. It gives
    one or several tensors."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._twin = twin(module)
        self._parameters: dict[int, dict[str, Tensor]] = {}
        module.register_forward_hook(self._after)

    @property
    def shapes(self) -> Mapping[str, Shape]:
        return _shapes(self.module)

    def held(self, lora: LoraWeights | None, host: ExtraTensors | None) -> int:
        experts, hidden = base_weight(self.module).shape
        return int(experts * (hidden + 1))

    def put(self, row: int, extras: ModuleExtras) -> None:
        if extras.magnitude is not None or extras.lora_bias is not None:
            message = "DoRA and lora_bias of a router: PEFT computes no such adapter"
            raise AdapterLoadError("adapter_invalid", message)
        weight = base_weight(self.module) if extras.weight is None else extras.weight
        if extras.A is not None and extras.B is not None:
            weight = weight + extras.scale * (extras.B @ extras.A)
        parameters = {"weight": weight}
        if extras.bias is not None:
            parameters["bias"] = extras.bias
        self._parameters[row] = parameters

    def drop(self, row: int) -> None:
        self._parameters.pop(row, None)

    def _after(self, module: nn.Module, inputs: tuple[Tensor, ...], output: object) -> None:
        segments = current_context().lora
        if segments is None or not self._parameters:
            return
        (hidden,) = inputs
        for start, stop, rows in segments.spans:
            parameters = self._parameters.get(rows[0])
            if parameters is not None:
                part = hidden.narrow(-2, start, stop - start)
                result = functional_call(self._twin, parameters, (part,))
                for target, value in zip(_tensors(output), _tensors(result), strict=True):
                    target.narrow(-2, start, stop - start).copy_(value)

    def probe(self, row: int, lora: LoraWeights | None, host: ExtraTensors | None) -> Probed:
        kept = list(self._parameters[row].values())
        if lora is None:
            return Probed(kept)
        base = base_weight(self.module)
        x = inputs(base.shape[1], base.dtype, base.device)
        expected = F.linear(x.float(), base.float()) + low_rank(x, lora)
        return Probed(kept, F.linear(x, kept[0]), expected, float(x.norm()))


def _shapes(module: nn.Module) -> dict[str, Shape]:
    bias = getattr(module, "bias", None)
    shapes = {"": tuple(base_weight(module).shape)}
    return shapes | ({".bias": tuple(bias.shape)} if isinstance(bias, Tensor) else {})


def _tensors(output: object) -> Iterator[Tensor]:
    """[tokens, ...] each"""
    parts = output if isinstance(output, tuple) else (output,)
    for part in parts:
        assert isinstance(part, Tensor)
        yield part


def hook_others(model: nn.Module) -> dict[str, OtherTarget]:
    """The output head, the embeddings, the norms over the hidden size, and the routers and
    fused weights of experts, by their own names."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    table = model.get_input_embeddings().weight  # type: ignore[operator]
    hidden = table.shape[-1]
    targets: dict[str, OtherTarget] = {}
    for name, module in model.named_modules():
        if module is head or isinstance(module, nn.Embedding) or _is_norm(module, hidden):
            is_tied = module is head and head.weight is table
            targets[name] = HookedModule(module, is_head=module is head, is_tied=is_tied)
        elif _is_router(module, hidden):
            targets[name] = HookedRouter(module)
    return targets | hook_experts(model)


def _is_norm(module: nn.Module, hidden: int) -> bool:
    parameters = dict(module.named_parameters())
    return (
        "weight" in parameters
        and parameters.keys() <= {"weight", "bias"}
        and all(parameter.shape == (hidden,) for parameter in parameters.values())
    )


def _is_router(module: nn.Module, hidden: int) -> bool:
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    if weight is None or is_linear(module) or isinstance(module, nn.Embedding):
        return False
    return weight.ndim == 2 and weight.shape[1] == hidden and not list(module.children())
