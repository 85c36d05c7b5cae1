"""Whether one module's tensors fit the config and the base model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from worker.protocol.peft_config import PeftConfig
from worker.protocol.peft_content import PREFIX, Problem
from worker.protocol.peft_tables import (
    Shape,
    Shapes,
    check_table,
    is_embedding,
    is_table,
    tied_tables,
)

_SINGLE_EXPERT = (
    "the base model's experts are fused: load and save the adapter with PEFT 0.21 and "
    "transformers 5, which fuse it"
)

_NAMED_BIAS = (
    "a bias of experts or of a router's choice is not served. With bias='all' PEFT before 0.21 "
    "trains and saves it; use PEFT 0.21, which leaves it alone, or bias='lora_only'"
)
_NOT_SAVED = (
    "modules_to_save names it, which is served for norms over the hidden size, embeddings, heads, "
    "linear layers and routers only. PEFT compares the ends of names: 'norm' names the attention's "
    "q_norm, too, 'model.norm' or 'layernorm' does not"
)


def refuse_tensor(key: str) -> Problem:
    """A tensor of a PEFT feature we don't serve, or of no PEFT feature at all."""
    if not key.startswith(PREFIX):
        return Problem("adapter_unknown_tensor", key, f"its name doesn't start with {PREFIX}")
    if key.endswith("_bias"):
        return Problem("adapter_unsupported_tensor", key, _NAMED_BIAS)
    if "lora_" in key or ".base_layer." in key:
        message = "this kind of LoRA tensor is not supported"
        return Problem("adapter_unsupported_tensor", key, message)
    return Problem("adapter_unknown_tensor", key, "not a LoRA tensor of this model")


def check_invocation(config: PeftConfig, shapes: Shapes) -> Iterator[Problem]:
    """Tokens that the vocabulary lacks never occur: the adapter would never apply."""
    if not config.invocation:
        return
    tables = [shape[0] for name, shape in shapes.items() if len(shape) == 2 and is_table(name)]
    largest = max(config.invocation)
    if tables and largest >= max(tables):
        name, message = "alora_invocation_tokens", f"{largest} is no token of the base model"
        yield Problem("adapter_invalid_config", name, message)


def check_module(
    config: PeftConfig, module: str, parts: Mapping[str, Shape], shapes: Shapes
) -> Iterator[Problem]:
    """`parts` are the shapes of the module's tensors (see peft_content.split_key)."""
    base = _base_shape(module, shapes)
    if base is None:
        if not parts.keys() & {"A", "B", "embedding_A", "embedding_B"}:
            if config.saves(module):
                yield Problem("adapter_unsupported_tensor", module, _NOT_SAVED)
            else:
                yield Problem("adapter_unknown_tensor", module, "not a tensor that PEFT would load")
        else:
            message = (
                _SINGLE_EXPERT if ".experts." in module else "the base model has no such module"
            )
            yield Problem("adapter_unmatched_modules", module, message)
        return
    if len(base) == 3:
        yield from _check_experts(config, module, parts, base)
        return
    yield from _check_lora(config, module, parts, shapes, base)
    yield from _check_combination(config, module, parts)
    yield from check_table(config, module, parts, shapes)
    yield from _check_sizes(config, module, parts, shapes, base)


def _check_experts(
    config: PeftConfig, name: str, parts: Mapping[str, Shape], base: Shape
) -> Iterator[Problem]:
    """`name` is a parameter of fused weights, `base` its (experts, out, in)."""
    experts, out, width = base
    rank = config.rank(name)
    wanted = {"A": (rank * experts, width), "B": (out, rank * experts)}
    if not config.targets_parameter(name):
        message = "target_parameters doesn't name it: PEFT would ignore its tensors"
        yield Problem("adapter_untargeted_module", name, message)
    if other := sorted(parts.keys() - wanted):
        yield Problem("adapter_unsupported_tensor", name, f"{other[0]} of experts is not supported")
    for part, shape in wanted.items():
        if part not in parts:
            yield Problem("adapter_incomplete_module", name, f"lora_{part}.weight is missing")
        elif parts[part] != shape:
            message = f"lora_{part} {list(parts[part])}, for rank {rank} expected {list(shape)}"
            yield Problem("adapter_shape_mismatch", name, message)


