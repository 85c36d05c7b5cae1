"""Where the demo base model is, and how training and evaluation load and prompt it."""

import os
from pathlib import Path
from typing import Any

import torch
from smollm2 import is_complete
from tasks import Task
from transformers import AutoModelForCausalLM, AutoTokenizer

ADAPTERS = Path(__file__).parent / "adapters"
CACHED_MODEL = Path(__file__).parent.parent / ".cache" / "smollm2-135m-instruct"


def model_folder(given: Path | None) -> Path:
    """The folder asked for, or BATTEN_MODEL, or the one smollm2.py makes."""
    named = os.environ.get("BATTEN_MODEL")
    folder = given or (Path(named) if named else CACHED_MODEL)
    if not (given or named) and not is_complete(folder):
        raise SystemExit(f"no model at {folder}; run: python examples/smollm2.py {folder}")
    if not (folder / "config.json").is_file():
        raise SystemExit(f"no model at {folder}: name its folder with --model or BATTEN_MODEL")
    return folder


def load(folder: Path) -> tuple[Any, Any]:
    """The bfloat16 base model and its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # Eager attention is the faster one here: the sequences are short and the processor a CPU.
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="eager"
    )
    return model, tokenizer


def prompt_ids(tokenizer: Any, task: Task, user: str) -> list[int]:
    """The tokens a chat request is turned into, up to where the answer starts."""
    text = tokenizer.apply_chat_template(
        task.messages(user), tokenize=False, add_generation_prompt=True
    )
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
