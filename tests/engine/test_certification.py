"""The probe accepts what packed execution serves exactly, and refuses the rest by name."""

import pytest
import torch

from tests.engine.driver import ARCHITECTURES, tiny_config
from worker.engine import certification
from worker.engine.certification import UnsupportedArchitecture, certify, shrink

MORE = {
    "phi3": {"sliding_window": 8},
    "gemma3_text": {"sliding_window": 8},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "decoder_sparse_step": 1,
    },
    "gpt_neox": {},
    "olmo2": {},
    "smollm3": {},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "first_k_dense_replace": 1,
        "head_dim": None,
    },
}


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_architectures_that_are_served(model_type):
    certify(tiny_config(model_type))


@pytest.mark.full
@pytest.mark.parametrize("model_type", MORE)
def test_more_architectures_that_are_served(model_type):
    certify(tiny_config(model_type, **MORE[model_type]))


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("falcon", {"alibi": False, "head_dim": None}, "ignores the registered attention"),
        ("bloom", {"n_head": 4, "n_layer": 4}, "ignores the registered attention"),
        ("mpt", {"d_model": 64, "n_heads": 4, "n_layers": 4}, "ignores the registered attention"),
        (
            "llama4_text",
            {"num_local_experts": 4, "intermediate_size_mlp": 96, "attention_chunk_size": 8},
            "packed logits differ",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "dynamic RoPE",
        ),
        (
            "phi3",
            {
                "original_max_position_embeddings": 24,
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "original_max_position_embeddings": 24,
                    "short_factor": [1.0] * 8,
                    "long_factor": [4.0] * 8,
                },
            },
            "longrope RoPE",
        ),
    ],
)
def test_architectures_that_are_refused(model_type, changes, reason):
    config = tiny_config(model_type, **changes)
    with pytest.raises(UnsupportedArchitecture, match=f"{model_type}: .*{reason}"):
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
