"""Every served PEFT option, mixed in one batch with the base and each other, equals PeftModel."""

import re

import pytest
from peft.tuners.lora.config import BdLoraConfig, MontecloraConfig, VeloraConfig

from tests.engine.driver import save_tiny_model
from tests.engine.mixed_batch import check_equals_peft
from tests.engine.peft_adapters import ALL, save_adapter
from worker.protocol.types import AdapterRef

T = ["q_proj", "v_proj", "down_proj"]
OPTIONS = {
    "plain": {"target_modules": T},
    "dora": {"target_modules": ALL, "use_dora": True, "lora_alpha": 8},
    "lora_bias": {"target_modules": T, "lora_bias": True, "use_rslora": True},
    "bias all": {"target_modules": T, "bias": "all"},
    "bias lora_only": {"target_modules": T, "bias": "lora_only"},
    "dora, bias all": {"target_modules": T, "use_dora": True, "bias": "all"},
    "head": {"target_modules": [*T, "lm_head"], "rank_pattern": {"lm_head": 6}},
    "head, dora": {"target_modules": [*T, "lm_head"], "use_dora": True},
    "embedding": {"target_modules": [*T, "embed_tokens"]},
    "saved norms": {"target_modules": T, "modules_to_save": ["norm", "input_layernorm"]},
    "saved head": {"target_modules": T, "modules_to_save": ["lm_head"]},
    "saved embedding": {"target_modules": T, "modules_to_save": ["embed_tokens"]},
    "embedding, dora": {"target_modules": [*T, "embed_tokens"], "use_dora": True},
    "saved layer": {"target_modules": ["q_proj"], "modules_to_save": ["down_proj"]},
    "saved block": {"target_modules": [*T, "o_proj"], "modules_to_save": ["mlp"]},
    "head's tokens": {"target_modules": T, "trainable_token_indices": {"lm_head": [5, 60]}},
    "two tables' tokens": {
        "target_modules": T,
        "trainable_token_indices": {"lm_head": [5, 60], "embed_tokens": [7, 60]},
    },
    "head and tokens": {"target_modules": [*T, "lm_head"], "trainable_token_indices": [5, 7, 60]},
    "blocks": {
        "target_modules": T,
        "use_bdlora": BdLoraConfig(
            target_modules_bd_a=["down_proj"],
            target_modules_bd_b=["q_proj"],
            nblocks=2,
            match_strict=False,
        ),
    },
    "monteclora": {"target_modules": T, "monteclora_config": MontecloraConfig()},
    "velora": {"target_modules": T, "velora_config": VeloraConfig()},
    "mica": {"target_modules": T, "init_lora_weights": "mica"},
    "tied LoRA": {"target_modules": [*T, "embed_tokens"], "ensure_weight_tying": True},
    "tied LoRA of the head": {"target_modules": [*T, "lm_head"], "ensure_weight_tying": True},
    "tied dora": {
        "target_modules": [*T, "embed_tokens"],
        "ensure_weight_tying": True,
        "use_dora": True,
    },
    "tied and saved": {
        "target_modules": T,
        "modules_to_save": ["embed_tokens"],
        "ensure_weight_tying": True,
    },
    "tied tokens": {
        "target_modules": T,
        "trainable_token_indices": [5, 7],
        "ensure_weight_tying": True,
    },
    "tokens": {"target_modules": T, "trainable_token_indices": [5, 7, 60]},
}
UNTIED = {  # PEFT refuses them where the head shares the embedding's weight
    "saved head and tokens": {
        "target_modules": T,
        "modules_to_save": ["lm_head"],
        "trainable_token_indices": [5, 60],
    },
    "head, dora and tokens": {
        "target_modules": [*T, "lm_head"],
        "use_dora": True,
        "trainable_token_indices": [5, 60],
    },
}
TABLES = {name: OPTIONS[name] for name in OPTIONS if re.search("embedding|tokens|tied|head", name)}
GPT2 = {
    "plain": {"target_modules": ["c_attn", "c_proj"]},
    "dora": {"target_modules": ["c_attn", "c_fc"], "use_dora": True},
    "bias all": {"target_modules": ["c_attn"], "bias": "all"},
    "bias, dora": {"target_modules": ["c_attn"], "bias": "lora_only", "use_dora": True},
    "saved layer": {"target_modules": ["c_attn"], "modules_to_save": ["c_fc"]},
    "wte": {"target_modules": ["c_attn", "wte"]},
}
MODELS = {
    "untied": ("qwen2", {}, OPTIONS | UNTIED),
    "tied": ("qwen2", {"tie_word_embeddings": True}, OPTIONS),
    "gpt2": ("gpt2", {}, GPT2),
    "scaled embeddings": ("gemma3_text", {}, TABLES),
    "scaled in the model": ("gemma", {"tie_word_embeddings": True}, TABLES),
}


SLOW = {"scaled in the model"}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.full) if k in SLOW else k for k in MODELS]
)
def test_options_equal_peft_in_one_mixed_batch(kind, tmp_path):
    model_type, changes, options = MODELS[kind]
    base = save_tiny_model(tmp_path / "base", model_type, **changes)
    fan = {"fan_in_fan_out": True} if kind == "gpt2" else {}
    folders = {
        AdapterRef(name, config.get("rank_pattern", {}).get("lm_head", 4)): save_adapter(
            base, tmp_path / name, seed, r=4, **fan, **config
        )
        for seed, (name, config) in enumerate(options.items())
    }
    check_equals_peft(base, folders, rank=160, num_blocks=2000)
