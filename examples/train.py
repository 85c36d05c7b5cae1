"""Train one task's LoRA adapter with PEFT, on a CPU, in a few minutes.

python examples/train.py TASK [--model DIR] [--out DIR]
"""

import argparse
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from base_model import ADAPTERS, load, model_folder, prompt_ids
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from smollm2 import EOS, MODEL_ID
from tasks import TASKS, Task
from torch.nn import functional
from torch.optim.lr_scheduler import OneCycleLR
from transformers import DynamicCache

TRAIN_SEED = 1
IGNORED = -100
BUCKET_BATCHES = 8
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Recipe:
    """What is trained, and for how long."""

    rank: int
    alpha: int
    targets: tuple[str, ...]
    rslora: bool = False
    examples: int = 800
    batch: int = 8
    learning_rate: float = 2e-3


RECIPES = {
    "triage": Recipe(rank=8, alpha=16, targets=ATTENTION + MLP),
    "products": Recipe(rank=16, alpha=8, targets=ATTENTION, rslora=True, examples=1200),
    "sql": Recipe(
        rank=12, alpha=24, targets=("q_proj", "v_proj", "up_proj", "down_proj"), examples=1200
    ),
}


@dataclass(frozen=True)
class Sample:
    """One example's tokens; the answer is the last ``answer_length`` of them."""

    ids: list[int]
    answer_length: int


def encode(tokenizer: Any, task: Task, count: int) -> list[Sample]:
    samples = []
    for example in task.generate(count, TRAIN_SEED):
        answer = tokenizer(example.answer + EOS, add_special_tokens=False)["input_ids"]
        samples.append(Sample(prompt_ids(tokenizer, task, example.user) + answer, len(answer)))
    return samples


def shared_prefix(samples: list[Sample]) -> int:
    """How many leading tokens all samples have in common: the system prompt's."""
    low, high = min(s.ids for s in samples), max(s.ids for s in samples)
    pairs = enumerate(zip(low, high, strict=False))
    return next(index for index, (a, b) in pairs if a != b)


def batches(samples: list[Sample], size: int, rng: random.Random) -> Iterator[list[Sample]]:
    """Shuffled batches of samples of about equal length, so that little is padded."""
    order = rng.sample(samples, len(samples))
    chunk = size * BUCKET_BATCHES
    for start in range(0, len(order), chunk):
        bucket = sorted(order[start : start + chunk], key=lambda s: len(s.ids))
        groups = [bucket[i : i + size] for i in range(0, len(bucket), size)]
        yield from rng.sample(groups, len(groups))


