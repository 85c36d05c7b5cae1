"""Held-out accuracy of the base model and of each adapter, with PEFT and greedy decoding.

    python examples/evaluate.py [TASK ...] [--n 100] [--model DIR] [--adapters DIR] [--show 3]

Writes scores.json next to the adapters, keeping the scores of tasks not asked for.
"""

import argparse
import json
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from base_model import ADAPTERS, load, model_folder, prompt_ids
from peft import PeftModel
from smollm2 import EOS
from tasks import HELD_OUT_SEED, TASKS, Example, Task

BATCH = 50


def complete(model: Any, tokenizer: Any, prompts: list[list[int]], limit: int) -> list[str]:
    """Greedy completions of the prompts, as one left-padded batch."""
    width = max(len(ids) for ids in prompts)
    pad = tokenizer.pad_token_id
    rows = [[pad] * (width - len(ids)) + ids for ids in prompts]
    mask = [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]
    with torch.inference_mode():
        output = model.generate(
            input_ids=torch.tensor(rows),
            attention_mask=torch.tensor(mask),
            max_new_tokens=limit,
            do_sample=False,
        )
    texts: list[str] = tokenizer.batch_decode(output[:, width:])
    return [text.split(EOS)[0] for text in texts]


def accuracy(model: Any, tokenizer: Any, task: Task, examples: list[Example], show: int) -> float:
    """The share of examples answered exactly right; prints the first ``show`` wrong ones."""
    wrong = 0
    for start in range(0, len(examples), BATCH):
        batch = examples[start : start + BATCH]
        prompts = [prompt_ids(tokenizer, task, example.user) for example in batch]
        texts = complete(model, tokenizer, prompts, task.MAX_TOKENS)
        for example, text in zip(batch, texts, strict=True):
            if not task.score(text, example.answer):
                wrong += 1
                if wrong <= show:
                    print(f"  asked  {example.user}\n  wanted {example.answer}\n  got    {text}")
    return round(1 - wrong / len(examples), 4)


def evaluate(name: str, model_dir: Path, adapter: Path, n: int, show: int) -> dict[str, Any]:
    task = TASKS[name]
    examples = task.generate(n, HELD_OUT_SEED, heldout=True)
    base, tokenizer = load(model_dir)
    model = PeftModel.from_pretrained(base, adapter, autocast_adapter_dtype=False).eval()
    scores: dict[str, Any] = {"n": n}
    for label in ("base", "adapter"):
        start = time.monotonic()
        with model.disable_adapter() if label == "base" else nullcontext():
            scores[label] = accuracy(model, tokenizer, task, examples, show)
        seconds = time.monotonic() - start
        print(f"{name}: {label} {scores[label]:.1%} of {n} ({seconds:.0f} s)", flush=True)
    return scores


def record(path: Path, scores: dict[str, dict[str, Any]]) -> None:
    """Merge the scores into the file."""
    old = json.loads(path.read_text())["tasks"] if path.exists() else {}
    tasks = {name: {**old, **scores}[name] for name in TASKS if name in {**old, **scores}}
    content = {
        "metric": "exact answers on held-out examples",
        "decoding": "greedy",
        "dtype": "bfloat16",
        "seed": HELD_OUT_SEED,
        "tasks": tasks,
    }
    path.write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Held-out accuracy of base and adapters.")
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"of {', '.join(TASKS)}")
    parser.add_argument("--n", type=int, default=100, help="held-out examples per task")
    parser.add_argument("--model", type=Path, help="base model folder")
    parser.add_argument("--adapters", type=Path, default=ADAPTERS, help="folder of adapters")
    parser.add_argument("--show", type=int, default=0, help="wrong answers to print")
    args = parser.parse_args()
    unknown = set(args.tasks) - set(TASKS)
    if unknown:
        parser.error(f"no task {', '.join(sorted(unknown))}; there are {', '.join(TASKS)}")
    model_dir = model_folder(args.model)
    for name in args.tasks or TASKS:
        scores = evaluate(name, model_dir, args.adapters / name, args.n, args.show)
        record(args.adapters / "scores.json", {name: scores})


if __name__ == "__main__":
    main()
