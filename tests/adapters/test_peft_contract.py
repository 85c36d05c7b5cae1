"""Configs, module rules and checks of PEFT adapters, with PEFT itself as the oracle."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key
from safetensors.torch import save

from tests.adapters.folders import CONFIG, MODULES, SHAPES, check, tensors
from worker.protocol import peft


def parse(**fields):
    return peft.parse_config(json.dumps({**CONFIG, **fields}))


def codes(problems):
    return [problem.code for problem in problems]


def test_what_peft_saves_is_parsed(tmp_path):
    LoraConfig(
        task_type="CAUSAL_LM",
        target_modules=["q_proj", "v_proj"],
        r=6,
        lora_alpha=9,
        use_rslora=True,
        rank_pattern={"v_proj": 3},
        init_lora_weights="gaussian",
    ).save_pretrained(tmp_path)
    config = peft.parse_config((tmp_path / peft.CONFIG_FILE).read_bytes())
    assert config.rank("model.layers.0.self_attn.v_proj") == 3
    assert config.scale("model.layers.0.self_attn.v_proj") == 9 / math.sqrt(3)
    assert config.scale("model.layers.0.self_attn.q_proj") == 9 / math.sqrt(6)
    assert config.target_modules == ("q_proj", "v_proj")


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("layer_replication", [[0, 4], [2, 5]]),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_4"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", "loftq"),
        ("arrow_config", {"top_k": 2}),
        ("use_qalora", True),
        ("kasa_config", {"beta": 1}),
        ("peft_type", "IA3"),
        ("peft_type", None),
        ("invented_by_a_later_release", 3),
        ("target_modules", "(a+)+b"),
        ("target_modules", "(a|a)*b"),
        ("target_modules", "(a|ab|a)(a|ab|a)" * 20),
        ("target_modules", ".*a.*b.*c.*d"),
        ("target_modules", r"(a)\1"),
        ("target_modules", "a" * 5000),
        ("rank_pattern", {"(a*)*": 4}),
    ],
)
def test_what_is_not_served_exactly_is_refused_by_name(param, value):
    with pytest.raises(peft.AdapterConfigError, match=param) as error:
        parse(**{param: value})
    assert (error.value.code, error.value.param) == ("adapter_unsupported_option", param)


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("r", 0),
        ("bias", "some"),
        ("use_dora", 1),
        ("modules_to_save", "lm_head"),
        ("trainable_token_indices", [5, 5]),
        ("alora_invocation_tokens", [1, "2"]),
        ("alora_invocation_tokens", [-1]),
        ("alora_invocation_tokens", 7),
        ("trainable_token_indices", {"embed_tokens": [-1]}),
        ("r", "8"),
        ("r", True),
        ("lora_alpha", None),
        ("lora_alpha", math.inf),
        ("use_rslora", 1),
        ("rank_pattern", ["q_proj"]),
        ("rank_pattern", {"q_proj": 0}),
        ("rank_pattern", {"(": 4}),
        ("alpha_pattern", {"q_proj": "8"}),
        ("target_modules", 5),
        ("target_modules", "(q_proj"),
        ("layers_to_transform", ["1"]),
        ("layers_pattern", ["("]),
    ],
)
def test_a_malformed_field_is_named(param, value):
    with pytest.raises(peft.AdapterConfigError) as error:
        parse(**{param: value})
    assert (error.value.code, error.value.param) == ("adapter_invalid_config", param)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_what_is_no_config_is_refused(data):
    with pytest.raises(peft.AdapterConfigError):
        peft.parse_config(data)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_dora", True),
        ("bias", "lora_only"),
        ("modules_to_save", ["norm"]),
        ("trainable_token_indices", [3]),
        ("target_parameters", ["experts.down_proj"]),
    ],
)
def test_activated_lora_refuses_what_it_cannot_be_together_with(field, value):
    with pytest.raises(peft.AdapterConfigError, match=field) as error:
        parse(alora_invocation_tokens=[1, 1], **{field: value})
    assert error.value.code == "adapter_unsupported_option"


VARIANTS = {
    "use_dora": True,
    "alora_invocation_tokens": [1],
    "use_bdlora": {"nblocks": 2},
    "monteclora_config": {"num_samples": 8},
    "velora_config": {"num_groups": 64},
    "target_parameters": ["experts.down_proj"],
}


@pytest.mark.parametrize("first", VARIANTS)
@pytest.mark.parametrize("second", VARIANTS)
def test_two_variants_are_refused(first, second):
    if first == second:
        assert parse(**{first: VARIANTS[first]}).r == 4
        return
    with pytest.raises(peft.AdapterConfigError, match=first) as error:
        parse(**{first: VARIANTS[first], second: VARIANTS[second]})
    assert error.value.code == "adapter_unsupported_option"


@pytest.mark.parametrize(
    ("fields", "rank", "code"),
    [
        ({"target_modules_bd_b": ["_proj"]}, (4, 2), None),
        ({"target_modules_bd_a": ["_proj"]}, (4, 4), "shape_mismatch"),
        ({"target_modules_bd_b": ["_proj"]}, (4, 4), "shape_mismatch"),
        ({"target_modules_bd_b": ["q_proj"]}, (4, 2), "unsupported_tensor"),
        ({"target_modules_bd_b": ["q_proj"], "match_strict": False}, (4, 2), "shape_mismatch"),
        (
            {"target_modules_bd_b": ["_proj"], "target_modules_bd_a": ["q"]},
            (4, 2),
            "unsupported_tensor",
        ),
        ({"target_modules_bd_b": ["_proj"], "nblocks": 3}, (4, 2), "shape_mismatch"),
    ],
)
def test_block_diagonal_matrices_have_the_shapes_of_their_blocks(fields, rank, code):
    """B of rank 4 in two blocks is as wide as one of rank 2."""
    narrow = tensors(rank=rank[1])
    weights = {key: narrow[key] if "lora_B" in key else tensor for key, tensor in tensors().items()}
    config = parse(use_bdlora={"nblocks": 2, **fields})
    found = codes(peft.validate(config, peft.parse_header(save(weights)), SHAPES))
    assert found == [] if code is None else f"adapter_{code}" in found


def test_state_of_training_belongs_to_its_option():
    state = {f"{Q}.lora_monteclora_sampler.std_prior": torch.ones(4)}
    assert check(tensors() | state, monteclora_config={"num_samples": 8}) == []
    assert codes(check(tensors() | state)) == ["adapter_unsupported_tensor"]
    assert check(tensors() | state, velora_config={"scale": 1}) != []


def test_the_invocation_is_part_of_what_an_adapter_is():
    data = save(tensors())
    configs = [{}, {"alora_invocation_tokens": [1, 2]}, {"alora_invocation_tokens": [2, 1]}]
    header = peft.parse_header(data)
    digests = {peft.digest(parse(**config), header, data) for config in configs}
    assert len(digests) == 3
    assert parse(alora_invocation_tokens=[]).invocation == ()


def test_an_invocation_outside_of_the_vocabulary_is_refused():
    config = parse(alora_invocation_tokens=[3, 96])
    header = peft.parse_header(save(tensors()))
    shapes = {**SHAPES, "model.embed_tokens": (97, 12)}
    assert peft.validate(config, header, shapes) == []
    shapes["model.embed_tokens"] = (96, 12)
    (problem,) = peft.validate(config, header, shapes)
    assert (problem.code, problem.name) == ("adapter_invalid_config", "alora_invocation_tokens")


def test_unused_and_harmless_fields_are_accepted():
    config = parse(
        use_dora=False,
        corda_config={"corda_method": "ipm"},
        modules_to_save=None,
        lora_dropout=0.1,
        loftq_config={},
        megatron_core="megatron.core",
        qalora_group_size=16,
        invented_by_a_later_release=None,
    )
    assert config.r == 4


NAMES = [
    "model.layers.0.self_attn.q_proj",
    "model.layers.1.self_attn.q_proj",
    "model.layers.11.mlp.down_proj",
    "model.layers.1.mlp.experts.0.down_proj",
    "transformer.h.1.attn.c_attn",
    "lm_head",
    "q_proj",
]
PATTERNS = ["q_proj", "down_proj", r"layers\.1\..*", "layers.1.self_attn.q_proj", "proj", ".*"]


@given(
    patterns=st.dictionaries(st.sampled_from(PATTERNS), st.integers(1, 64)),
    name=st.sampled_from(NAMES),
)
def test_patterns_choose_like_peft(patterns, name):
    expected = patterns.get(get_pattern_key(patterns.keys(), name), 4)
    assert parse(rank_pattern=patterns).rank(name) == expected


@given(
    targets=st.one_of(
        st.lists(st.sampled_from(["q_proj", "down_proj", "proj", *NAMES]), min_size=1),
        st.sampled_from([r".*q_proj", r".*layers\.1\..*", "q_proj"]),
    ),
    excluded=st.one_of(st.none(), st.lists(st.sampled_from(["q_proj", NAMES[2]]))),
    layers=st.one_of(st.none(), st.lists(st.sampled_from([0, 1, 11]), min_size=1)),
    pattern=st.sampled_from([None, "layers", ["h", "layers"]]),
    name=st.sampled_from(NAMES),
)
def test_modules_are_targeted_like_peft(targets, excluded, layers, pattern, name):
    if isinstance(targets, str):
        layers = None
    pattern = pattern if layers else None
    fields = {
        "target_modules": targets,
        "exclude_modules": excluded,
        "layers_to_transform": layers,
        "layers_pattern": pattern,
    }
    found = check_target_module_exists(LoraConfig(**fields), name)
    expected = bool(found) and type(found).__name__ != "_ExcludedModule"
    assert parse(**fields).targets(name) == expected


def test_a_right_adapter_has_no_problems():
    assert check(tensors()) == []
    header = peft.parse_header(save(tensors()))
    assert peft.adapter_modules(parse(), header) == MODULES
    assert peft.adapter_rank(parse(), header) == 4


def renamed(old, new):
    return {key.replace(old, new): tensor for key, tensor in tensors().items()}


Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("weights", "fields", "code"),
    [
        ({}, {}, "adapter_unmatched_modules"),
        (renamed("model.layers.", "model.language_model.layers."), {}, "adapter_unmatched_modules"),
        (renamed("layers.1", "layers.9"), {}, "adapter_unmatched_modules"),
        (renamed("base_model.model.", ""), {}, "adapter_unknown_tensor"),
        (
            {**tensors(), "base_model.model.model.norm.weight": torch.ones(3)},
            {},
            "adapter_unknown_tensor",
        ),
        (
            {**tensors(), f"{Q}.lora_magnitude_vector": torch.ones(16)},
            {},
            "adapter_incomplete_module",
        ),
        ({**tensors(), f"{Q}.lora_B.bias": torch.ones(16)}, {}, "adapter_incomplete_module"),
        (tensors(), {"use_dora": True}, "adapter_incomplete_module"),
        ({**tensors(), f"{Q}.weight": torch.ones(16, 12)}, {}, "adapter_unsupported_tensor"),
        ({**tensors(), f"{Q}.lora_C.weight": torch.ones(1)}, {}, "adapter_unsupported_tensor"),
        (
            {**tensors(), "base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 9)},
            {},
            "adapter_unmatched_modules",
        ),
        (
            {
                **tensors(),
                "base_model.model.lm_head.lora_A.weight": torch.ones(4, 12),
                "base_model.model.lm_head.lora_B.weight": torch.ones(50, 4),
            },
            {},
            "adapter_unmatched_modules",
        ),
        (
            {key: value for key, value in tensors().items() if key != f"{Q}.lora_B.weight"},
            {},
            "adapter_incomplete_module",
        ),
        (tensors(rank=3), {}, "adapter_rank_mismatch"),
        (tensors(), {"rank_pattern": {"v_proj": 2}}, "adapter_rank_mismatch"),
        ({**tensors(), f"{Q}.lora_A.weight": torch.ones(4, 13)}, {}, "adapter_shape_mismatch"),
        ({**tensors(), f"{Q}.lora_B.weight": torch.ones(16, 5)}, {}, "adapter_shape_mismatch"),
        ({**tensors(), f"{Q}.lora_A.weight": torch.ones(48)}, {}, "adapter_shape_mismatch"),
        (
            {**tensors(), f"{Q}.lora_A.weight": torch.ones(4, 12).double()},
            {},
            "adapter_wrong_dtype",
        ),
        (tensors(), {"target_modules": ["v_proj"]}, "adapter_untargeted_module"),
    ],
)
def test_a_wrong_adapter_is_refused_by_name(weights, fields, code):
    problems = check(weights, **fields)
    assert code in codes(problems)
    assert all(problem.name and problem.message for problem in problems)


HIDDEN, VOCABULARY = 12, 30
TIED = {
    **SHAPES,
    "model.embed_tokens": (VOCABULARY, HIDDEN),
    "lm_head": (VOCABULARY, HIDDEN),
    "lm_head.tied": (),
}
EMBED, HEAD = "base_model.model.model.embed_tokens", "base_model.model.lm_head"
ROWS = {f"{EMBED}.token_adapter.trainable_tokens_delta": torch.ones(2, HIDDEN)}
HEAD_LORA = {
    f"{HEAD}.lora_A.weight": torch.ones(4, HIDDEN),
    f"{HEAD}.lora_B.weight": torch.ones(VOCABULARY, 4),
}
EMBED_LORA = {
    f"{EMBED}.lora_embedding_A": torch.ones(4, VOCABULARY),
    f"{EMBED}.lora_embedding_B": torch.ones(HIDDEN, 4),
}
HEAD_WEIGHT = {f"{HEAD}.weight": torch.ones(VOCABULARY, HIDDEN)}
HEAD_ROWS = {f"{HEAD}.token_adapter.trainable_tokens_delta": torch.ones(1, HIDDEN)}
BOTH, ALSO = {"target_modules": ["lm_head", "embed_tokens"]}, {"trainable_token_indices": [3, 5]}


@pytest.mark.parametrize(
    ("weights", "fields", "tied", "code"),
    [
        (ROWS | HEAD_LORA, BOTH | ALSO, True, None),
        (ROWS | HEAD_WEIGHT, ALSO | {"modules_to_save": ["lm_head"]}, False, None),
        (ROWS | HEAD_WEIGHT, ALSO | {"modules_to_save": ["lm_head"]}, True, "unsupported_tensor"),
        (ROWS | EMBED_LORA, BOTH | ALSO, False, "unsupported_tensor"),
        (
            HEAD_LORA | HEAD_WEIGHT,
            BOTH | {"modules_to_save": ["head"]},
            False,
            "unsupported_tensor",
        ),
        (HEAD_ROWS, {"trainable_token_indices": {"lm_head": [29]}}, True, None),
        (EMBED_LORA, BOTH | {"lora_bias": True}, True, "unsupported_tensor"),
        (EMBED_LORA, BOTH | {"alora_invocation_tokens": [3]}, True, "unsupported_tensor"),
        (HEAD_ROWS, {"trainable_token_indices": {"lm_head": [30]}}, True, "unsupported_tensor"),
        (HEAD_ROWS, {"trainable_token_indices": {"lm_head": [1, 2]}}, True, "shape_mismatch"),
        (EMBED_LORA | HEAD_LORA, {"target_modules": ["embed_tokens"]}, True, "untargeted_module"),
        (
            EMBED_LORA | HEAD_LORA,
            {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
            True,
            None,
        ),
        (
            EMBED_LORA | HEAD_LORA,
            {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
            False,
            "untargeted_module",
        ),
        (
            EMBED_LORA,
            {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
            True,
            "incomplete_module",
        ),
    ],
)
def test_tables_of_tokens_are_changed_as_peft_can(weights, fields, tied, code):
    config = parse(**{"target_modules": ["q_proj", "v_proj"], **fields})
    shapes = TIED if tied else {name: TIED[name] for name in TIED if name != "lm_head.tied"}
    weights = tensors() | weights if "target_modules" not in fields else weights
    found = codes(peft.validate(config, peft.parse_header(save(weights)), shapes))
    assert found == [] if code is None else f"adapter_{code}" in found


def test_a_head_with_a_bias_has_no_trained_rows():
    config = parse(trainable_token_indices=[3, 5])
    header = peft.parse_header(save(tensors() | ROWS))
    assert peft.validate(config, header, TIED) == []
    assert peft.validate(config, header, TIED | {"lm_head.bias": (VOCABULARY,)})


def test_all_that_lies_in_a_saved_module_is_saved():
    config = parse(modules_to_save=["mlp", "norm"])
    assert config.saves("model.layers.0.mlp.down_proj")
    assert config.saves("model.layers.0.input_layernorm")
    assert not config.saves("model.layers.0.self_attn.q_proj")
    assert not parse().saves("model.norm")


def test_every_problem_is_listed():
    weights = {**tensors(), f"{Q}.lora_A.weight": torch.ones(4, 13), "x": torch.ones(1)}
    assert codes(check(weights)) == ["adapter_unknown_tensor", "adapter_shape_mismatch"]


def test_the_model_is_not_searched_again_for_every_module():
    """A large model has hundreds of modules: a search for each would take longer than the load."""
    searches = []

    class Searched(dict):
        def __iter__(self):
            searches.append("")
            return super().__iter__()

    shapes = Searched(SHAPES)
    names = [name for name in SHAPES if name.endswith("_proj") and "mlp" not in name]
    for chosen in (names[:1], names):
        assert peft.validate(parse(), peft.parse_header(save(tensors(chosen))), shapes) == []
    assert len(searches) <= 2


def test_size_is_capped():
    header = peft.parse_header(save(tensors()))
    problems = peft.validate(parse(), header, SHAPES, max_bytes=100)
    assert codes(problems) == ["adapter_too_large"]


def digest(weights, metadata=None, **fields):
    data = save(weights, metadata)
    return peft.digest(parse(**fields), peft.parse_header(data), data)


def test_the_digest_is_that_of_what_is_computed():
    same = digest(tensors())
    assert len(same) == 64
    assert same == digest(dict(reversed(tensors().items())), {"format": "pt"})
    assert same == digest(tensors(), lora_dropout=0.5, base_model_name_or_path="elsewhere")
    assert digest(tensors(), lora_alpha=16) == digest(tensors(), use_rslora=True)  # both scale 4
    others = [
        digest(tensors(seed=1)),
        digest(tensors(), lora_alpha=12),
        digest(tensors(), use_rslora=True),
        digest(tensors(), alpha_pattern={"v_proj": 9}),
        digest(renamed("layers.1", "layers.0")),
        digest({key: value.half() for key, value in tensors().items()}),
    ]
    assert len({same, *others}) == len(others) + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_found(dtype, value):
    weights = {"fine": torch.full((9,), torch.finfo(dtype).max, dtype=dtype)}
    weights["broken"] = torch.zeros(3, 5, dtype=dtype)
    weights["broken"][2, 4] = value
    data = save(weights)
    problems = peft.find_not_finite(peft.parse_header(data), data)
    assert [(problem.code, problem.name) for problem in problems] == [
        ("adapter_not_finite", "broken")
    ]


def test_base_shapes_equal_the_live_models(tmp_path):
    from tests.engine.driver import save_tiny_model
    from worker.engine.model_loader import load_model

    for model_type in ("llama", "gpt2"):
        folder = save_tiny_model(tmp_path / model_type, model_type)
        shapes = peft.base_shapes(folder)
        live = load_model(folder, "float32", certified=True).lora_shapes
        assert live.items() <= shapes.items()


def test_norms_of_heads_are_refused_at_upload_by_name(tmp_path):
    """PEFT's 'norm' names q_norm too; a worker changes norms over the hidden size alone."""
    from tests.engine.driver import save_tiny_model
    from worker.engine.model_loader import load_model

    folder = save_tiny_model(tmp_path, "qwen3")
    shapes = peft.base_shapes(folder)
    live = load_model(folder, "float32", certified=True).lora_shapes
    assert {name for name in shapes if "norm" in name} == {name for name in live if "norm" in name}
    weights = {
        "base_model.model.model.norm.weight": torch.ones(64),
        "base_model.model.model.layers.0.self_attn.q_norm.weight": torch.ones(16),
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(4, 64),
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight": torch.ones(64, 4),
    }
    header = peft.parse_header(save(weights))
    [problem] = peft.validate(parse(modules_to_save=["norm"]), header, shapes)
    assert problem.code == "adapter_unsupported_tensor"
    assert problem.name == "model.layers.0.self_attn.q_norm"
    assert "'model.norm' or 'layernorm' does not" in problem.message
    assert not parse(modules_to_save=["model.norm", "layernorm"]).saves(problem.name)


@pytest.mark.parametrize("name", ["experts.gate_up_proj_bias", "gate.e_score_correction_bias"])
def test_biases_that_only_an_older_peft_saves_are_refused_by_name(name):
    weights = tensors() | {f"base_model.model.model.layers.0.mlp.{name}": torch.ones(4)}
    [problem] = check(weights, bias="all")
    assert problem.code == "adapter_unsupported_tensor"
    assert "PEFT before 0.21 trains and saves it" in problem.message


def test_base_shapes_of_a_sharded_model(tmp_path):
    from transformers import AutoModelForCausalLM

    from tests.engine.driver import save_tiny_model

    whole = save_tiny_model(tmp_path / "whole")
    model = AutoModelForCausalLM.from_pretrained(whole)
    model.save_pretrained(tmp_path / "shards", max_shard_size="60KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert peft.base_shapes(tmp_path / "shards") == peft.base_shapes(whole)
