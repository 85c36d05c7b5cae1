"""Load a Hugging Face model folder for packed execution."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from worker.engine.certification import certify
from worker.engine.fusion import fuse
from worker.engine.hooked import hook_others
from worker.engine.kv_cache import KvLayout
from worker.engine.lora import LoraLinear, wrap_linears
from worker.engine.packed_model import PackedModel
from worker.engine.rank_pool import OtherTarget, RankPool, Target

DTypeName = Literal["float32", "bfloat16"]


class ModelLoadError(Exception):
    """A folder that holds no model we can serve; the message says what is missing."""


@dataclass(frozen=True, slots=True, eq=False)
class ServedModel:
    """A model ready to run.

    `revision` names its weights and shape, for prefix cache keys. `linears` and `others` are
    the modules that adapters may change, by the names that PEFT gives them.
    """

    packed: PackedModel
    revision: str
    eos_ids: frozenset[int]
    context_tokens: int
    vocab_size: int
    kv_layout: KvLayout
    linears: Mapping[str, LoraLinear]
    others: Mapping[str, OtherTarget]
    dtype: torch.dtype
    device: torch.device

    @property
    def lora_shapes(self) -> dict[str, tuple[int, ...]]:
        """What adapters may change: see `worker.protocol.peft.validate`."""
        targets: dict[str, Target] = {**self.linears, **self.others}
        return {
            f"{name}{end}": shape
            for name, target in targets.items()
            for end, shape in target.shapes.items()
        }

    @property
    def adapter_bytes_per_rank(self) -> int:
        """Device memory of one row of the rank pool."""
        return RankPool.bytes_per_rank(self.linears, self.dtype)


def load_model(
    folder: Path, dtype: DTypeName = "bfloat16", device: str = "cpu", *, certified: bool = False
) -> ServedModel:
    """The model in `folder`. `certified` skips the probe, for a folder that passed it before.

    Raises ModelLoadError or UnsupportedArchitecture.
    """
    if not (folder / "config.json").is_file():
        raise ModelLoadError(f"{folder} holds no config.json")
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    if not certified:
        certify(config)
    context_tokens = getattr(config, "max_position_embeddings", None)
    if not context_tokens:
        raise ModelLoadError(f"{folder}/config.json states no max_position_embeddings")
    weights_dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
    model = _read_weights(folder, weights_dtype)
    packed = PackedModel(model.to(device).requires_grad_(False))
    fuse(model)
    return ServedModel(
        packed=packed,
        revision=revision(folder),
        eos_ids=eos_ids(folder),
        context_tokens=int(context_tokens),
        vocab_size=int(config.vocab_size),
        kv_layout=packed.kv_layout(int(context_tokens)),
        linears=wrap_linears(model),
        others=hook_others(model),
        dtype=weights_dtype,
        device=packed.device,
    )


def _read_weights(folder: Path, dtype: torch.dtype) -> Any:
    """The model on the CPU. What a file lacks would be random numbers, so that is an error."""
    logging.disable_progress_bar()
    model, found = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        attn_implementation="eager",
        local_files_only=True,
        output_loading_info=True,
    )
    missing = sorted(found["missing_keys"])
    if missing:
        raise ModelLoadError(
            f"{folder} lacks {len(missing)} weights of its class, {missing[0]} among them"
        )
    return model


def eos_ids(folder: Path) -> frozenset[int]:
    """Every token that ends an answer, by the generation config, the config or the tokenizer."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        if value is not None:
            found.update(value if isinstance(value, list) else [value])
    token = _read_json(folder / "tokenizer_config.json").get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if token and (folder / "tokenizer.json").is_file():
        token_id = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(token)
        found.update([] if token_id is None else [token_id])
    return frozenset(found)


def revision(folder: Path) -> str:
    """sha256 (hex) over config.json and every weight file's name, size, header and the first
    64 bytes of each tensor: cheap to read, and it tells a re-trained checkpoint apart."""
    digest = hashlib.sha256()
    config = folder / "config.json"
    for part in (config.read_bytes(), *_weight_stamps(sorted(folder.glob("*.safetensors")))):
        digest.update(struct.pack("<Q", len(part)))
        digest.update(part)
    return digest.hexdigest()


def _weight_stamps(files: Iterable[Path]) -> Iterable[bytes]:
    for path in files:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = file.read(length)
            yield f"{path.name} {path.stat().st_size}".encode()
            yield header
            for tensor in json.loads(header).values():
                if "data_offsets" in tensor:
                    file.seek(8 + length + tensor["data_offsets"][0])
                    yield file.read(64)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content: dict[str, Any] = json.loads(path.read_text())
    return content
