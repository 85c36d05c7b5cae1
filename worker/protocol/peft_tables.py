"""Adapters that change the tables of tokens: the embeddings and the output head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from worker.protocol.peft_config import PeftConfig
from worker.protocol.peft_content import Problem

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]

HEADS = frozenset({"lm_head", "embed_out", "output"})


def is_head(module: str) -> bool:
    return module.rpartition(".")[2] in HEADS


def is_embedding(module: str) -> bool:
    name = module.rpartition(".")[2]
    return not is_head(module) and ("embed" in name or name in {"wte", "wpe"})


def is_table(module: str) -> bool:
    return is_embedding(module) or is_head(module)


def tied_tables(head: str, shapes: Shapes) -> list[str]:
    """The embedding whose weight `head` shares, if it does."""
    if f"{head}.tied" not in shapes:
        return []
    return [name for name in shapes if is_embedding(name) and shapes[name] == shapes[head]]


def check_table(
    config: PeftConfig, module: str, parts: Mapping[str, Shape], shapes: Shapes
) -> Iterator[Problem]:
    """Changes of one module that PEFT can't make together."""
    if config.variant not in ("", "use_dora") and "embedding_A" in parts:
        message = f"PEFT computes no {config.variant} with LoRA of embeddings"
        yield Problem("adapter_unsupported_tensor", module, message)
    if "embedding_A" in parts and (config.lora_bias or "lora_bias" in parts):
        message = "PEFT computes no lora_bias with LoRA of embeddings"
        yield Problem("adapter_unsupported_tensor", module, message)
    has_lora = bool(parts.keys() & {"A", "embedding_A"})
    if has_lora + ("weight" in parts) + ("token_rows" in parts) > 1:
        message = "more than one of LoRA, modules_to_save and trainable_token_indices"
        yield Problem("adapter_unsupported_tensor", module, message)
    tied = tied_tables(module, shapes)
    if any(config.token_ids(table) for table in tied) and parts.keys() & {"weight", "magnitude"}:
        message = "PEFT can't replace or norm a head that shares the embedding's trained rows"
        yield Problem("adapter_unsupported_tensor", module, message)
    if "token_rows" in parts and _is_added_to_a_bias(module, shapes):
        message = "PEFT leaves out the bias of a head with trained rows"
        yield Problem("adapter_unsupported_tensor", module, message)


def _is_added_to_a_bias(module: str, shapes: Shapes) -> bool:
    heads = [name for name in shapes if module in tied_tables(name, shapes)] or [module]
    return any(is_head(head) and f"{head}.bias" in shapes for head in heads)


def check_tying(
    config: PeftConfig, modules: Mapping[str, Mapping[str, str]], shapes: Shapes
) -> Iterator[Problem]:
    """With ensure_weight_tying, what changes an embedding changes the head that shares it, and
    PEFT saves both. `modules`: {module: {part: key}}."""
    if not config.ensure_weight_tying:
        return
    pairs = [(table, head) for head in shapes for table in tied_tables(head, shapes)]
    for table, head in pairs:
        for part, other in {"embedding_A": "A", "weight": "weight"}.items():
            if part in modules.get(table, {}) and other not in modules.get(head, {}):
                message = f"{table} is changed with ensure_weight_tying, and this is not"
                yield Problem("adapter_incomplete_module", head, message)
