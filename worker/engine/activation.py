"""Where an activated LoRA begins to apply (aLoRA, PEFT 0.21 `calculate_alora_offsets`)."""

from __future__ import annotations

import sys


def activation(prompt_ids: tuple[int, ...], invocation: tuple[int, ...]) -> int:
    """Position at which `invocation` last begins in the prompt; `sys.maxsize` where it doesn't
    occur: the adapter then applies to no token, generated ones included. 0 for an adapter
    without an invocation, which applies to all."""
    if not invocation:
        return 0
    width = len(invocation)
    for start in range(len(prompt_ids) - width, -1, -1):
        if prompt_ids[start] == invocation[0] and prompt_ids[start : start + width] == invocation:
            return start
    return sys.maxsize
