"""An adapter folder to tensors, checked against the live model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from worker.protocol import peft
from worker.protocol.errors import AdapterLoadError


@dataclass(frozen=True, slots=True, eq=False)
class ModuleWeights:
    """One module's update: `scale * B @ A`, A [rank, in], B [out, rank]."""

    A: Tensor
    B: Tensor
    scale: float


@dataclass(frozen=True, slots=True, eq=False)
class LoadedAdapter:
    """An adapter in host memory. `rank` is the largest of any module."""

    modules: Mapping[str, ModuleWeights]
    rank: int

    @property
    def nbytes(self) -> int:
        return sum(weights.A.nbytes + weights.B.nbytes for weights in self.modules.values())


def load_adapter(folder: Path, shapes: Mapping[str, tuple[int, int]]) -> LoadedAdapter:
    """The adapter in `folder` for a model whose adaptable modules have `shapes` (out, in).

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
    modules = {
        module: ModuleWeights(
            A=tensors[f"{peft.PREFIX}{module}.lora_A.weight"],
            B=tensors[f"{peft.PREFIX}{module}.lora_B.weight"],
            scale=config.scale(module),
        )
        for module in peft.adapter_modules(header)
    }
    return LoadedAdapter(modules, peft.adapter_rank(config, header))
