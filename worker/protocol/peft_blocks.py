"""Block-diagonal matrices (use_bdlora): only their blocks are in the file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from worker.protocol.peft_config import BlockDiagonal
from worker.protocol.peft_content import Problem
from worker.protocol.peft_tables import Shape


def check_blocks(
    diagonal: BlockDiagonal, module: str, parts: Mapping[str, Shape]
) -> Iterator[Problem]:
    if "A" not in parts or "B" not in parts:
        return
    in_a, in_b = (blocks > 1 for blocks in diagonal.of(module))
    if in_a and in_b:
        message = "use_bdlora names both its matrices: PEFT computes no such adapter"
        yield Problem("adapter_unsupported_tensor", module, message)
    elif diagonal.strict and diagonal.blocks > 1 and not (in_a or in_b):
        message = "use_bdlora with match_strict names none of its matrices"
        yield Problem("adapter_unsupported_tensor", module, message)
    for part, blocks in zip("AB", diagonal.of(module), strict=True):
        if parts[part] and parts[part][0] % blocks:
            message = f"lora_{part} {list(parts[part])} is not made of {blocks} equal blocks"
            yield Problem("adapter_shape_mismatch", module, message)


def whole(diagonal: BlockDiagonal, module: str, parts: Mapping[str, Shape]) -> dict[str, Shape]:
    """Shapes with the zeros beside the blocks."""
    blocks = dict(zip("AB", diagonal.of(module), strict=True))
    return {
        part: (shape[0], shape[1] * blocks[part]) if part in blocks and len(shape) == 2 else shape
        for part, shape in parts.items()
    }