def _check_lora(
    config: PeftConfig, module: str, parts: Mapping[str, Shape], shapes: Shapes, base: Shape
) -> Iterator[Problem]:
    names = ("embedding_A", "embedding_B") if is_embedding(module) else ("A", "B")
    other = {"A", "B", "embedding_A", "embedding_B"} - set(names)
    if other & parts.keys():
        message = "its LoRA is of another kind of layer"
        yield Problem("adapter_unsupported_tensor", module, message)
        return
    if config.targets_parameter(f"{module}.weight") and f"{module}.weight" in shapes:
        message = "target_parameters of a weight stored as [in, out] is not supported"
        yield Problem("adapter_unsupported_tensor", module, message)
        return
    present = [name for name in names if name in parts]
    if len(present) == 1:
        missing = next(name for name in names if name not in parts)
        suffix = "" if "embedding" in missing else ".weight"
        yield Problem("adapter_incomplete_module", module, f"lora_{missing}{suffix} is missing")
    if len(present) == 2:
        if not _targets(config, module, shapes):
            message = "target_modules doesn't name it: PEFT would ignore its tensors"
            yield Problem("adapter_untargeted_module", module, message)
        wanted = base[::-1] if is_embedding(module) else base
        yield from _check_shapes(module, config.rank(module), wanted, *(parts[n] for n in names))


def _targets(config: PeftConfig, module: str, shapes: Shapes) -> bool:
    tied = tied_tables(module, shapes) if config.ensure_weight_tying else []
    return any(config.targets(name) for name in [module, *tied])


def _saves(config: PeftConfig, module: str, shapes: Shapes) -> bool:
    tied = tied_tables(module, shapes) if config.ensure_weight_tying else []
    return any(config.saves(name) for name in [module, *tied])


def _check_shapes(module: str, rank: int, base: Shape, a: Shape, b: Shape) -> Iterator[Problem]:
    if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
        message = f"A {list(a)} and B {list(b)} don't fit together"
        yield Problem("adapter_shape_mismatch", module, message)
    elif a[0] != rank:
        message = f"rank {a[0]} in the file, {rank} in the config"
        yield Problem("adapter_rank_mismatch", module, message)
    elif (b[0], a[1]) != base:
        message = f"[{b[0]}, {a[1]}], the base model has {list(base)}"
        yield Problem("adapter_shape_mismatch", module, message)


def _check_combination(
    config: PeftConfig, module: str, parts: Mapping[str, Shape]
) -> Iterator[Problem]:
    """Tensors that PEFT writes only under an option, and options that don't go together here."""
    has_lora = bool(parts.keys() & {"A", "embedding_A"})
    if has_lora and config.use_dora != ("magnitude" in parts):
        message = "use_dora and its lora_magnitude_vector don't agree"
        yield Problem("adapter_incomplete_module", module, message)
    if "A" in parts and config.lora_bias != ("lora_bias" in parts):
        message = "lora_bias and its lora_B.bias don't agree"
        yield Problem("adapter_incomplete_module", module, message)
    if not has_lora and parts.keys() & {"magnitude", "lora_bias", "base_copy"}:
        yield Problem("adapter_incomplete_module", module, "its LoRA matrices are missing")


def _check_sizes(
    config: PeftConfig, module: str, parts: Mapping[str, Shape], shapes: Shapes, base: Shape
) -> Iterator[Problem]:
    saved = _saves(config, module, shapes)
    if "weight" in parts and not saved:
        yield Problem("adapter_unknown_tensor", module, "modules_to_save doesn't name it")
    if "bias" in parts and config.bias == "none" and not saved:
        yield Problem("adapter_unknown_tensor", module, "its bias is not one that PEFT would save")
    ids = config.token_ids(module)
    if "token_rows" in parts and (not is_table(module) or not ids or max(ids) >= base[0]):
        message = "trainable_token_indices doesn't fit it"
        yield Problem("adapter_unsupported_tensor", module, message)
    expected: dict[str, Shape | None] = {
        "magnitude": base[-1:] if is_embedding(module) else base[:1],
        "lora_bias": base[:1],
        "weight": shapes.get(f"{module}.weight", base),
        "base_copy": base,
        "bias": _base_shape(f"{module}.bias", shapes),
        "token_rows": (len(ids), base[-1]),
    }
    for part, shape in parts.items():
        if part in expected and shape != expected[part]:
            wanted = expected[part]
            message = f"{part} {list(shape)}, the base model has {list(wanted) if wanted else None}"
            yield Problem("adapter_shape_mismatch", module, message)


def _base_shape(module: str, shapes: Shapes) -> Shape | None:
    """Checkpoints of a bare model (GPT-2's, for one) leave out the first part of names."""
    return shapes.get(module) or shapes.get(module.partition(".")[2])
