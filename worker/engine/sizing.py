"""How a device's memory is divided, and when decoding stops being bound by it. Arithmetic only.

weights | reordered copy | adapter pool | other adapter memory | activations | keys and values

together 90 % of a GPU. A CPU's memory belongs to others too: keys and values take only a share of
what the rest leaves free, and at most CPU_MOST.
"""

from __future__ import annotations

from dataclasses import dataclass

from worker.engine.config import blocks_held

DEVICE_SHARE = 0.9
CPU_SHARE = 0.125
CPU_MOST = 4 * 2**30

PACKED_SHARE = 0.25
"""Of the free memory: the most that a second copy of the weights may take unasked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """What one model needs. All in bytes but `parameters`, `active_parameters` (those that one
    token's matrix products read: without the embedding table, and of experts only the chosen
    ones) and `attention_flops` (per token and token of context).

    `weights`: all parameters. `packable`: those that a CPU multiplies faster from a reordered copy
    (`worker.engine.packed_linear`). `kv_token`: keys and values of one token; `kv_slot`: its share
    of a block, in which only the layers of one KV group lie (`windows`: what each group sees).
    `adapter_rank`: one row of the rank pool in all modules. `activations`: what the widest step
    needs at once.
    """

    parameters: int
    active_parameters: int
    weights: int
    kv_token: int
    kv_slot: int
    adapter_rank: int
    activations: int
    attention_flops: int
    context_tokens: int
    packable: int = 0
    windows: tuple[int | None, ...] = (None,)

    def kv_read(self, context: int) -> float:
        """Bytes of keys and values that one token sees after `context` others."""
        seen = sum(min(context, window or context) for window in self.windows)
        return self.kv_token * seen / len(self.windows)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes of each part; `blocks` of `block_size` tokens fit the last one (0: none do). They
    serve KV groups that see `windows`."""

    weights: int
    adapters: int
    adapter_memory: int
    activations: int
    keys_values: int
    blocks: int
    block_size: int
    packed: int = 0
    windows: tuple[int | None, ...] = (None,)

    @property
    def kv_tokens(self) -> int:
        """Tokens of sequences that are no longer than any window."""
        return self.blocks // len(self.windows) * self.block_size

    def sequences(self, tokens: int, shared: int = 0) -> int:
        """Sequences of `tokens` tokens that fit at once when the first `shared` are one prefix,
        stored once as far as it fills blocks (and lies in reach of a group's window)."""
        entries = -(-tokens // self.block_size)
        common = min(shared, tokens - 1) // self.block_size
        own = once = 0
        for window in self.windows:
            first = entries - blocks_held((window,), self.block_size, tokens)
            own += entries - max(first, common)
            once += max(0, common - first)
        return max(0, self.blocks - once) // own


def plan_memory(
    size: ModelSize,
    *,
    device_type: str,
    free_memory: int,
    kv_memory: int | None,
    adapter_rank: int,
    adapter_memory: int,
    block_size: int,
    pack: bool | None = None,
) -> MemoryPlan:
    """`free_memory`: what Batten may use of the device before it loads a model. `kv_memory` where
    it is given, else what the rest leaves. `pack`: see `packs`."""
    free = free_memory - size.weights
    packed = size.packable if packs(size.packable, free, pack) else 0
    adapters = size.adapter_rank * adapter_rank
    free -= packed + adapters + adapter_memory
    memory = kv_memory or memory_for_kv(free, size.activations, device_type)
    return MemoryPlan(
        weights=size.weights,
        packed=packed,
        adapters=adapters,
        adapter_memory=adapter_memory,
        activations=size.activations,
        keys_values=memory,
        blocks=memory // (size.kv_slot * block_size),
        block_size=block_size,
        windows=size.windows,
    )


def packs(packable: int, free: int, wanted: bool | None) -> bool:
    """Whether weights of `packable` bytes get a reordered copy while `free` bytes are left."""
    fits = packable <= free * PACKED_SHARE
    return packable > 0 and (fits if wanted is None else wanted)


def memory_for_kv(free: int, activations: int, device_type: str) -> int:
    """`free`: bytes beside all that is loaded, and without what adapters may still take."""
    rest = max(0, free - activations)
    return rest if device_type == "cuda" else min(int(rest * CPU_SHARE), CPU_MOST)


@dataclass(frozen=True, slots=True)
class Roofline:
    """A device's peak: `flops` (multiplications and additions) and `bandwidth` (bytes) a second."""

    flops: float
    bandwidth: float

    def step_seconds(self, size: ModelSize, sequences: int, context: int) -> float:
        """A decode step of `sequences` with `context` tokens each, at the peak."""
        return max(self._memory(size, sequences, context), self._compute(size, sequences, context))

    def compute_bound_from(self, size: ModelSize, context: int) -> int | None:
        """The smallest batch whose decode step takes longer to compute than to read; None when
        each sequence's own keys and values take longer to read than its token to compute."""
        fixed = self._memory(size, 0, context)
        per_sequence = self._compute(size, 1, context) - (self._memory(size, 1, context) - fixed)
        if per_sequence <= 0:
            return None
        batch = max(1, int(fixed / per_sequence))
        while self._compute(size, batch, context) < self._memory(size, batch, context):
            batch += 1
        return batch

    def _memory(self, size: ModelSize, sequences: int, context: int) -> float:
        return (size.weights + sequences * size.kv_read(context)) / self.bandwidth

    def _compute(self, size: ModelSize, sequences: int, context: int) -> float:
        attention = size.attention_flops * size.kv_read(context) / size.kv_token
        return sequences * (2 * size.active_parameters + attention) / self.flops
