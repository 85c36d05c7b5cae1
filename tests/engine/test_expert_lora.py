"""LoRA of experts' fused weights and of routers equals PEFT, mixed with others in one batch."""

import json
import shutil
from itertools import product

import pytest
import torch
from safetensors.torch import save_file

from tests.engine.driver import hf_greedy, hf_model, prompts, save_tiny_model, sequence
from tests.engine.mixed_batch import check_equals_peft
from tests.engine.peft_adapters import peft_model, save_adapter, upload_problems
from tests.engine.test_peft_parity import serve
from worker.adapters.loader import ExtraTensors, LoadedAdapter, ModuleWeights, load_adapter
from worker.engine.model_loader import load_model
from worker.engine.rank_pool import RankPool
from worker.protocol import peft
from worker.protocol.errors import AdapterLoadError
from worker.protocol.types import AdapterRef

BOTH = ["experts.gate_up_proj", "experts.down_proj"]
FAST = {"qwen3_moe": "gate", "gpt_oss": "router", "mixtral": "gate"}
SLOW = {
    "qwen2_moe": "gate",
    "olmoe": "gate",
    "granitemoe": "router",
    "phimoe": "router",
    "glm4_moe": "gate",
    "deepseek_v2": "gate",
    "deepseek_v3": "gate",
}
Q = "o_proj"  # MLA has no q_proj
MODELS = [
    *FAST.items(),
    *(pytest.param(*case, marks=pytest.mark.full) for case in SLOW.items()),
]


def options(router):
    return {
        "both": {"target_modules": [], "target_parameters": BOTH},
        "up": {"target_modules": [Q], "target_parameters": BOTH[:1], "r": 3},
        "down": {"target_modules": [], "target_parameters": BOTH[1:], "use_rslora": True},
        "router": {"target_modules": [], "target_parameters": [f"{router}.weight"]},
        "all": {
            "target_modules": [Q],
            "target_parameters": [*BOTH, f"{router}.weight"],
            "rank_pattern": {r".*\.gate_up_proj": 8, "down_proj": 2, f"{router}.weight": 1},
            "alpha_pattern": {"experts.down_proj": 5},
        },
        "linear": {"target_modules": [], "target_parameters": [f"{Q}.weight"]},
        "attention": {"target_modules": [Q]},
    }


def adapters(base, parent, router):
    return {
        AdapterRef(name, 4): save_adapter(base, parent / name, seed, **{"r": 4, **config})
        for seed, (name, config) in enumerate(options(router).items())
    }


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize(("model_type", "router"), MODELS)
def test_a_mixed_batch_equals_peft(model_type, router, tmp_path):
    base = save_tiny_model(tmp_path / "base", model_type)
    folders = adapters(base, tmp_path, router)
    check_equals_peft(base, folders, rank=64, num_blocks=900)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")
def test_biases_of_a_model_with_many_equal_peft(tmp_path):
    """gpt_oss has biases in attention, router and experts; PEFT trains all but the experts'."""
    experts = {"target_modules": ["q_proj"], "target_parameters": BOTH[:1]}
    router = {"target_modules": ["q_proj"], "target_parameters": ["router.weight"]}
    configs = {
        "all": {"target_modules": ["q_proj"], "bias": "all"},
        "only": {"target_modules": ["q_proj", "o_proj"], "bias": "lora_only"},
        "dora": {"target_modules": "all-linear", "bias": "all", "use_dora": True},
        "experts": {**experts, "bias": "all"},
        "router": {**router, "bias": "all"},
        "router only": {**router, "bias": "lora_only"},
        "saved": {"target_modules": ["q_proj"], "bias": "all", "modules_to_save": ["router"]},
    }
    base = save_tiny_model(tmp_path / "base", "gpt_oss")
    folders = {
        AdapterRef(name, 4): save_adapter(base, tmp_path / name, seed, r=4, **config)
        for seed, (name, config) in enumerate(configs.items())
    }
    check_equals_peft(base, folders, rank=64, num_blocks=900)


