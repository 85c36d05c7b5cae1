"""The training step's shortcuts, on a tiny random model."""

import random

import pytest
import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

pytest.importorskip("peft")

from train import RECIPES, MasterWeights, Sample, batches, collate, loss_of, shared_prefix

PREFIX = [1, 5, 9, 4]


@pytest.fixture
def samples() -> list[Sample]:
    rng = random.Random(0)
    return [
        Sample([*PREFIX, 10 + i, *(rng.randrange(30, 60) for _ in range(4 + i % 5))], 3)
        for i in range(20)
    ]


def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).train()


def plain_loss(model: LlamaForCausalLM, batch: list[Sample]) -> torch.Tensor:
    """One full sequence at a time."""
    losses = []
    for sample in batch:
        ids = torch.tensor([sample.ids])
        logits = model(ids).logits[0, -sample.answer_length - 1 : -1]
        wanted = ids[0, -sample.answer_length :]
        losses.append(functional.cross_entropy(logits, wanted, reduction="none"))
    return torch.cat(losses).mean()


def test_shared_prefix_changes_neither_loss_nor_gradient(samples: list[Sample]) -> None:
    batch = samples[:6]
    plain, quick = tiny(), tiny()
    expected = plain_loss(plain, batch)
    found = loss_of(quick.model, quick.lm_head.weight, batch, len(PREFIX))
    torch.testing.assert_close(found, expected)
    expected.backward()
    found.backward()
    for wanted, given in zip(plain.parameters(), quick.parameters(), strict=True):
        torch.testing.assert_close(given.grad, wanted.grad, rtol=1e-4, atol=1e-6)


def test_shared_prefix_is_the_longest(samples: list[Sample]) -> None:
    assert shared_prefix(samples) == len(PREFIX)


def test_batches_hold_every_sample_once(samples: list[Sample]) -> None:
    drawn = [sample for batch in batches(samples, 3, random.Random(1)) for sample in batch]
    assert sorted(s.ids for s in drawn) == sorted(s.ids for s in samples)


def test_only_answers_are_labelled(samples: list[Sample]) -> None:
    ids, labels = collate(samples[:4], len(PREFIX))
    assert (labels != -100).sum(dim=1).tolist() == [3, 3, 3, 3]
    assert torch.equal(ids[labels != -100], labels[labels != -100])


def test_small_steps_are_not_lost_in_bfloat16() -> None:
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = MasterWeights([weight], peak=1e-3, steps=40)
    for _ in range(40):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert weight.item() < 0.99


def test_recipes_have_three_ranks_and_one_is_rank_stabilised() -> None:
    assert len({recipe.rank for recipe in RECIPES.values()}) == 3
    assert [recipe.rslora for recipe in RECIPES.values()].count(True) == 1
