"""Modules that adapters change and that keep their place in the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn
from torch.func import functional_call

from worker.engine.adapter_extras import (
    Effects,
    ExtraTensors,
    LoraWeights,
    ModuleExtras,
    base_weight,
    effects_of,
)
from worker.engine.attention import current_context
from worker.engine.expert_lora import hook_experts
from worker.engine.lora import is_linear
from worker.engine.rank_pool import Target

Shape = tuple[int, ...]


class HookedModule:
    """Embeddings, norms, and the output head, which runs on sampled rows only (`is_head`)."""

    def __init__(self, module: nn.Module, *, is_head: bool = False) -> None:
        self.module = module
        self._effects = Effects()
        self._is_head = is_head
        self._applying = False
        module.register_forward_hook(self._after)

    @property
    def shapes(self) -> Mapping[str, Shape]:
        bias = getattr(self.module, "bias", None)
        shapes = {"": tuple(base_weight(self.module).shape)}
        return shapes | ({".bias": tuple(bias.shape)} if isinstance(bias, Tensor) else {})

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
        if segments is None or self._applying:
            return
        self._applying = True  # an effect may call the module with other parameters
        try:
            self._effects.apply(module, inputs[0], output, segments)
        finally:
            self._applying = False


class HookedRouter:
    """A module that chooses experts by a matrix of its own, [experts, hidden], which an adapter
    replaces for its tokens by the sum with its update. It gives one or several tensors."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._weights: dict[int, Tensor] = {}
        self._applying = False
        module.register_forward_hook(self._after)

    @property
    def shapes(self) -> Mapping[str, Shape]:
        return {"": tuple(base_weight(self.module).shape)}

    def held(self, lora: LoraWeights | None, host: ExtraTensors | None) -> int:
        return base_weight(self.module).numel()

    def put(self, row: int, extras: ModuleExtras) -> None:
        assert extras.A is not None
        assert extras.B is not None
        self._weights[row] = base_weight(self.module) + extras.scale * (extras.B @ extras.A)

    def drop(self, row: int) -> None:
        self._weights.pop(row, None)

    def _after(self, module: nn.Module, inputs: tuple[Tensor, ...], output: object) -> None:
        segments = current_context().lora
        if segments is None or self._applying or not self._weights:
            return
        (hidden,) = inputs
        self._applying = True
        try:
            for start, stop, rows in segments.spans:
                weight = self._weights.get(rows[0])
                if weight is not None:
                    part = hidden.narrow(-2, start, stop - start)
                    result = functional_call(module, {"weight": weight}, (part,))
                    for target, value in zip(_tensors(output), _tensors(result), strict=True):
                        target.narrow(-2, start, stop - start).copy_(value)
        finally:
            self._applying = False


def _tensors(output: object) -> Iterator[Tensor]:
    """[tokens, ...] each"""
    parts = output if isinstance(output, tuple) else (output,)
    for part in parts:
        assert isinstance(part, Tensor)
        yield part


def hook_others(model: nn.Module) -> dict[str, Target]:
    """The output head, the embeddings, the norms over the hidden size, and the routers and
    fused weights of experts, by their own names."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    hidden = model.get_input_embeddings().weight.shape[-1]  # type: ignore[operator]
    targets: dict[str, Target] = {}
    for name, module in model.named_modules():
        if module is head or isinstance(module, nn.Embedding) or _is_norm(module, hidden):
            targets[name] = HookedModule(module, is_head=module is head)
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
