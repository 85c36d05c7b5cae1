"""One adapter in the engine and in PEFT: the same prompts, positions and type."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from worker.adapters.folders import FolderSource
from worker.engine.adapter_cache import AdapterCache
from worker.engine.batch import SampledToken, ScheduledBatch
from worker.engine.config import SchedulerConfig
from worker.engine.engine import Engine
from worker.engine.errors import RequestRefused
from worker.engine.model_runner import ModelRunner
from worker.engine.outputs import FailedOutput
from worker.engine.rank_pool import RankPool
from worker.protocol import peft
from worker.protocol.errors import AdapterLoadError
from worker.protocol.types import AdapterRef, RequestId, SamplingParams
from worker.runtime.build import load_tokenizer, model_folder
from worker.runtime.build_hf import load_served
from worker.runtime.errors import AdapterUnusable, ModelUnusable
from worker.settings import physical_cores

PROMPTS = (
    "The capital of France is",
    "Write one sentence about the sea.",
    "Question: a train leaves at 9:40 and arrives at 11:05. How long does it take?\nAnswer:",
    "SELECT name, total FROM orders WHERE",
    "My parcel is late and the box was open. What now?",
)
BLOCK_SIZE = 8


@dataclass(frozen=True, slots=True, eq=False)
class Answered:
    """What the engine chose after `prompt`, and from which logits [tokens, vocabulary]."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logits: Tensor


@dataclass(frozen=True, slots=True)
class Comparison:
    lines: tuple[str, ...]
    agrees: bool


def compare(
    folder: Path,
    *,
    model: str | None,
    prompts: Sequence[str],
    tokens: int,
    tolerance: float,
    threads: int | None,
) -> Comparison:
    """Raises ModelUnusable, AdapterUnusable."""
    disable_progress_bar()
    torch.set_num_threads(threads or physical_cores())
    base = model_folder(model or _named(folder))
    tokenizer = load_tokenizer(base)
    texts = tuple(prompts) or PROMPTS
    ids = [tuple(tokenizer.encode(text).ids) for text in texts]
    if empty := [text for text, each in zip(texts, ids, strict=True) if not each]:
        raise AdapterUnusable(f"the prompt {empty[0]!r} has no tokens")
    adapted, plain = _answer(base, folder, ids, tokens)
    references = _reference(base, folder, adapted)
    rows = [
        _row(text, ours, theirs, other, tolerance)
        for text, ours, theirs, other in zip(texts, adapted, references, plain, strict=True)
    ]
    return _report(rows, tolerance)


