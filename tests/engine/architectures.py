"""Every architecture that is served, and those that are refused, as small configurations.

`docs/models.md` shows them as a table (`tests.engine.models_document`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": None,
}
ROUTED = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
HYBRID = ["sliding_attention", "full_attention", "sliding_attention"]
ROPE = {"rope_theta": 1e4, "original_max_position_embeddings": 24}


@dataclass(frozen=True)
class Served:
    """`changes` are made to the small configuration; `fast` ones are in every test run."""

    model_type: str
    features: str
    changes: Mapping[str, object] = field(default_factory=dict)
    variant: str = ""
    fast: bool = False

    @property
    def name(self) -> str:
        return f"{self.model_type} {self.variant}".strip()


@dataclass(frozen=True)
class Refused:
    """`error` is part of what the refusal says; `why` explains it to a reader."""

    model_type: str
    error: str
    why: str
    changes: Mapping[str, object] = field(default_factory=dict)
    variant: str = ""

    @property
    def name(self) -> str:
        return f"{self.model_type} {self.variant}".strip()


def _rope(kind: str, **options: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": kind, **ROPE, **options}}


SERVED = (
    Served("llama", "grouped queries", fast=True),
    Served(
        "llama",
        "RoPE scaled by frequency bands",
        _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0),
        variant="llama3 RoPE",
        fast=True,
    ),
    Served("llama", "YaRN", _rope("yarn", factor=4.0), variant="yarn RoPE", fast=True),
    Served("llama", "linear RoPE", _rope("linear", factor=4.0), variant="linear RoPE"),
    Served("mistral", "sliding window", {"sliding_window": 8}, fast=True),
    Served("ministral", "windows in some layers", {"sliding_window": 8, "layer_types": HYBRID}),
    Served(
        "qwen2",
        "biases; windows in upper layers",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        fast=True,
    ),
    Served("qwen3", "norms of queries and keys; tied", {"tie_word_embeddings": True}, fast=True),
    Served("phi", "part of a head rotated; parallel blocks", {"num_key_value_heads": 4}),
    Served("phi3", "fused projections; window", {"sliding_window": 8}),
    Served("gemma", "scaled embeddings"),
    Served(
        "gemma2",
        "alternating windows; soft caps on scores and logits",
        {
            "sliding_window": 8,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 30.0,
            "query_pre_attn_scalar": 16,
        },
        fast=True,
    ),
    Served("gemma3_text", "windows with a RoPE of their own", {"sliding_window": 8}),
    Served(
        "gemma3n_text",
        "layers that share keys and values; alternating updates",
        {
            "sliding_window": 8,
            "num_hidden_layers": 4,
            "layer_types": HYBRID[:2] * 2,
            "num_kv_shared_layers": 2,
            "laurel_rank": 8,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 96,
            "activation_sparsity_pattern": [0.0] * 4,
        },
    ),
    Served(
        "gemma4_text",
        "embeddings for each layer; windows",
        {
            "sliding_window": 8,
            "num_hidden_layers": 4,
            "layer_types": HYBRID[:2] * 2,
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 96,
        },
    ),
    Served("vaultgemma", "soft caps; windows", {"sliding_window": 8}),
    Served("olmo", "norms without weights"),
    Served("olmo2", "norms after each block"),
    Served("olmo3", "norms after each block; windows", {"sliding_window": 8}),
    Served("cohere", "parallel blocks; scaled logits", {"use_qk_norm": True}),
    Served(
        "cohere2",
        "windows with RoPE, full layers without",
        {"sliding_window": 8, "layer_types": HYBRID},
    ),
    Served(
        "granite",
        "multipliers on embeddings, residuals, scores and logits",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    ),
    Served("smollm3", "layers without RoPE", {"no_rope_layers": [1, 1, 0]}),
    Served("starcoder2", "biases; window", {"sliding_window": 8}),
    Served("glm", "part of a head rotated"),
    Served("glm4", "four norms a layer"),
    Served("gpt2", "learned positions; Conv1D", {"n_inner": 96}, fast=True),
    Served("gpt_neox", "fused projections; parallel blocks", {"num_key_value_heads": None}),
    Served("gptj", "interleaved RoPE", {"rotary_dim": 8}),
    Served("gpt_bigcode", "one key for all heads", {"num_key_value_heads": None}),
    Served("opt", "learned positions", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    Served("stablelm", "part of a head rotated", {"head_dim": None}),
    Served("helium", "interleaved RoPE"),
    Served("arcee", "squared ReLU"),
    Served("apertus", "norms of queries and keys; its own activation"),
    Served("nanochat", "soft cap on logits; norms without weights"),
    Served("seed_oss", "biases"),
    Served("ernie4_5", "interleaved RoPE"),
    Served(
        "exaone4",
        "windows; full layers without RoPE",
        {"sliding_window": 8, "layer_types": HYBRID, "sliding_window_pattern": None},
    ),
    Served("nemotron", "norms with a bias; squared ReLU"),
    Served("persimmon", "squared ReLU; fused projections", {"num_key_value_heads": None}),
    Served("hunyuan_v1_dense", "norms of queries and keys"),
    Served("mixtral", "experts", {"num_local_experts": 4, "sliding_window": 8}),
    Served("qwen2_moe", "experts, and one for all", {**EXPERTS, "decoder_sparse_step": 1}),
    Served("qwen3_moe", "experts", {**EXPERTS, "decoder_sparse_step": 1}),
    Served("olmoe", "experts", {"num_experts": 4, "num_experts_per_tok": 2}),
    Served("granitemoe", "experts; multipliers", {"num_local_experts": 4}),
    Served("phimoe", "experts", {"num_local_experts": 4}),
    Served("glm4_moe", "grouped experts", {**ROUTED, "moe_intermediate_size": 32}),
    Served(
        "gpt_oss",
        "sinks; alternating windows; experts",
        {"sliding_window": 8, "num_local_experts": 4, "layer_types": HYBRID},
        fast=True,
    ),
    Served(
        "deepseek_v2",
        "latent attention; grouped experts",
        {**MLA, **ROUTED, "moe_intermediate_size": 32, "topk_method": "group_limited_greedy"},
    ),
    Served(
        "deepseek_v3",
        "latent attention, values narrower than keys; grouped experts",
        {**MLA, **ROUTED, "moe_intermediate_size": 32, "first_k_dense_replace": 1},
        fast=True,
    ),
)

_OWN = "ignores the registered attention"
REFUSED = (
    Refused("falcon", _OWN, "computes attention itself", {"alibi": False, "head_dim": None}),
    Refused("bloom", _OWN, "computes attention itself", {"n_head": 4, "n_layer": 4}),
    Refused("mpt", _OWN, "computes attention itself", {"d_model": 64, "n_heads": 4, "n_layers": 4}),
    Refused(
        "llama4_text",
        "packed logits differ",
        "the chunks of its attention exist only in the mask",
        {"num_local_experts": 4, "intermediate_size_mlp": 96, "attention_chunk_size": 8},
    ),
    Refused(
        "qwen3_next",
        "packed logits differ",
        "linear attention carries state from one sequence into the next",
        {
            **EXPERTS,
            "shared_expert_intermediate_size": 32,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    Refused(
        "minimax",
        "packed logits differ",
        "linear attention carries state from one sequence into the next",
    ),
    Refused(
        "lfm2",
        "packed logits differ",
        "convolutions reach from one sequence into the next",
        {"layer_types": ["conv", "full_attention", "conv"]},
    ),
    Refused("diffllama", "packed logits differ", "computes attention itself"),
    Refused(
        "llama",
        "dynamic RoPE",
        "positions scale by the longest sequence in the batch",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        variant="dynamic RoPE",
    ),
    Refused(
        "phi3",
        "longrope RoPE",
        "positions scale by the longest sequence in the batch",
        {
            "original_max_position_embeddings": 24,
            **_rope("longrope", short_factor=[1.0] * 8, long_factor=[4.0] * 8),
        },
        variant="longrope RoPE",
    ),
)


def defaults(model_type: str) -> Mapping[str, object]:
    """What makes a small configuration of this type show its features."""
    found = (each.changes for each in SERVED if (each.model_type, each.variant) == (model_type, ""))
    return next(found, {})
