"""An adapter folder to tensors, checked against the live model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from worker.protocol import peft
from worker.protocol.errors import AdapterLoadError


@dataclass(frozen=True, slots=True, eq=False)
class ModuleWeights:
    """One module's update: `scale * B @ A`, A [rank, in], B [out, rank]. All experts' of fused
    weights together: A [experts * rank, in], B [out, rank * experts], as PEFT keeps them."""

    A: Tensor
    B: Tensor
    scale: float


@dataclass(frozen=True, slots=True, eq=False)
class ExtraTensors:
    """What else a module's tensors are, by part: see `worker.engine.adapter_extras`."""

    tensors: Mapping[str, Tensor]
    scale: float = 1.0

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True, slots=True, eq=False)
class LoadedAdapter:
    """An adapter in host memory. `rank` is the rows it takes in the pool; `extras` is all that it
    changes besides the low-rank updates of layers, heads, routers and experts; an
    `invocation` (token ids) activates it."""

    modules: Mapping[str, ModuleWeights]
    rank: int
    extras: Mapping[str, ExtraTensors] = field(default_factory=dict)
    invocation: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        low_rank = sum(weights.A.nbytes + weights.B.nbytes for weights in self.modules.values())
        return low_rank + sum(extras.nbytes for extras in self.extras.values())


def load_adapter(folder: Path, shapes: peft.Shapes) -> LoadedAdapter:
    """The adapter in `folder` for a model whose adaptable modules have `shapes`.

    Raises AdapterLoadError `adapter_invalid` for anything that the model can't serve exactly:
    never a part of an adapter.
    """
    weights_file = folder / peft.WEIGHTS_FILE
    try:
        config = peft.parse_config((folder / peft.CONFIG_FILE).read_bytes())
        header = peft.read_header(weights_file)
    except (peft.AdapterConfigError, peft.SafetensorsError) as error:
        raise AdapterLoadError("adapter_invalid", str(error)) from error
    except OSError as error:
        raise AdapterLoadError("adapter_unavailable", str(error)) from error
    problems = peft.validate(config, header, shapes)
    if problems:
        listed = "; ".join(f"{problem.name}: {problem.message}" for problem in problems[:5])
        raise AdapterLoadError("adapter_invalid", f"{listed} ({len(problems)} in all)")
    tensors = load_file(weights_file)
    modules: dict[str, ModuleWeights] = {}
    extras: dict[str, ExtraTensors] = {}
    keys_of = peft.adapter_parts(config, header)
    for module, keys in keys_of.items():
        parts = {part: tensors[key] for part, key in keys.items()}
        if "A" in parts:
            modules[module] = _weights(config, module, parts.pop("A"), parts.pop("B"))
        if parts:
            extras[module] = _extras(config, module, parts)
    rank = peft.rank_of(config, peft.lora_modules(keys_of))
    return LoadedAdapter(modules, rank, extras, config.invocation)


def _weights(config: peft.PeftConfig, module: str, a: Tensor, b: Tensor) -> ModuleWeights:
    if config.blocks is not None:
        a, b = (
            torch.block_diag(*matrix.chunk(blocks))  # type: ignore[no-untyped-call]
            for matrix, blocks in zip((a, b), config.blocks.of(module), strict=True)
        )
    return ModuleWeights(a, b, scale=config.scale(module))


def _extras(config: peft.PeftConfig, module: str, parts: dict[str, Tensor]) -> ExtraTensors:
    named = {part.removeprefix("embedding_"): tensor for part, tensor in parts.items()}
    if "token_rows" in named:
        named["token_ids"] = torch.tensor(config.token_ids(module), dtype=torch.int64)
    return ExtraTensors(named, config.scale(module))