@pytest.mark.parametrize(("model_type", "router"), MODELS)
def test_shapes_of_the_files_are_those_of_the_live_model(model_type, router, tmp_path):
    base = save_tiny_model(tmp_path, model_type)
    live = load_model(base, "float32", certified=True).lora_shapes
    shapes = peft.base_shapes(base)
    assert live.items() <= shapes.items()
    assert not any(".experts.0." in name for name in shapes)
    assert any(name.endswith(f".{router}") for name in live)
    assert sum(len(shape) == 3 for shape in live.values()) >= 4


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """(model, its folder, folders of adapters)"""
    base = save_tiny_model(tmp_path_factory.mktemp("base"), "qwen3_moe")
    parent = tmp_path_factory.mktemp("adapters")
    return load_model(base, "float32", certified=True), base, adapters(base, parent, "gate")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_their_memory_is_counted(mixture):
    """8 ranks of 4 experts in 3 layers: what is held, not what the file says."""
    model, _, folders = mixture
    pool = RankPool(model.linears, 4, model.dtype, model.device, model.others)
    both = load_adapter(folders[AdapterRef("both", 4)], model.lora_shapes)
    widths = (64 + 64) + (32 + 64)  # of gate_up_proj and down_proj
    assert pool.extra_bytes(both) == 3 * 4 * widths * 8 * 4
    router = load_adapter(folders[AdapterRef("router", 4)], model.lora_shapes)
    assert pool.extra_bytes(router) == 3 * 4 * (64 + 1) * 4
    assert (
        pool.extra_bytes(load_adapter(folders[AdapterRef("attention", 4)], model.lora_shapes)) == 0
    )


@pytest.mark.parametrize("part", ["magnitude", "lora_bias"])
def test_a_router_takes_only_what_peft_computes(mixture, part):
    model, *_ = mixture
    pool = RankPool(model.linears, 4, model.dtype, model.device, model.others)
    name = "model.layers.0.mlp.gate"
    weights = ModuleWeights(torch.ones(4, 64), torch.ones(4, 4), 1.0)
    extras = {name: ExtraTensors({part: torch.ones(4)})}
    with pytest.raises(AdapterLoadError, match="router"):
        pool.write(range(4), LoadedAdapter({name: weights}, 4, extras))


@pytest.mark.parametrize(
    ("name", "changes", "code"),
    [
        ("up", {"target_parameters": BOTH}, None),
        ("up", {"target_parameters": []}, "adapter_unmatched_modules"),
        ("both", {"target_parameters": BOTH[1:]}, "adapter_unmatched_modules"),
        ("both", {"rank_pattern": {"down_proj": 5}}, "adapter_shape_mismatch"),
        ("both", {"r": 2}, "adapter_shape_mismatch"),
    ],
)
def test_what_does_not_fit_the_experts_is_refused(name, changes, code, mixture, tmp_path):
    model, _, folders = mixture
    folder = shutil.copytree(folders[AdapterRef(name, 4)], tmp_path / "adapter")
    file = folder / peft.CONFIG_FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(AdapterLoadError) as error:
        load_adapter(folder, model.lora_shapes)
    assert error.value.code == "adapter_invalid"
    config = peft.parse_config(file.read_bytes())
    header = peft.read_header(folder / peft.WEIGHTS_FILE)
    codes = {problem.code for problem in peft.validate(config, header, model.lora_shapes)}
    assert code is None or code in codes


def save_for_single_experts(base, folder):
    """Qwen3's experts as transformers 4 had them: a linear layer each."""
    generator = torch.Generator().manual_seed(3)
    shapes = {"gate_proj": (32, 64), "up_proj": (32, 64), "down_proj": (64, 32)}
    tensors = {}
    for layer, expert, (name, (out, width)) in product(range(3), range(4), shapes.items()):
        key = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{name}"
        tensors[f"{key}.lora_A.weight"] = torch.randn(3, width, generator=generator) * 0.1
        tensors[f"{key}.lora_B.weight"] = torch.randn(out, 3, generator=generator) * 0.1
    folder.mkdir()
    save_file(tensors, folder / peft.WEIGHTS_FILE)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 3, "lora_alpha": 6}
    config |= {"target_modules": list(shapes), "base_model_name_or_path": str(base)}
    (folder / peft.CONFIG_FILE).write_text(json.dumps(config))
    return folder


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")
def test_lora_of_single_experts_is_served_once_peft_has_fused_it(mixture, tmp_path):
    _, base, _ = mixture
    old = save_for_single_experts(base, tmp_path / "old")
    problem = upload_problems(base, old)[0]
    assert (problem.code, "PEFT" in problem.message) == ("adapter_unmatched_modules", True)
    reference = peft_model(base, old)
    reference.save_pretrained(tmp_path / "fused")
    assert upload_problems(base, tmp_path / "fused") == []
    ref = AdapterRef("fused", 1)
    _, driver = serve(base, {ref: tmp_path / "fused"}, 8, num_blocks=60, block_size=4)
    item = sequence(prompts(1)[0], ref)
    driver.run([item], tokens=8)
    assert item.output_ids == hf_greedy(reference, item.prompt_ids, 8)
    assert item.output_ids != hf_greedy(hf_model(base), item.prompt_ids, 8)
