"""What no sampler can do is refused by name; what breaks while it runs fails alone."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.engine.driver import prompts, save_tiny_model
from tests.engine.real_engine import RealEngine
from worker.engine.certification import UnsupportedArchitecture
from worker.engine.errors import InvalidRequest
from worker.engine.model_loader import ModelLoadError, load_model
from worker.protocol.types import SamplingParams

POISON = 90  # the token whose embedding is not a number
GREEDY = SamplingParams(max_tokens=8, temperature=0)


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with one broken embedding, as a bad checkpoint has it."""
    folder = save_tiny_model(tmp_path_factory.mktemp("poisoned"))
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = math.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 0}, "n must be"),
        ({"n": 10**9}, "n must be"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"min_p": -0.5}, "min_p"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 2**70}, "top_k"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": math.inf}, "repetition_penalty"),
        ({"presence_penalty": math.nan}, "presence_penalty"),
        ({"frequency_penalty": -math.inf}, "frequency_penalty"),
        ({"logprobs": -1}, "logprobs"),
        ({"logit_bias": ((5, math.nan),)}, "logit_bias"),
    ],
)
def test_absurd_parameters_are_refused_by_name(
    poisoned: Path, changes: dict[str, object], says: str
) -> None:
    engine = RealEngine(poisoned)
    with pytest.raises(InvalidRequest, match=says):
        engine.add("bad", [5], SamplingParams(**{"max_tokens": 4, **changes}))  # type: ignore[arg-type]
    assert not engine.engine.has_work()


@pytest.mark.parametrize("prompt", [[5, 96], [-1, 5]])
def test_tokens_outside_of_the_vocabulary_are_refused(poisoned: Path, prompt: list[int]) -> None:
    engine = RealEngine(poisoned, vocabulary=96)
    with pytest.raises(InvalidRequest, match="outside of the 96"):
        engine.add("bad", prompt, GREEDY)


def test_a_request_that_meets_nan_fails_alone_and_leaves_nothing_behind(poisoned: Path) -> None:
    """Its blocks are used again by others, who must not see what it wrote."""
    asked = [[token % POISON for token in prompt] for prompt in prompts(4, longest=30)]
    clean = RealEngine(poisoned).answers({str(i): (p, GREEDY) for i, p in enumerate(asked)})
    engine = RealEngine(poisoned, num_blocks=40)
    engine.add("bad", [*asked[0], POISON, 5], GREEDY)
    engine.add("bad choices", [7, POISON], SamplingParams(max_tokens=9, n=3, temperature=1.0))
    with_bad = engine.answers({str(i): (p, GREEDY) for i, p in enumerate(asked)})
    afterwards = engine.answers({f"{i} again": (p, GREEDY) for i, p in enumerate(asked)})
    assert with_bad == clean
    assert list(afterwards.values()) == list(clean.values())
    failures = engine.failures()
    assert failures.keys() == {"bad", "bad choices"}
    assert {each.code for each in failures.values()} == {"numerical_error"}
    assert all("not finite" in each.message for each in failures.values())


def test_extreme_but_lawful_parameters_answer_or_fail_alone(poisoned: Path) -> None:
    """Divisors near 0 and penalties near infinity overflow float32."""

    def extreme(**changes: object) -> tuple[list[int], SamplingParams]:
        return [3, 4, 5], SamplingParams(**{"max_tokens": 6, **changes})  # type: ignore[arg-type]

    engine = RealEngine(poisoned)
    requests = {
        "cold": extreme(temperature=1e-40),
        "colder": extreme(temperature=1e-300),
        "hot": extreme(temperature=1e300),
        "narrow": extreme(top_p=1e-300, min_p=1.0),
        "wide": extreme(top_k=2**62),
        "plain": extreme(temperature=0),
    }
    engine.add("overflows", *extreme(repetition_penalty=1e-300))
    engine.add("overflows too", *extreme(frequency_penalty=-3e38, temperature=0))
    answers = engine.answers(requests)
    assert answers["cold"] == answers["colder"] == answers["narrow"] == answers["plain"]
    assert len(answers["hot"][0]) == len(answers["wide"][0]) == 6
    failures = engine.failures()
    assert "overflow" in failures["overflows"].message
    assert failures["overflows"].code == "numerical_error"


def test_folders_that_hold_no_servable_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no config"):
        load_model(tmp_path / "nowhere")
    bloom = save_tiny_model(tmp_path / "bloom", "bloom", n_head=4, n_layer=4)
    with pytest.raises(UnsupportedArchitecture, match=r"bloom: .*ignores the registered attention"):
        load_model(bloom)


def test_a_checkpoint_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    """Hugging Face would fill them with random numbers and warn."""
    folder = save_tiny_model(tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.o_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"lacks 1 weights .*layers\.1\.self_attn\.o_proj"):
        load_model(folder, "float32", certified=True)
