"""The base models of this deployment, by the name that clients use."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from gateway.adapters.repository import BaseModelRepository
from gateway.kit.clock import now_ms
from gateway.kit.database import WriteSession
from gateway.models import BaseModel
from gateway.settings import Settings
from worker.protocol.peft import base_shapes

_CONTEXT_FIELDS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")


class BaseModelUnreadable(Exception):
    """The model cannot be served: says which file is missing or wrong."""


class BaseModelUnavailable(Exception):
    """The base model's shapes cannot be read now: try again later."""


def default_name(source: str) -> str:
    """A folder's own name; a hub id as it is."""
    path = Path(source).expanduser()
    return path.resolve().name if path.is_dir() else source


async def register_configured_model(session: WriteSession, settings: Settings) -> BaseModel | None:
    """The model of the settings, if any. Raises BaseModelUnreadable."""
    if settings.model is None:
        return None
    name = settings.model_name or default_name(settings.model)
    return await register_base_model(session, name, settings.model)


async def register_base_model(session: WriteSession, name: str, source: str) -> BaseModel:
    """Idempotent. `source` is a local folder or a hub id. Raises BaseModelUnreadable."""
    context_tokens = context_length(await asyncio.to_thread(read_config, source), source)
    repository = BaseModelRepository(session)
    model = await repository.get(name)
    if model is None:
        model = BaseModel(
            name=name, source=source, context_tokens=context_tokens, created_at=now_ms()
        )
        repository.add(model)
    model.source, model.context_tokens = source, context_tokens
    await session.flush()
    return model


def read_config(source: str) -> dict[str, Any]:
    """config.json of a folder or of the hub. Blocks. Raises BaseModelUnreadable."""
    folder = Path(source).expanduser()
    if source.startswith(("/", ".", "~")) and not folder.is_dir():
        raise BaseModelUnreadable(f"there is no folder {source}")
    try:
        if not folder.is_dir():  # unlike hf_hub_download, this fails at once without a network
            folder = Path(snapshot_download(source, allow_patterns="config.json"))
        config = msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, Any])
    except LocalEntryNotFoundError as error:
        why = str(error).partition("\n")[0].removeprefix("Got: ")
        raise BaseModelUnreadable(
            f"{source!r} is no folder, is not in the local cache of the Hugging Face hub, and the "
            f"hub does not answer ({why}); `hf download {source}` fetches it where it does"
        ) from error
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        raise BaseModelUnreadable(f"cannot read config.json of {source!r}: {error}") from error
    except msgspec.DecodeError as error:
        raise BaseModelUnreadable(f"config.json of {source!r} is not valid: {error}") from error
    return config


def context_length(config: dict[str, Any], source: str) -> int:
    """Tokens that fit in the model's positions. Raises BaseModelUnreadable."""
    for part in (config, config.get("text_config") or {}):
        for name in _CONTEXT_FIELDS:
            if isinstance(part.get(name), int):
                return int(part[name])
    raise BaseModelUnreadable(f"config.json of {source!r} names no context length")


def model_shapes(source: str) -> dict[str, tuple[int, ...]]:
    """(out, in) by module, of a local folder or a hub model (from the local cache, if it is
    there). Blocks. Raises BaseModelUnavailable."""
    folder = Path(source).expanduser()
    if not folder.is_dir() and (source.count("/") != 1 or source.startswith((".", "/", "~"))):
        raise BaseModelUnavailable(
            f"no such folder: {source}; a base model is a Hugging Face model folder or a hub id "
            "such as org/name"
        )
    try:
        if not folder.is_dir():
            patterns = ["config.json", "*.safetensors", "*.safetensors.index.json"]
            folder = Path(snapshot_download(source, allow_patterns=patterns))
        return base_shapes(folder)
    except (OSError, ValueError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise BaseModelUnavailable(f"cannot read the shapes of {source!r}: {error}") from error
