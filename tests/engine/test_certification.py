"""The probe accepts what packed execution serves exactly, and refuses the rest by name."""

import pytest
import torch
from transformers import AutoConfig

from tests.engine.architectures import SERVED
from tests.engine.driver import tiny_config
from worker.engine import certification
from worker.engine.certification import UnsupportedArchitecture, certify, shrink

# The defaults of these classes are no model: they leave out what every checkpoint states.
INCOMPLETE = {"ministral", "hunyuan_v1_dense", "nemotron", "deepseek_v2"}


@pytest.mark.full
@pytest.mark.parametrize("model_type", sorted({each.model_type for each in SERVED} - INCOMPLETE))
def test_configurations_of_full_size_shrink_and_pass(model_type):
    config = AutoConfig.for_model(model_type)
    small = shrink(config)
    assert small.num_hidden_layers <= 4
    assert small.hidden_size == 64
    certify(config)


def test_a_wrong_attention_is_noticed(monkeypatch):
    """The probe really compares: an attention that ignores the window fails it."""
    from worker.engine import attention

    real = attention.paged_attention

    def without_window(*args, window, **options):
        return real(*args, window=None, **options)

    monkeypatch.setattr(attention, "paged_attention", without_window)
    certify(tiny_config("llama"))
    with pytest.raises(UnsupportedArchitecture, match="mistral: packed logits differ"):
        certify(tiny_config("mistral"))


def test_a_layer_that_does_not_call_its_attention_once_is_noticed(monkeypatch):
    real = certification._run_packed

    def without_the_last(*args):
        logits, layers = real(*args)
        return logits, layers[:-1]

    monkeypatch.setattr(certification, "_run_packed", without_the_last)
    with pytest.raises(UnsupportedArchitecture, match=r"llama: attention was called for layers"):
        certify(tiny_config("llama"))


def test_an_encoder_is_refused():
    with pytest.raises(UnsupportedArchitecture, match="t5: no small copy could be built"):
        certify(AutoConfig.for_model("t5"))


def test_the_copy_keeps_every_kind_of_layer():
    config = tiny_config("gemma3_text", num_hidden_layers=26)
    small = shrink(config)
    assert small.num_hidden_layers == 4
    assert set(small.layer_types) == set(config.layer_types)
    assert small.hidden_size == 64
    assert small.sliding_window == 8


def test_the_probe_leaves_the_random_state_alone():
    torch.manual_seed(7)
    before = torch.get_rng_state()
    certification.certify(tiny_config("llama"))
    assert torch.equal(torch.get_rng_state(), before)
