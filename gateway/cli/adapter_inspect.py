"""What a PEFT folder holds and whether it is served exactly, without a server and without torch."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.adapters.archive import ArchiveRefused, is_archive, unpack
from gateway.adapters.base_models import BaseModelUnavailable, model_shapes
from gateway.adapters.checking import CheckedAdapter, PromptBase, check
from gateway.adapters.folder_files import missing_from
from gateway.cli.errors import CommandError
from gateway.settings import Settings
from worker.protocol import peft

# Fields of LoraConfig that change what an adapter computes, beside r, alpha and target_modules.
FEATURES = (
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "fan_in_fan_out",
    "use_dora",
    "lora_bias",
    "bias",
    "modules_to_save",
    "trainable_token_indices",
    "target_parameters",
    "alora_invocation_tokens",
    "ensure_weight_tying",
    "layer_replication",
    "arrow_config",
    "use_qalora",
    "use_bdlora",
    "kasa_config",
    "monteclora_config",
    "corda_config",
)
_UNUSED: tuple[Any, ...] = (None, False, [], {}, "", "none")
_SIZES = {"r": "r", "alpha": "lora_alpha"}
_LONGEST = 100


@dataclass(frozen=True, slots=True)
class Inspection:
    """`problems` are all reasons why the adapter is refused; none: it is served exactly, as far
    as it was checked."""

    lines: tuple[str, ...]
    problems: tuple[peft.Problem, ...]


def inspect(
    path: Path, model: str | None, most_rank: int | None, most_bytes: int = peft.MAX_BYTES
) -> Inspection:
    """`path` is a folder or an archive of one; `model` a local folder or a hub id, by default
    what the adapter's config names if that is a folder here. Raises CommandError."""
    with _folder(path, most_bytes) as folder:
        fields = _fields(path, folder)
        source = model or _local(fields.get("base_model_name_or_path"))
        shapes = _shapes(source) if source else None
        outcome = check(folder, shapes, most_rank, most_bytes, _prompts(source))
        problems = () if isinstance(outcome, CheckedAdapter) else tuple(outcome)
        lines = [*_about(path, fields, source), *_content(folder)]
        if isinstance(outcome, CheckedAdapter):
            if outcome.prompt_format is not None:
                lines.append("prompts    its own chat template or special tokens")
            lines.append(f"digest     {outcome.digest}")
    return Inspection((*lines, *_verdict(problems, source)), problems)


@contextmanager
def _folder(path: Path, most_bytes: int) -> Iterator[Path]:
    if path.is_dir():
        yield path
        return
    if not is_archive(path.name):
        raise CommandError(f"{path} is neither a folder nor a .zip or .tar.gz")
    with tempfile.TemporaryDirectory(prefix="batten-inspect-") as temporary:
        try:
            unpack(path, Path(temporary), most_bytes)
        except ArchiveRefused as error:
            raise CommandError(f"{path}: {error}") from error
        yield Path(temporary)


def _fields(path: Path, folder: Path) -> Mapping[str, Any]:
    """Raises CommandError where there is no adapter to say anything about."""
    missing = missing_from(folder)
    if peft.CONFIG_FILE in missing:
        raise CommandError(f"{path} holds no {' and no '.join(missing)}: not a PEFT folder")
    try:
        fields = json.loads((folder / peft.CONFIG_FILE).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CommandError(f"{path}: {peft.CONFIG_FILE} cannot be read as JSON: {error}") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("peft_type"), str):
        raise CommandError(f"{path}: {peft.CONFIG_FILE} names no peft_type: not a PEFT adapter's")
    return fields


def _local(base: object) -> str | None:
    return base if isinstance(base, str) and Path(base).expanduser().is_dir() else None


def _shapes(source: str) -> peft.Shapes:
    try:
        return model_shapes(source)
    except BaseModelUnavailable as error:
        raise CommandError(str(error)) from error


def _prompts(source: str | None) -> PromptBase | None:
    """The base model's tokenizer, where it is a folder with one."""
    folder = Path(source or "").expanduser()
    has_tokenizer = source is not None and (folder / "tokenizer.json").is_file()
    chars = Settings.model_fields["template_chars"].default
    return PromptBase(str(folder), chars) if has_tokenizer else None


def _about(path: Path, fields: Mapping[str, Any], source: str | None) -> Iterator[str]:
    yield f"adapter    {path}"
    yield f"base       {fields.get('base_model_name_or_path') or 'unknown'}"
    yield f"checked on {source or 'no base model: name one with --model'}"
    yield f"peft       {fields['peft_type']}, version {fields.get('peft_version', 'unknown')}"
    sizes = [f"{word} {fields[name]}" for word, name in _SIZES.items() if name in fields]
    if sizes:
        yield f"rank       {', '.join(sizes)}"
    if "target_modules" in fields:
        yield f"targets    {_short(fields['target_modules'])}"
    used = [name for name in FEATURES if fields.get(name) not in _UNUSED]
    if isinstance(fields.get("init_lora_weights"), str):
        used.append("init_lora_weights")
    yield "features" if used else "features   none beyond plain LoRA"
    for name in used:
        yield f"    {name} = {_short(fields[name])}"


def _short(value: object) -> str:
    shown = json.dumps(sorted(value) if isinstance(value, list) else value, default=str)
    return shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST - 1]}…"


def _content(folder: Path) -> Iterator[str]:
    """Size, types, and one line for all modules of a name with the same rank, scale and parts."""
    try:
        header = peft.read_header(folder / peft.WEIGHTS_FILE)
    except (OSError, peft.SafetensorsError):
        return
    types = Counter(tensor.dtype for tensor in header.tensors.values())
    kinds = ", ".join(f"{count} {dtype}" for dtype, count in sorted(types.items()))
    yield f"size       {header.size / 2**20:.1f} MiB, {len(header.tensors)} tensors ({kinds})"
    try:
        config = peft.parse_config((folder / peft.CONFIG_FILE).read_bytes())
    except (OSError, peft.AdapterConfigError):
        return
    adapted = set(peft.adapter_modules(config, header))
    groups: Counter[tuple[str, int | None, str, str]] = Counter()
    for module, keys in peft.adapter_parts(config, header).items():
        has_rank = module in adapted
        rank = config.rank(module) if has_rank else None
        scale = f"{config.scale(module):.4g}" if has_rank else "-"
        groups[module.rpartition(".")[2], rank, scale, ", ".join(sorted(keys))] += 1
    yield "modules    name                 count  rank  scale    tensors"
    for (name, rank, scale, parts), count in sorted(groups.items(), key=str):
        yield f"           {name:<20} {count:>5} {rank or '-':>5}  {scale:<8} {parts}"


def _verdict(problems: tuple[peft.Problem, ...], source: str | None) -> Iterator[str]:
    if problems:
        yield f"served     no, for {len(problems)} reasons:" if problems[1:] else "served     no:"
        for problem in problems:
            yield f"    {problem.code}: {problem.name}: {problem.message}"
    elif source is None:
        yield "served     nothing is refused by itself; not compared with a base model"
    else:
        yield "served     yes, exactly"
