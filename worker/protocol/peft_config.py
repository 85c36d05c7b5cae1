"""Which modules a LoRA adapter changes, with which rank and scale: PEFT's own rules."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BlockDiagonal:
    """use_bdlora: A of modules whose name contains one of `a`, and B of those of `b`, hold only
    the blocks on their diagonal, one below the other. `strict`: every module has such a one."""

    blocks: int
    a: tuple[str, ...] = ()
    b: tuple[str, ...] = ()
    strict: bool = True

    def of(self, module: str) -> tuple[int, int]:
        """Blocks of the module's A and B."""
        in_a, in_b = (any(name in module for name in names) for names in (self.a, self.b))
        return self.blocks if in_a else 1, self.blocks if in_b else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftConfig:
    """The fields that decide what an adapter computes, and which modules it may change.

    `variant` is the option, if any, that PEFT computes in another way than plain LoRA.
    `invocation`: token ids; an activated LoRA applies from where they last begin in the prompt.
    """

    r: int
    lora_alpha: float
    use_rslora: bool = False
    rank_pattern: tuple[tuple[str, int], ...] = ()
    alpha_pattern: tuple[tuple[str, float], ...] = ()
    target_modules: str | tuple[str, ...] | None = None
    exclude_modules: str | tuple[str, ...] | None = None
    layers_to_transform: tuple[int, ...] | None = None
    layers_pattern: tuple[str, ...] = ()
    base_model: str | None = None
    use_dora: bool = False
    lora_bias: bool = False
    bias: str = "none"
    modules_to_save: tuple[str, ...] = ()
    trainable_tokens: tuple[int, ...] | tuple[tuple[str, tuple[int, ...]], ...] = ()
    invocation: tuple[int, ...] = ()
    target_parameters: tuple[str, ...] = ()
    ensure_weight_tying: bool = False
    variant: str = ""
    blocks: BlockDiagonal | None = None

    def saves(self, module: str) -> bool:
        """PEFT compares the ends of names, without a dot between; all that lies in a module that
        matches is saved."""
        parts = module.split(".")
        around = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
        return any(each.endswith(self.modules_to_save) for each in around)

    def token_ids(self, module: str) -> tuple[int, ...]:
        """Trained rows of `module`; a plain list is about the input embedding."""
        for item in self.trainable_tokens:
            if isinstance(item, int):
                return tuple(token for token in self.trainable_tokens if isinstance(token, int))
            if module == item[0] or module.endswith(f".{item[0]}"):
                return item[1]
        return ()

    def rank(self, module: str) -> int:
        return _first_match(self.rank_pattern, self._key(module), self.r)

    def scale(self, module: str) -> float:
        """What `B(Ax)` is multiplied with in `module`."""
        rank = self.rank(module)
        alpha = _first_match(self.alpha_pattern, self._key(module), self.lora_alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def _key(self, module: str) -> str:
        """The name that PEFT compares patterns with: a parameter's where that is the target."""
        weight = f"{module}.weight"
        return weight if self.targets_parameter(weight) else module

    def targets_parameter(self, name: str) -> bool:
        """Fused weights are parameters of modules that are named so in every architecture;
        elsewhere, a target such as "down_proj" is no parameter's name but a linear layer's."""
        module, _, parameter = name.rpartition(".")
        if parameter != "weight" and not module.endswith("experts"):
            return False
        return any(name == t or name.endswith(f".{t}") for t in self.target_parameters)

    def parameters(self, module: str) -> tuple[str, ...]:
        """Names of the parameters that `target_parameters` names in `module`, as PEFT nests
        them: in the order in which modules register theirs, the first innermost."""
        names = {target.rpartition(".")[2] for target in self.target_parameters}
        found = (name for name in names if self.targets_parameter(f"{module}.{name}"))
        return tuple(sorted(found, key=lambda name: (name.startswith("down"), name)))

    def targets(self, module: str) -> bool:
        """Whether PEFT would adapt `module`. Without `target_modules`, PEFT's own table says."""
        if self.targets_parameter(f"{module}.weight"):
            return True
        if self.exclude_modules and _matches(self.exclude_modules, module):
            return False
        if self.target_modules is None or self.target_modules == "all-linear":
            return True
        if isinstance(self.target_modules, str) or module in self.target_modules:
            return _matches(self.target_modules, module)
        return _matches(self.target_modules, module) and self._transforms(module)

    def _transforms(self, module: str) -> bool:
        if self.layers_to_transform is None:
            return True
        patterns = self.layers_pattern or (r"[^.]*",)
        for pattern in patterns:
            layer = re.match(rf"(?:^|.*?\.){pattern}\.(?P<layer>\d+)\.", module)
            if layer is not None:
                return int(layer["layer"]) in self.layers_to_transform
        return False


def _first_match(patterns: tuple[tuple[str, T], ...], module: str, default: T) -> T:
    for pattern, value in patterns:
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def _matches(patterns: str | tuple[str, ...], module: str) -> bool:
    if isinstance(patterns, str):
        return re.fullmatch(patterns, module) is not None
    return any(module == pattern or module.endswith(f".{pattern}") for pattern in patterns)
