"""Make the engine that the settings ask for. Torch is imported only for a real model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from worker.engine.config import SchedulerConfig
from worker.engine.engine import Engine
from worker.engine.null_runner import NullResidency, NullRunner
from worker.runtime.errors import ModelUnusable
from worker.settings import EngineSettings, WorkerSettings

NULL_KV_TOKENS = 1_048_576
NULL_TOKEN_BUDGET = 2048


def build_engine(settings: WorkerSettings) -> Engine:
    """Raises ModelUnusable."""
    folder = model_folder(settings.model)
    if settings.engine == "null":
        return _null_engine(settings, folder)
    from worker.runtime.build_hf import serving_engine

    return serving_engine(settings, folder)


def model_folder(model: str) -> Path:
    """A local folder, or the snapshot of a hub id. Raises ModelUnusable."""
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelUnusable(
                f"{path} holds no config.json: --model (BATTEN_MODEL) must name a Hugging Face "
                "model folder or a hub id such as org/name"
            )
        return path
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise ModelUnusable(
            f"no such folder: {path}; --model (BATTEN_MODEL) must name a Hugging Face model "
            "folder or a hub id such as org/name"
        )
    return _from_hub(model)


def _from_hub(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.jinja"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ModelUnusable(
            f"{model} is no local folder and cannot be fetched from the hub: {reason}"
        ) from error


def load_tokenizer(folder: Path) -> Tokenizer:
    """Raises ModelUnusable."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ModelUnusable(f"{folder} holds no tokenizer.json (a fast tokenizer is required)")
    return Tokenizer.from_file(str(file))


def context_tokens(settings: EngineSettings, of_model: int) -> int:
    """Raises ModelUnusable when the setting exceeds what the model was made for."""
    if settings.context_tokens is not None and settings.context_tokens > of_model:
        raise ModelUnusable(
            f"--context-tokens {settings.context_tokens} is more than the model's {of_model}"
        )
    return settings.context_tokens or of_model


def scheduler_config(
    settings: EngineSettings,
    num_blocks: int,
    model_context: int,
    token_budget: int,
) -> SchedulerConfig:
    """`token_budget` holds unless the settings have one."""
    return SchedulerConfig(
        num_blocks=num_blocks,
        block_size=settings.block_size,
        token_budget=settings.token_budget or token_budget,
        max_sequences=settings.max_sequences,
        pinned_share=settings.pinned_share,
        adapter_rank=settings.adapter_rank,
        context_tokens=context_tokens(settings, model_context),
    )


def _null_engine(settings: WorkerSettings, folder: Path) -> Engine:
    tokenizer = load_tokenizer(folder)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    context = int(config.get("max_position_embeddings", 8192))
    num_blocks = NULL_KV_TOKENS // settings.block_size
    return Engine(
        scheduler_config(settings, num_blocks, context, NULL_TOKEN_BUDGET),
        NullRunner(tokenizer.get_vocab_size(), delay=settings.null_delay),
        NullResidency(settings.adapter_rank),
        tokenizer,
        frozenset(),
        "null",
    )
