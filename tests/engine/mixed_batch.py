"""Adapters and the base in one batch, against PEFT."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from tests.engine.driver import hf_greedy, hf_model, prompts, sequence
from tests.engine.peft_adapters import peft_model, upload_problems
from tests.engine.test_peft_parity import serve
from worker.engine.batch import ScheduledBatch
from worker.protocol.types import AdapterRef


def check_equals_peft(
    base: Path, folders: Mapping[AdapterRef, Path], rank: int, num_blocks: int
) -> None:
    """Logits within 1e-5 and greedy tokens, for every adapter of `folders` and the base before and
    after them; each adapter changes something, and the check at upload takes it."""
    runner, driver = serve(base, folders, rank, num_blocks=num_blocks, block_size=4)
    refs = [None, *folders, None]
    items = [sequence(prompt, ref) for prompt, ref in zip(prompts(len(refs)), refs, strict=True)]
    got = runner.logits(
        ScheduledBatch(tuple(driver.schedule(item, item.num_tokens) for item in items))
    )
    driver.run(items, tokens=5)
    assert [upload_problems(base, folder) for folder in folders.values()] == [[]] * len(folders)
    plain = hf_model(base)
    for row, item in zip(got, items, strict=True):
        reference = peft_model(base, folders[item.adapter]) if item.adapter else plain
        with torch.inference_mode():
            ids = torch.tensor([item.prompt_ids])
            want, unchanged = reference(input_ids=ids).logits[0, -1], plain(ids).logits[0, -1]
        assert (row - want).norm() <= 1e-5 * want.norm(), item.adapter
        assert item.adapter is None or (unchanged - want).norm() > 1e-3 * want.norm()
        assert item.output_ids == hf_greedy(reference, item.prompt_ids, 5), item.adapter
