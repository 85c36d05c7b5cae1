"""The engine over an unmodified Hugging Face model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import structlog
import torch
from obstore.exceptions import BaseError
from obstore.store import ObjectStore
from safetensors import SafetensorError
from transformers.utils.logging import disable_progress_bar

from kernels.lora import cpu as lora_cpu
from kernels.paged_attention import cpu as attention_cpu
from worker.adapters.loader import LoadedAdapter
from worker.adapters.source import AdapterSource
from worker.adapters.store import AdapterStore
from worker.engine.adapter_cache import AdapterCache
from worker.engine.certification import UnsupportedArchitecture
from worker.engine.engine import Engine
from worker.engine.fixed_rows import RowsNotFixed, fix_rows
from worker.engine.model_loader import DTypeName, ModelLoadError, ServedModel, load_model
from worker.engine.model_runner import ModelRunner
from worker.engine.packed_linear import pack, packable
from worker.engine.rank_pool import RankPool
from worker.engine.sizing import memory_for_kv, packs
from worker.engine.widest_step import WidestStep, run_widest_step
from worker.protocol.object_store import open_store, reason
from worker.protocol.types import AdapterRef
from worker.runtime.build import context_tokens, load_tokenizer, scheduler_config
from worker.runtime.errors import ModelUnusable, StoreUnusable
from worker.runtime.memory import free_memory, peak_memory
from worker.settings import DType, EngineSettings, WorkerSettings, physical_cores

# What a folder with wrong, missing or damaged files makes the libraries raise.
_UNREADABLE = (
    ModelLoadError,
    OSError,
    ValueError,
    KeyError,
    AttributeError,
    RuntimeError,
    ImportError,
    SafetensorError,
)

Shapes = Mapping[str, tuple[int, ...]]
Source = Callable[[AdapterRef], LoadedAdapter]

TOKEN_BUDGETS = {"cpu": 512, "cuda": 2048}
"""Most tokens of a step. A CPU is busy with fewer, and a step of a 1B model with 2,048 would take
longer there than a lease lasts."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """`close` ends the threads that load adapters."""

    engine: Engine
    close: Callable[[], None]


def serving_engine(settings: WorkerSettings, folder: Path) -> Engine:
    """Takes its adapters from the object store. Raises ModelUnusable or StoreUnusable."""
    store = AdapterStore(_open_store(settings.store, settings.store_seconds), settings.cache_dir)
    return hf_engine(settings, folder, partial(AdapterSource, store)).engine


def hf_engine(
    settings: EngineSettings, folder: Path, source_for: Callable[[Shapes], Source]
) -> BuiltEngine:
    """`source_for` (shapes of the model's modules) is where adapters come from.

    Raises ModelUnusable.
    """
    disable_progress_bar()
    torch.set_num_threads(settings.threads or physical_cores())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = load_tokenizer(folder)
    model = load_served(folder, resolve_dtype(settings.dtype, device), device)
    packed = _pack(settings, model)
    if settings.deterministic:
        _fix_rows(model)
    pool = RankPool(model.linears, settings.adapter_rank, model.dtype, model.device, model.others)
    source = source_for(model.lora_shapes)
    adapters = AdapterCache(
        pool, source, extra_memory=settings.adapter_memory, patience=settings.store_patience
    )
    size = settings.block_size
    step = _widest_step(settings, model)
    activations = None if settings.kv_memory else _activations(model, step, size)
    num_blocks = _num_blocks(settings, model, activations)
    config = replace(
        scheduler_config(settings, num_blocks, model.context_tokens, step.token_budget),
        vocabulary=model.vocab_size,
        windows=model.kv_layout.windows,
    )
    _log.info(
        "model_loaded",
        folder=str(folder),
        revision=model.revision[:12],
        device=device,
        dtype=str(model.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        packed=packed,
        weights=sum(weight.nbytes for weight in model.packed.module.parameters()),
        adapter_memory=settings.adapter_memory,
        adapter_pool=model.adapter_bytes_per_rank * pool.rank,
        activations=activations,
        kv_memory=model.kv_layout.bytes_per_slot * size * num_blocks,
        kv_tokens=config.kv_tokens,
        block_size=size,
    )
    runner = ModelRunner(model, num_blocks, size, adapters)
    engine = Engine(config, runner, adapters, tokenizer, model.eos_ids, model.revision)
    return BuiltEngine(engine, adapters.close)


def _open_store(url: str, seconds: float) -> ObjectStore:
    """A local folder that is not there yet is made: the gateway may only come up later."""
    try:
        return open_store(url, seconds)
    except (BaseError, OSError, ValueError) as error:
        raise StoreUnusable(
            f"the object store {url} cannot be opened: {reason(error)} (--store, BATTEN_STORE)"
        ) from error


def resolve_dtype(dtype: DType, device: str) -> DTypeName:
    """bfloat16 where the device computes in it, float32 on older CPUs."""
    if dtype != "auto":
        return dtype
    if device == "cuda" or torch.cpu._is_avx512_bf16_supported():
        return "bfloat16"
    return "float32"


def load_served(folder: Path, dtype: DTypeName, device: str) -> ServedModel:
    """Raises ModelUnusable."""
    try:
        return load_model(folder, dtype, device)
    except UnsupportedArchitecture as error:
        raise ModelUnusable(f"unsupported_architecture: {error}") from error
    except torch.OutOfMemoryError as error:
        raise ModelUnusable(f"{folder} does not fit into the memory of {device}") from error
    except _UNREADABLE as error:
        reason = str(error).strip().partition("\n")[0]
        raise ModelUnusable(f"{folder} cannot be loaded: {reason}") from error


def _fix_rows(model: ServedModel) -> None:
    """Raises ModelUnusable."""
    if model.device.type == "cpu" and not (
        attention_cpu.is_available("cpu", model.dtype) and lora_cpu.is_available("cpu", model.dtype)
    ):
        raise ModelUnusable("--deterministic needs a C++ compiler on a CPU: see the log for why")
    try:
        fix_rows(model.packed.module)
    except RowsNotFixed as error:
        raise ModelUnusable(f"--deterministic cannot serve this model: {error}") from error


def _pack(settings: EngineSettings, model: ServedModel) -> bool:
    """Whether linear layers now multiply reordered copies of their weights."""
    linears = packable(model.packed.module)
    size = sum(linear.weight.nbytes for linear in linears)
    wanted = packs(size, free_memory(model.device), settings.pack_weights)
    if wanted:
        pack(linears)
    return wanted


def _widest_step(settings: EngineSettings, model: ServedModel) -> WidestStep:
    return WidestStep.on(
        model.device.type,
        token_budget=settings.token_budget or TOKEN_BUDGETS[model.device.type],
        max_sequences=settings.max_sequences,
        context_tokens=context_tokens(settings, model.context_tokens),
        adapter_rank=settings.adapter_rank,
    )


def _activations(model: ServedModel, step: WidestStep, block_size: int) -> int:
    """Measured. What the first step of all loads and keeps is not part of it."""
    run_widest_step(model, replace(step, token_budget=1), block_size)
    try:
        return peak_memory(model.device, partial(run_widest_step, model, step, block_size))
    except torch.OutOfMemoryError as error:
        raise ModelUnusable(
            f"a step of {step.token_budget} tokens and {step.sequences} sequences does not fit "
            f"beside the weights on {model.device}: lower --token-budget or --max-sequences"
        ) from error


def _num_blocks(settings: EngineSettings, model: ServedModel, activations: int | None) -> int:
    """`activations` (bytes) and what adapters may still take are kept free unless the settings
    say what keys and values get."""
    free = free_memory(model.device) - settings.adapter_memory
    memory = settings.kv_memory or memory_for_kv(free, activations or 0, model.device.type)
    blocks = model.kv_layout.num_blocks(memory, settings.block_size)
    if blocks < 1:
        needed = model.kv_layout.bytes_per_slot * settings.block_size
        raise ModelUnusable(
            f"{memory} bytes hold no block of keys and values ({needed} bytes): raise --kv-memory "
            "or lower --adapter-memory"
        )
    return blocks
