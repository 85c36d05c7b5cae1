"""LoRA of experts' fused weights: each token's own update in each expert that it is routed to.

Formula: PEFT 0.21 `ParamWrapper`, W[e] + scale * B[e] @ A[e]. Algorithm: that of transformers'
`grouped_mm_experts_forward`, (token, expert) pairs sorted by expert, with the update added to
each of the two products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernels.lora import LoraSegments
from worker.engine.adapter_extras import ExtraTensors, LoraWeights, ModuleExtras
from worker.engine.attention import current_context
from worker.engine.load_probe import Matrices, Probed, inputs, low_rank

ALIGNMENT = 8  # ranks that a grouped product wants in 16-bit types: 16 bytes
PARAMETERS = ("gate_up_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True, eq=False)
class ExpertUpdate:
    A: Tensor  # [experts, rank, in]
    B: Tensor  # [experts, out, rank]
    scale: float

    @staticmethod
    def of(experts: int, extras: ModuleExtras) -> ExpertUpdate:
        """PEFT keeps A as [experts * rank, in] and B as [out, rank * experts], the expert
        changing fastest."""
        assert extras.A is not None
        assert extras.B is not None
        a = extras.A.reshape(experts, -1, extras.A.shape[-1])
        b = extras.B.reshape(extras.B.shape[0], -1, experts).permute(2, 0, 1)
        spare = -a.shape[1] % ALIGNMENT
        a, b = F.pad(a, (0, 0, 0, spare)), F.pad(b, (0, spare))
        return ExpertUpdate(a.contiguous(), b.contiguous(), extras.scale)

    def __call__(self, x: Tensor, ends: Tensor) -> Tensor:
        """Rows of `x` up to `ends[e]` belong to expert e."""
        return _grouped(_grouped(x, self.A.mT, ends) * self.scale, self.B.mT, ends)


class HookedExperts:
    """Takes over the forward of a module of experts for the tokens of adapters that change it;
    all others go through the module's own, as if alone."""

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module
        self._base: Callable[..., Tensor] = module.forward
        self._updates: dict[int, dict[str, ExpertUpdate]] = {}
        module.forward = self._forward

    def put(self, row: int, parameter: str, extras: ModuleExtras) -> None:
        update = ExpertUpdate.of(self.module.num_experts, extras)
        self._updates.setdefault(row, {})[parameter] = update

    def drop(self, row: int) -> None:
        self._updates.pop(row, None)

    def probe(self, row: int, parameter: str, lora: LoraWeights) -> Probed:
        """The first expert's update for the first input, and the last one's for the second."""
        update, count = self._updates[row][parameter], self.module.num_experts
        x = inputs(update.A.shape[-1], update.A.dtype, update.A.device)
        ends = torch.ones(count, dtype=torch.int32, device=x.device)
        ends[-1] = len(x)
        rank = lora.A.shape[0] // count
        matrices = [
            Matrices(lora.A[e * rank : (e + 1) * rank], lora.B[:, e::count], lora.scale)
            for e in (0, count - 1)
        ]
        expected = [low_rank(x[i : i + 1], each) for i, each in enumerate(matrices)]
        return Probed([update.A, update.B], update(x, ends), torch.cat(expected), float(x.norm()))

    def _forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[tokens, hidden]; the index and weights are [tokens, chosen experts]."""
        hidden, experts, weights = hidden_states, top_k_index, top_k_weights
        segments = current_context().lora
        spans = [] if segments is None else self._spans(segments)
        if segments is None or not spans:
            return self._base(hidden, experts, weights)
        if hidden.shape[0] != segments.num_tokens:
            raise RuntimeError(f"{hidden.shape[0]} rows, the step has {segments.num_tokens}")
        out = torch.empty_like(hidden)
        others = torch.ones(hidden.shape[0], dtype=torch.bool)
        for start, stop, updates in spans:
            others[start:stop] = False
            part = slice(start, stop)
            out[part] = self._adapted(hidden[part], experts[part], weights[part], updates)
        rows = others.nonzero().squeeze(1).to(hidden.device)
        if len(rows):
            out[rows] = self._base(hidden[rows], experts[rows], weights[rows])
        return out

    def _spans(self, segments: LoraSegments) -> list[tuple[int, int, dict[str, ExpertUpdate]]]:
        if not self._updates:
            return []
        return [
            (start, stop, self._updates[rows[0]])
            for start, stop, rows in segments.spans
            if rows[0] in self._updates
        ]

    def _adapted(
        self, hidden: Tensor, experts: Tensor, weights: Tensor, updates: Mapping[str, ExpertUpdate]
    ) -> Tensor:
        module, chosen = self.module, experts.shape[1]
        ids, order = torch.sort(experts.reshape(-1), stable=True)
        ends = torch.bincount(ids, minlength=module.num_experts).cumsum(0).to(torch.int32)

        def product(x: Tensor, name: str) -> Tensor:
            weight = getattr(module, name)
            y = _grouped(x, weight if module.is_transposed else weight.mT, ends)
            if module.has_bias:
                y = y + getattr(module, f"{name}_bias")[ids]
            update = updates.get(name)
            return y if update is None else y + update(x, ends)

        x = hidden[order // chosen]
        if module.has_gate:
            x = module._apply_gate(product(x, "gate_up_proj"))
        else:
            x = module.act_fn(product(x, "up_proj"))
        x = product(x, "down_proj")
        if module.has_post_expert_norm:
            x = module.post_expert_norm(x)
        pairs = torch.empty_like(x)
        pairs[order] = x * weights.reshape(-1)[order, None]
        return pairs.view(hidden.shape[0], chosen, -1).sum(1).to(hidden.dtype)


def _grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows up to `ends[e]` with `weight[e]` [in, out]."""
    return F.grouped_mm(x.to(weight.dtype), weight, offs=ends)


class ExpertParameter:
    """One of a module's fused weights. Implements `worker.engine.rank_pool.Target`."""

    def __init__(self, experts: HookedExperts, name: str) -> None:
        self._experts = experts
        self._name = name

    @property
    def module(self) -> nn.Module:
        module: nn.Module = self._experts.module
        return module

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """(experts, out, in)"""
        weight = getattr(self.module, self._name)
        return {"": tuple(weight.mT.shape if self.module.is_transposed else weight.shape)}

    def held(self, lora: LoraWeights | None, host: ExtraTensors | None) -> int:
        assert lora is not None
        experts, out, width = self.shapes[""]
        rank = lora.A.shape[0] // experts
        return experts * (out + width) * (rank + -rank % ALIGNMENT)

    def put(self, row: int, extras: ModuleExtras) -> None:
        self._experts.put(row, self._name, extras)

    def drop(self, row: int) -> None:
        self._experts.drop(row)

    def probe(self, row: int, lora: LoraWeights | None, host: ExtraTensors | None) -> Probed:
        assert lora is not None
        return self._experts.probe(row, self._name, lora)


def hook_experts(model: nn.Module) -> dict[str, ExpertParameter]:
    """The fused weights of experts that follow transformers' experts interface, by name."""
    found: dict[str, ExpertParameter] = {}
    for name, module in model.named_modules():
        parameters = dict(module.named_parameters(recurse=False))
        fused = [key for key in PARAMETERS if key in parameters and parameters[key].ndim == 3]
        if fused and hasattr(module, "is_transposed") and hasattr(module, "has_gate"):
            experts = HookedExperts(module)
            found |= {f"{name}.{key}": ExpertParameter(experts, key) for key in fused}
    return found
