"""Which files of an adapter's folder are kept, which are refused, and which say nothing.

kept       what decides the adapter's numbers or its prompts
refused    weights beside adapter_model.safetensors, which would have to be ignored
skipped    all else: README.md, optimizer states, training arguments. Never opened
"""

from __future__ import annotations

from pathlib import Path

from gateway.adapters import prompt_files
from worker.protocol.peft import CONFIG_FILE, WEIGHTS_FILE

PICKLE = "adapter_model.bin"
KEPT = (CONFIG_FILE, WEIGHTS_FILE, PICKLE, *prompt_files.FILES, *prompt_files.SLOW_FILES)


def missing_from(folder: Path) -> list[str]:
    """The files without which it holds no adapter."""
    return [name for name in (CONFIG_FILE, WEIGHTS_FILE) if not (folder / name).is_file()]


def is_kept(name: str) -> bool:
    return name in KEPT


def is_refused(name: str) -> bool:
    return name.endswith(".safetensors") and name != WEIGHTS_FILE


def refusal(name: str) -> str:
    return (
        f"{name} would have to be ignored: only {WEIGHTS_FILE} is served. Save the adapter alone, "
        "with PEFT's save_pretrained"
    )