def collate(batch: list[Sample], prefix: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded tokens after the prefix, and the same with only the answers kept."""
    width = max(len(s.ids) for s in batch) - prefix
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    labels = torch.full((len(batch), width), IGNORED)
    for row, sample in enumerate(batch):
        tokens = torch.tensor(sample.ids[prefix:])
        ids[row, : len(tokens)] = tokens
        start = len(tokens) - sample.answer_length
        labels[row, start : len(tokens)] = tokens[start:]
    return ids, labels


def loss_of(model: Any, head: torch.Tensor, batch: list[Sample], prefix: int) -> torch.Tensor:
    """Mean loss over the answers' tokens.

    The prefix runs once for the whole batch, and only answer positions reach the vocabulary:
    together that halves the time of a step.
    """
    ids, labels = collate(batch, prefix)
    once = DynamicCache()
    model(torch.tensor([batch[0].ids[:prefix]]), cache=once, use_cache=True)
    shared = DynamicCache()
    layers: list[Any] = once.layers
    for index, layer in enumerate(layers):
        shape = (len(batch), -1, -1, -1)
        shared.update(layer.keys.expand(shape), layer.values.expand(shape), index)
    hidden = model(ids, cache=shared, use_cache=True).last_hidden_state
    wanted = labels[:, 1:]
    kept = hidden[:, :-1][wanted != IGNORED]
    return functional.cross_entropy(
        functional.linear(kept, head).float(), wanted[wanted != IGNORED]
    )


class MasterWeights:
    """AdamW on float32 copies of bfloat16 weights, which alone are too coarse to step."""

    def __init__(self, weights: list[torch.nn.Parameter], peak: float, steps: int) -> None:
        self._weights = weights
        self._masters = [torch.nn.Parameter(w.detach().float()) for w in weights]
        self._optimizer = torch.optim.AdamW(self._masters, lr=peak, weight_decay=0.0)
        self._schedule = OneCycleLR(
            self._optimizer, peak, total_steps=steps, pct_start=0.1, cycle_momentum=False
        )

    def step(self) -> None:
        for weight, master in zip(self._weights, self._masters, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        torch.nn.utils.clip_grad_norm_(self._masters, 1.0)
        self._optimizer.step()
        self._schedule.step()
        with torch.no_grad():
            for weight, master in zip(self._weights, self._masters, strict=True):
                weight.copy_(master)


def with_lora(base: Any, recipe: Recipe) -> Any:
    config = LoraConfig(
        r=recipe.rank,
        lora_alpha=recipe.alpha,
        target_modules=list(recipe.targets),
        use_rslora=recipe.rslora,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, config, autocast_adapter_dtype=False)
    for weight in lora_weights(model):
        weight.data = weight.data.bfloat16()
    return model


def lora_weights(model: Any) -> list[torch.nn.Parameter]:
    return [weight for weight in model.parameters() if weight.requires_grad]


def fit(model: Any, samples: list[Sample], recipe: Recipe) -> None:
    """One pass over the samples."""
    prefix = shared_prefix(samples)
    todo = list(batches(samples, recipe.batch, random.Random(TRAIN_SEED)))
    optimizer = MasterWeights(lora_weights(model), recipe.learning_rate, len(todo))
    inner, head = model.base_model.model.model, model.base_model.model.lm_head.weight
    model.train()
    start, recent = time.monotonic(), 0.0
    for number, batch in enumerate(todo, start=1):
        loss: Any = loss_of(inner, head, batch, prefix)
        loss.backward()
        optimizer.step()
        recent = loss.item() if number == 1 else 0.9 * recent + 0.1 * loss.item()
        if number % 10 == 0 or number == len(todo):
            seconds = time.monotonic() - start
            print(f"step {number}/{len(todo)}  loss {recent:.4f}  {seconds:.0f} s", flush=True)


def save(model: Any, name: str, recipe: Recipe, out: Path) -> None:
    """Write PEFT's two files, the tensors in bfloat16, and a model card."""
    model.peft_config["default"].base_model_name_or_path = MODEL_ID
    # Without the flag PEFT asks the model hub whether the vocabulary was resized.
    model.save_pretrained(out, save_embedding_layers=False)
    path = out / "adapter_model.safetensors"
    tensors = {key: value.bfloat16() for key, value in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)
    sort_targets(out / "adapter_config.json")
    (out / "README.md").write_text(card(name, recipe))
    print(f"saved {out} ({path.stat().st_size / 1e6:.2f} MB)")


def sort_targets(path: Path) -> None:
    """PEFT writes a set, in another order each time; training twice should give one file."""
    config = json.loads(path.read_text())
    config["target_modules"].sort()
    path.write_text(json.dumps(config, indent=2) + "\n")


def card(name: str, recipe: Recipe) -> str:
    targets = ", ".join(recipe.targets)
    return f"""---
base_model: {MODEL_ID}
library_name: peft
pipeline_tag: text-generation
license: apache-2.0
tags: [lora]
---

# {name}

A LoRA adapter for {MODEL_ID}, trained on {recipe.examples} generated examples.
The task is `examples/tasks/{name}.py`: {TASKS[name].SYSTEM.split(". ")[0]}.

- rank {recipe.rank}, alpha {recipe.alpha}{", rank-stabilised scaling" if recipe.rslora else ""}
- modules: {targets}
- tensors in bfloat16

Held-out accuracy is in `../scores.json`. Retrain with `python examples/train.py {name}`.
"""


def train(name: str, model_dir: Path, out: Path) -> None:
    torch.manual_seed(TRAIN_SEED)
    recipe = RECIPES[name]
    base, tokenizer = load(model_dir)
    samples = encode(tokenizer, TASKS[name], recipe.examples)
    model = with_lora(base, recipe)
    fit(model, samples, recipe)
    save(model, name, recipe, out)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train one task's LoRA adapter.")
    parser.add_argument("task", choices=sorted(TASKS))
    parser.add_argument("--model", type=Path, help="base model folder")
    parser.add_argument("--out", type=Path, help="adapter folder to write")
    args = parser.parse_args()
    train(args.task, model_folder(args.model), args.out or ADAPTERS / args.task)


if __name__ == "__main__":
    main()
