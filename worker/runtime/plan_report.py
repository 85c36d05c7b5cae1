"""The arithmetic of `plan`, as lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from worker.engine.model_size import model_size
from worker.engine.sizing import DEVICE_SHARE, MemoryPlan, ModelSize, Roofline, plan_memory
from worker.runtime.build import model_folder
from worker.runtime.build_hf import TOKEN_BUDGETS, resolve_dtype
from worker.runtime.devices import DEVICES, Device, measure_cpu
from worker.runtime.errors import ModelUnusable
from worker.runtime.memory import free_memory
from worker.runtime.plan import LENGTHS
from worker.settings import DType

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def report(
    *,
    model: str,
    device: str,
    memory: int | None,
    kv_memory: int | None,
    flops: float | None,
    bandwidth: float | None,
    dtype: DType,
    adapter_rank: int,
    adapter_memory: int,
    token_budget: int | None,
    max_sequences: int,
    block_size: int,
    lengths: Sequence[int],
    shared: int,
    pack_weights: bool | None,
) -> list[str]:
    """Raises ModelUnusable."""
    kind = "cpu" if device == "cpu" else "cuda"
    known = _known(device)
    resolved = getattr(torch, resolve_dtype(dtype, kind))
    size = _size(
        model,
        resolved,
        token_budget=token_budget or TOKEN_BUDGETS[kind],
        max_sequences=max_sequences,
        adapter_rank=adapter_rank,
        device_type=kind,
    )
    plan = plan_memory(
        size,
        device_type=kind,
        free_memory=_free(known, memory),
        kv_memory=kv_memory,
        adapter_rank=adapter_rank,
        adapter_memory=adapter_memory,
        block_size=block_size,
        pack=pack_weights,
    )
    peak = known.roofline if known else measure_cpu(resolved)
    roofline = Roofline(flops or peak.flops, bandwidth or peak.bandwidth)
    chosen = lengths or [length for length in LENGTHS if length <= size.context_tokens]
    return [
        *_memory_lines(size, plan, adapter_rank),
        *_length_lines(plan, chosen, shared, max_sequences),
        *_roofline_lines(size, roofline, [0, *chosen], measured=known is None and not flops),
    ]


def _known(device: str) -> Device | None:
    if device == "cpu":
        return None
    if device not in DEVICES:
        raise ModelUnusable(f"no such device: {device}; known are cpu, {', '.join(DEVICES)}")
    return DEVICES[device]


def _size(model: str, dtype: torch.dtype, **step: Any) -> ModelSize:
    folder = model_folder(model)
    try:
        return model_size(folder, dtype, **step)
    except (OSError, ValueError, KeyError, AttributeError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ModelUnusable(f"{folder}/config.json cannot be used: {reason}") from error


def _free(known: Device | None, memory: int | None) -> int:
    """What a worker finds free when it starts."""
    if known is not None:
        return int((memory or known.memory) * DEVICE_SHARE)
    return memory or free_memory(torch.device("cpu"))


def _memory_lines(size: ModelSize, plan: MemoryPlan, rank: int) -> Iterator[str]:
    yield f"parameters        {size.parameters:,}"
    yield f"weights           {_bytes(plan.weights)}"
    if plan.packed:
        yield f"reordered copy    {_bytes(plan.packed)}  (--pack-weights)"
    yield f"adapter pool      {_bytes(plan.adapters)}  ({rank} rows of {_bytes(size.adapter_rank)})"
    yield f"adapters' rest    {_bytes(plan.adapter_memory)}  (at most: --adapter-memory)"
    yield f"activations       {_bytes(plan.activations)}  (of the widest step, foretold)"
    yield f"keys and values   {_bytes(plan.keys_values)}  ({size.kv_token:,} bytes per token)"
    yield f"capacity          {plan.kv_tokens:,} tokens in blocks of {plan.block_size}"
    if plan.windows != (None,):
        seen = Counter("all" if window is None else f"{window:,}" for window in plan.windows)
        groups = ", ".join(f"{count} that see {tokens} tokens" for tokens, count in seen.items())
        yield f"KV groups         {groups}; {plan.blocks:,} blocks for all of them"


def _length_lines(
    plan: MemoryPlan, lengths: Sequence[int], shared: int, most: int
) -> Iterator[str]:
    yield ""
    for length in lengths:
        fit = plan.sequences(length, shared)
        limit = f", of which {most} run (--max-sequences)" if fit > most else ""
        common = f", {min(shared, length)} of them shared" if shared else ""
        yield f"of {length:,} tokens{common}: {fit:,} sequences{limit}"


def _roofline_lines(
    size: ModelSize, roofline: Roofline, contexts: Sequence[int], *, measured: bool
) -> Iterator[str]:
    source = "measured here" if measured else "peak"
    yield ""
    yield (
        f"roofline ({source}): {roofline.flops / 1e12:.2f} TFLOP/s, "
        f"{roofline.bandwidth / 1e9:.1f} GB/s"
    )
    for context in contexts:
        batch = roofline.compute_bound_from(size, context)
        bound = "never" if batch is None else f"from {batch:,} sequences on"
        alone = roofline.step_seconds(size, 1, context)
        yield (
            f"decode at context {context:,}: bound by computing {bound}; one sequence alone at "
            f"most {1 / alone:,.0f} tokens/s"
        )


def _bytes(count: int) -> str:
    amount, unit = float(count), 0
    while amount >= 1024 and unit < len(_UNITS) - 1:
        amount, unit = amount / 1024, unit + 1
    return f"{amount:.1f} {_UNITS[unit]}" if unit else f"{count} B"