def _named(folder: Path) -> str:
    try:
        base = json.loads((folder / peft.CONFIG_FILE).read_bytes())["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        base = None
    if not isinstance(base, str):
        raise ModelUnusable(f"{folder} names no base model: give --model")
    return base


class _Recorder:
    """A runner that keeps every logit it chooses from, and chooses the largest."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.logits: dict[str, list[Tensor]] = {}

    def execute(self, batch: ScheduledBatch) -> list[SampledToken]:
        self.runner.cache.copy(batch.block_copies)
        if not batch.sequences:
            return []
        rows = self.runner.logits(batch).cpu()
        sampling = [each.sequence for each in batch.sequences if each.samples]
        for sequence, row in zip(sampling, rows, strict=True):
            self.logits.setdefault(sequence.request_id, []).append(row)
        return [SampledToken(int(row.argmax())) for row in rows]


def _answer(
    base: Path, folder: Path, prompts: Sequence[tuple[int, ...]], tokens: int
) -> tuple[list[Answered], list[Answered]]:
    """Every prompt with the adapter and without, mixed in the same steps."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_served(base, "float32", device)
    source = FolderSource()
    ref = _load(source, folder)
    pool = RankPool(model.linears, max(ref.rank, 1), model.dtype, model.device, model.others)
    adapters = AdapterCache(pool, source.for_model(model.lora_shapes), extra_memory=1 << 40)
    windows = model.kv_layout.windows
    blocks = sum(-(-(len(prompt) + tokens) // BLOCK_SIZE) + 1 for prompt in prompts)
    blocks *= 4 * len(windows)  # with and without the adapter, and half of the pool is to spare
    recorder = _Recorder(ModelRunner(model, blocks, BLOCK_SIZE, adapters))
    config = SchedulerConfig(
        num_blocks=blocks,
        windows=windows,
        block_size=BLOCK_SIZE,
        adapter_rank=pool.rank,
        context_tokens=model.context_tokens,
    )
    tokenizer = load_tokenizer(base)
    engine = Engine(config, recorder, adapters, tokenizer, frozenset(), model.revision)
    sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    kinds: dict[str, AdapterRef | None] = {"adapted": ref, "plain": None}
    try:
        for name, adapter in kinds.items():
            for number, prompt in enumerate(prompts):
                request_id = RequestId(f"{name}-{number}")
                engine.add(request_id, prompt, sampling, adapter=adapter, stream=False)
        _run(engine, folder)
    except RequestRefused as error:
        raise AdapterUnusable(f"a prompt is refused: {error}") from error
    finally:
        adapters.close()
    adapted, plain = (
        [_answered(prompt, recorder.logits[f"{name}-{n}"]) for n, prompt in enumerate(prompts)]
        for name in kinds
    )
    return adapted, plain


def _load(source: FolderSource, folder: Path) -> AdapterRef:
    try:
        return source.add(folder)
    except AdapterLoadError as error:
        raise AdapterUnusable(f"refused: {error}") from error


def _run(engine: Engine, folder: Path) -> None:
    while engine.has_work():
        for output in engine.step():
            if isinstance(output, FailedOutput):
                raise AdapterUnusable(f"{folder} is refused: {output.message}")
        if engine.stalled:
            time.sleep(0.002)


def _answered(prompt: tuple[int, ...], rows: list[Tensor]) -> Answered:
    logits = torch.stack(rows)
    return Answered(prompt, tuple(logits.argmax(1).tolist()), logits)


@torch.inference_mode()
def _reference(base: Path, folder: Path, answers: Sequence[Answered]) -> list[Tensor]:
    """PEFT's logits at the same positions, computed at once and without any cache."""
    from peft import PeftModel

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tuned: Any = PeftModel.from_pretrained(model, folder).to(device).eval()
    logits = []
    for answer in answers:
        ids = torch.tensor([[*answer.prompt, *answer.tokens[:-1]]], device=device)
        logits.append(tuned(input_ids=ids).logits[0, len(answer.prompt) - 1 :].float().cpu())
    return logits


@dataclass(frozen=True, slots=True)
class _Row:
    text: str
    error: float
    same: int
    tokens: int
    effect: float
    within: bool


def _row(text: str, ours: Answered, theirs: Tensor, plain: Answered, tolerance: float) -> _Row:
    """`effect` is how far the adapter moves the logits of the first answer token."""
    error = float(((ours.logits - theirs).norm(dim=1) / theirs.norm(dim=1)).max())
    same = int((theirs.argmax(1) == ours.logits.argmax(1)).sum())
    effect = float((plain.logits[0] - theirs[0]).norm() / theirs[0].norm())
    return _Row(text, error, same, len(ours.tokens), effect, error <= tolerance)


def _report(rows: Sequence[_Row], tolerance: float) -> Comparison:
    agrees = all(row.within and row.same == row.tokens for row in rows)
    return Comparison(tuple(_lines(rows, tolerance, agrees)), agrees)


def _lines(rows: Sequence[_Row], tolerance: float, agrees: bool) -> Iterator[str]:
    yield "relative error  same tokens  adapter's effect  prompt"
    for row in rows:
        text = row.text if len(row.text) <= 40 else f"{row.text[:39]}…"
        yield (
            f"{row.error:14.2e}  {row.same:>5}/{row.tokens:<5}  {row.effect:16.2e}  "
            f"{text.replace(chr(10), ' ')}"
        )
    worst = max(row.error for row in rows)
    verdict = "equal to PEFT" if agrees else "NOT equal to PEFT"
    yield f"{verdict}: largest relative error {worst:.2e} (tolerance {tolerance:.0e})"
    if max(row.effect for row in rows) == 0:
        yield "the adapter changes nothing: its answers are the base model's"
