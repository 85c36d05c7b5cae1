"""Compile every Triton kernel for GPUs that need not be here, and print what each one takes.

    python -m benchmarks.kernels.compile_ahead

One JSON line per kernel and target: registers a thread, bytes of spills, bytes of shared memory.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"  # an interpreted kernel can't be compiled

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.kv_write.triton_kernel import kv_write_kernel
from kernels.lora import triton_kernel as lora
from kernels.paged_attention import triton_decode as decode
from kernels.paged_attention import triton_kernel as attention
from kernels.sample import triton_kernel as sample

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
TYPES = {
    "tables": "*i64",
    "addresses": "*i64",
    "slots": "*i64",
    "tiles": "*i32",
    "tile_rows": "*i32",
    "tile_lanes": "*i32",
    "merged_rows": "*i32",
    "partial_out": "*fp32",
    "partial_weights": "*fp32",
    "hidden": "*fp32",
    "scales": "*fp32",
    "logits": "*fp32",
    "temperatures": "*fp32",
    "top_ks": "*i64",
    "top_ps": "*fp64",
    "min_ps": "*fp32",
    "uniforms": "*fp64",
    "chosen": "*i64",
    "scale": "fp32",
    "softcap": "fp32",
}
TENSORS = {
    "query",
    "keys",
    "values",
    "sinks",
    "out",
    "key",
    "value",
    "x",
    "y",
    "A",
    "A_second",
    "A_third",
    "B",
}


def kernels() -> Iterator[tuple[str, Any, dict[str, Any], int]]:
    """(name, kernel, constants, warps)"""
    for dim in (64, 128, 256):
        sizes = attention.sizes_of(12, (1, 4, 16, dim), dim)
        options = {"HAS_WINDOW": True, "HAS_SOFTCAP": True}
        prefill = {**attention.prefill_constants(sizes), **options, "HAS_SINKS": True}
        yield f"attention {dim}", attention.attention_kernel, prefill, attention.WARPS
        splits = {**decode.decode_constants(sizes), **options}
        yield f"decode splits {dim}", decode.split_kernel, splits, decode.warps_of(splits)
        merge = {"HEADS": 12, "VALUE_DIM": dim, "BLOCK_VALUE": dim, "HAS_SINKS": True}
        yield f"decode merge {dim}", decode.merge_kernel, merge, 1
    sizes = {"KEY_DIM": 128, "VALUE_DIM": 128, "BLOCK_KEY": 128, "BLOCK_VALUE": 128}
    yield "kv_write", kv_write_kernel, {**sizes, "KV_HEADS": 4, "BLOCK_SIZE": 16}, 1
    vocabulary = {"VOCABULARY": 128_256, "BLOCK": sample.BLOCK}
    yield "sample", sample.sample_kernel, vocabulary, sample.WARPS
    for modules in (1, 3):
        constants = lora.shrink_constants(4096, modules)
        yield f"lora shrink {modules}", lora.shrink_kernel, constants, 2
    yield "lora expand", lora.expand_kernel, lora.expand_constants(4096, 14336), 4


def build(kernel: Any, constants: dict[str, Any], warps: int, target: GPUTarget) -> Any:
    signature = {
        name: "constexpr"
        if name in constants
        else TYPES.get(name, "*bf16" if name in TENSORS else "i32")
        for name in kernel.arg_names
    }
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs=places)
    return triton.compile(source, target=target, options={"num_warps": warps})


def usage(compiled: Any) -> dict[str, int]:
    """Registers, spilled bytes and shared bytes."""
    if "amdgcn" in compiled.asm:
        notes = dict(re.findall(r"\.(vgpr_count|vgpr_spill_count): +(\d+)", compiled.asm["amdgcn"]))
        registers, spills = int(notes["vgpr_count"]), 4 * int(notes["vgpr_spill_count"])
    else:
        text = _resources(compiled.asm["cubin"])
        registers = int(re.findall(r"REG:(\d+)", text)[-1])
        spills = int(re.findall(r"LOCAL:(\d+)", text)[-1]) + int(
            re.findall(r"STACK:(\d+)", text)[-1]
        )
    return {"registers": registers, "spills": spills, "shared": compiled.metadata.shared}


def _resources(cubin: bytes) -> str:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        tool = triton.knobs.nvidia.cuobjdump.path
        command = [tool, "--dump-resource-usage", str(path)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> None:
    for name, kernel, constants, warps in kernels():
        for label, target in TARGETS.items():
            used = usage(build(kernel, constants, warps, target))
            print(json.dumps({"kernel": name, "target": label, **used}), flush=True)


if __name__ == "__main__":
    main()
