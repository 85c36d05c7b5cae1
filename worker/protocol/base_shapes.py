"""Shapes of a base model's weights, from its files alone and by the names of the live model."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from worker.protocol.peft_tables import is_embedding
from worker.protocol.safetensors_header import read_header

Shape = tuple[int, ...]

# Models whose linear weights are stored [in, out] (transformers' Conv1D).
CONV1D_MODELS = frozenset({"gpt2", "openai-gpt", "imagegpt", "decision_transformer"})
# Models whose experts are stored [experts, in, out].
TRANSPOSED_EXPERTS = frozenset({"gpt_oss"})
# Names in files that differ from those of transformers' modules, by model type.
_MIXTRAL = ((r"\.block_sparse_moe\.", ".mlp."),)
_GRANITE = (
    (r"\.block_sparse_moe\.input_linear$", ".block_sparse_moe.experts.gate_up_proj"),
    (r"\.block_sparse_moe\.output_linear$", ".block_sparse_moe.experts.down_proj"),
    (r"\.router\.layer$", ".router"),
)
RENAMES: dict[str, tuple[tuple[str, str], ...]] = {
    "mixtral": _MIXTRAL,
    "phimoe": (*_MIXTRAL, (r"\.mlp\.gate$", ".mlp.router")),
    "granitemoe": _GRANITE,
    "granitemoeshared": _GRANITE,
}
_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.\d+\.(?P<name>\w+)$")
# transformers fuses the matrices of all experts, and those of gate and up into one.
_FUSED = {
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "down_proj": "down_proj",
    "w1": "gate_up_proj",
    "w3": "gate_up_proj",
    "w2": "down_proj",
}
_FUSED_NAMES = ("gate_up_proj", "down_proj")


def base_shapes(model_dir: Path) -> dict[str, Shape]:
    """Shapes of a model folder's weights by module name, linear ones (out, in), of experts'
    fused weights (experts, out, in), of norms over the hidden size, and of biases; Conv1D's also
    as stored, by their own name.

    Raises SafetensorsError, OSError or ValueError for a folder without readable weights.
    """
    model_type = json.loads((model_dir / "config.json").read_text()).get("model_type", "")
    experts: defaultdict[str, list[Shape]] = defaultdict(list)
    shapes: dict[str, Shape] = {}
    for name, stored in _tensors(model_dir):
        if name.endswith(".bias") and len(stored) == 1:
            shapes[name] = stored
            continue
        module = _module(name, model_type)
        expert = _EXPERT.match(module)
        if expert is not None and expert["name"] in _FUSED:
            experts[f"{expert['experts']}.{_FUSED[expert['name']]}"].append(stored)
        elif len(stored) == 4 and module.endswith("_blocks"):  # mxfp4: groups of 16 pairs
            shapes[module.removesuffix("_blocks")] = (*stored[:2], stored[2] * 32)
        elif len(stored) == 3 and module.endswith(_FUSED_NAMES):
            shapes[module] = _swap(stored) if model_type in TRANSPOSED_EXPERTS else stored
        elif name.endswith(".weight") and len(stored) in (1, 2):
            shapes[module] = stored
            if model_type in CONV1D_MODELS and len(stored) == 2 and not is_embedding(module):
                shapes[module], shapes[f"{module}.weight"] = stored[::-1], stored
    shapes.update({name: _fused(name, matrices) for name, matrices in experts.items()})
    _add_tied_head(shapes)
    return _without_other_norms(shapes)


def _without_other_norms(shapes: dict[str, Shape]) -> dict[str, Shape]:
    """A worker changes norms over the hidden size (the embeddings' width) and no others."""
    widths = {shape[1] for name, shape in shapes.items() if is_embedding(name) and len(shape) == 2}
    return {
        name: shape
        for name, shape in shapes.items()
        if len(shape) != 1 or name.endswith(".bias") or not widths or shape[0] in widths
    }


def _module(name: str, model_type: str) -> str:
    module = name.removesuffix(".weight")
    for pattern, replacement in RENAMES.get(model_type, ()):
        module = re.sub(pattern, replacement, module)
    return module


def _swap(shape: Shape) -> Shape:
    return shape[0], shape[2], shape[1]


def _fused(name: str, matrices: list[Shape]) -> Shape:
    out, width = matrices[0]
    parts = 2 if name.endswith(".gate_up_proj") else 1
    return len(matrices) // parts, parts * out, width


def _add_tied_head(shapes: dict[str, Shape]) -> None:
    """A head that shares the embedding's weight is in no file."""
    tables = [
        shape
        for name, shape in shapes.items()
        if name.endswith(("embed_tokens", "wte")) and len(shape) == 2
    ]
    if "lm_head" not in shapes and tables:
        shapes["lm_head"], shapes["lm_head.tied"] = tables[0], ()


def _tensors(model_dir: Path) -> Iterator[tuple[str, Shape]]:
    for path in _weight_files(model_dir):
        for name, tensor in read_header(path).tensors.items():
            yield name, tensor.shape


def _weight_files(model_dir: Path) -> list[Path]:
    index = model_dir / "model.safetensors.index.json"
    if index.is_file():
        weight_map = json.loads(index.read_text())["weight_map"]
        return [model_dir / name for name in sorted(set(weight_map.values()))]
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{model_dir} holds no safetensors weights")
    return files
