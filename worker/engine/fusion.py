"""Fewer passes over a layer's numbers on CPUs, where a model's own code makes many.

Norms, gated MLPs and rotary embeddings are recognised by what they compute, not by their names:
each module's own forward and the kernel run on the same random numbers, and only where the results
agree to the last rounding does the kernel take its place. Anything else stays as it is.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.pointwise import cpu, gated_silu, rms_norm, rotate
from worker.engine.attention import in_forward

Forward = Callable[[Any, Tensor], Tensor]

GATED_MLP = ["gate_proj", "up_proj", "down_proj", "act_fn"]
ROTARY = "apply_rotary_pos_emb"
TRIAL = 3  # tokens
SCALES = (1, 1000)
"""Of the trials' inputs: some MLPs clamp what is large."""


@torch.inference_mode()
def fuse(model: nn.Module) -> int:
    """Returns how many modules now run in kernels; 0 on a machine that has none."""
    weight = next(model.parameters())
    if not cpu.is_available(weight.device.type, weight.dtype):
        return 0
    count = 0
    for module in model.modules():
        forward = _kernel_for(module)
        if forward is not None and _agree(module, forward, weight.dtype):
            module.__class__ = _with_forward(type(module), forward)  # type: ignore[arg-type]
            count += 1
    for file in {type(module).__module__ for module in model.modules()}:
        _fuse_rotary(sys.modules[file])
    return count


@functools.cache
def _with_forward(base: type[nn.Module], forward: Forward) -> type[nn.Module]:
    """A class and not an attribute of the module: copies of the module keep it, and call it on
    themselves."""
    return type(base.__name__, (base,), {"forward": forward, "__module__": base.__module__})


def _kernel_for(module: nn.Module) -> Forward | None:
    """What may stand for the module's forward."""
    if [name for name, _ in module.named_children()] == GATED_MLP:
        points = torch.linspace(-9, 9, 99)
        activated: Any = module.act_fn(points)  # type: ignore[operator]
        return _gated_mlp if _close(F.silu(points), activated) else None
    parameters = [(name, parameter.ndim) for name, parameter in module.named_parameters()]
    return _norm if hasattr(module, "variance_epsilon") and parameters == [("weight", 1)] else None


def _norm(self: Any, hidden_states: Tensor) -> Tensor:
    return rms_norm(hidden_states.contiguous(), self.weight, self.variance_epsilon)


def _gated_mlp(self: Any, x: Tensor) -> Tensor:
    down: Tensor = self.down_proj(gated_silu(self.gate_proj(x), self.up_proj(x)))
    return down


def _agree(module: nn.Module, forward: Forward, dtype: torch.dtype) -> bool:
    weight: Any = getattr(module, "gate_proj", module).weight
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(1, TRIAL, weight.shape[-1], generator=generator) + 1).to(dtype)
    trials = (x * scale for scale in SCALES)
    return all(_close(forward(module, trial), module(trial)) for trial in trials)


def _close(found: Any, expected: Any) -> bool:
    if not isinstance(expected, Tensor) or found.shape != expected.shape:
        return False
    epsilon = torch.finfo(expected.dtype).eps
    scale = float(expected.abs().amax())
    return torch.allclose(found, expected, rtol=2 * epsilon, atol=2 * epsilon * scale)


def _fuse_rotary(file: Any) -> None:
    """Replace a modelling file's rotary embedding, for our own forward passes only: whoever runs
    its models beside us gets its own code."""
    original = getattr(file, ROTARY, None)
    if original is None or hasattr(original, "original"):
        return

    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **options: Any) -> Any:
        if rest or options or not in_forward() or not _rotates(q, k, cos, sin):
            return original(q, k, cos, sin, *rest, **options)
        return _rotated(q, cos, sin), _rotated(k, cos, sin)

    generator = torch.Generator().manual_seed(0)
    q, k, cos, sin = (
        torch.randn(1, *shape, generator=generator)
        for shape in [(4, 3, 16), (2, 3, 16), (3, 16), (3, 16)]
    )
    try:
        expected = original(q, k, cos, sin)
    except (RuntimeError, TypeError, ValueError, IndexError):  # takes other arguments
        return
    if not isinstance(expected, tuple) or len(expected) != 2:
        return
    if all(_close(_rotated(x, cos, sin), y) for x, y in zip((q, k), expected, strict=True)):
        apply.original = original  # type: ignore[attr-defined]
        setattr(file, ROTARY, apply)


def _rotates(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """[1, heads, tokens, dim], all of it rotated, on a CPU."""
    return (
        q.device.type == "cpu"
        and q.ndim == k.ndim == 4
        and q.shape[0] == 1
        and cos.shape == sin.shape == (1, q.shape[2], q.shape[3])
        and k.shape[2:] == q.shape[2:]
        and q.dtype is k.dtype is cos.dtype is sin.dtype
    )


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotate(x[0].transpose(0, 1), cos[0], sin[0]).transpose(0, 1)[None]
