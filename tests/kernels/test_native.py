"""How the C++ kernels are built, chosen, and done without."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels import native

HERE = Path(__file__).parent
SUITES = [HERE / f"test_native_{name}.py" for name in ("attention", "lora", "pointwise", "sample")]
CHOSEN = """
import torch
from kernels import kv_write, lora, paged_attention, pointwise, sample
for op in (kv_write, lora, paged_attention, pointwise, sample):
    dtype = () if op is sample else (torch.bfloat16,)
    block = (8, 64) if op in (kv_write, paged_attention) else ()
    chosen = op._implementation("cpu", *dtype, *block)
    print(getattr(chosen, "__module__", None) or chosen.__name__)
"""


def run(arguments, tmp_path, **environment):
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, "BATTEN_KERNEL_CACHE": str(tmp_path), **environment},
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )


def test_switched_off_the_reference_serves(tmp_path):
    done = run(["-c", CHOSEN], tmp_path, BATTEN_NATIVE_KERNELS="0")
    assert done.stdout.split() == [
        f"kernels.{op}.reference"
        for op in ("kv_write", "lora", "paged_attention", "pointwise", "sample")
    ]
    assert done.stderr == ""
    assert not list(tmp_path.iterdir())


def test_without_a_compiler_the_reference_serves_and_one_line_says_so(tmp_path):
    done = run(["-c", CHOSEN], tmp_path, PATH=str(tmp_path))
    assert done.stdout.count("reference") == 5
    assert done.stderr.splitlines() == [
        "no g++ or clang++ on PATH: PyTorch serves instead of the faster C++ kernels"
    ]


@pytest.mark.skipif(native._compiler() is None, reason="no C++ compiler")
def test_what_does_not_compile_is_logged_and_done_without(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("BATTEN_KERNEL_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "broken.cpp"
    source.write_text("int broken(")
    assert native.library(source) is None
    assert "broken.cpp can't be compiled" in caplog.text
    assert "error" in caplog.text


@pytest.mark.skipif(native._compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("op", ["kv_write", "lora", "paged_attention", "pointwise", "sample"])
@pytest.mark.parametrize(
    "target",
    [
        pytest.param("x86-64-v2", marks=pytest.mark.full),
        "x86-64-v3",
        pytest.param("x86-64-v4", marks=pytest.mark.full),
    ],
)
def test_lanes_are_never_passed_to_a_call(target, op, tmp_path):
    """Where they do not fit into a register, each such call would take stack for good."""
    source, built = Path(native.__file__).parent / op / "cpu.cpp", tmp_path / "kernel.so"
    flags = [*native.FLAGS, f"-march={target}"]
    subprocess.run([native._compiler(), *flags, source, "-o", built], check=True)
    symbols = subprocess.run(["nm", built], check=True, capture_output=True, text=True).stdout
    assert " T batten_" in symbols
    assert [line for line in symbols.splitlines() if "Dv16_" in line] == []


@pytest.mark.full
@pytest.mark.skipif(native._compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("target", ["x86-64-v2", "x86-64-v3", "x86-64-v4"])
def test_older_processors_compute_the_same(target, tmp_path):
    """The whole suite of the kernels, compiled for a processor with fewer instructions."""
    if target == "x86-64-v4" and "avx512f" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX-512")
    done = run(
        ["-m", "pytest", "-q", "-m", "not full", *SUITES], tmp_path, BATTEN_KERNEL_ARCH=target
    )
    assert done.returncode == 0, done.stdout[-3000:]
