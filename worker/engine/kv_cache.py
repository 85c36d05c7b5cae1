"""Keys and values of all layers, in blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.kv_write import copy_blocks

PADDING = 1 / 8
"""Most of the pool that may lie idle because groups of layers do not come out even."""


@dataclass(frozen=True, slots=True)
class LayerKv:
    """What one attention layer stores for each token, and how many tokens it sees (None: all)."""

    layer: int
    heads: int
    key_dim: int
    value_dim: int
    window: int | None = None

    @property
    def values(self) -> int:
        """Numbers per token."""
        return self.heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers that share block tables, because they see equally far."""

    window: int | None
    layers: tuple[LayerKv, ...]


@dataclass(frozen=True, slots=True)
class KvLayout:
    """What a model stores for each token, and so how many blocks fit into memory.

    A block holds some tokens' keys and values in as many layers as the largest group has, so that
    any block can serve any group: the pool divides itself between those that see everything and
    those that soon forget. For 4 layers that see all and 8 that see 512 tokens:

        groups   (None, layers 3 7 11 15)  (512, layers 0 1 2 4)  (512, layers 5 6 8 9)
    """

    groups: tuple[KvGroup, ...]
    dtype: torch.dtype

    @classmethod
    def of(
        cls, layers: Iterable[LayerKv], dtype: torch.dtype, context_tokens: int | None = None
    ) -> KvLayout:
        """A window as long as the context is none."""
        by_window: dict[int | None, list[LayerKv]] = {}
        for layer in layers:
            sees_all = layer.window is None or (context_tokens or layer.window + 1) <= layer.window
            by_window.setdefault(None if sees_all else layer.window, []).append(layer)
        return cls(_groups(by_window), dtype)

    @property
    def layers(self) -> tuple[LayerKv, ...]:
        found = [layer for group in self.groups for layer in group.layers]
        return tuple(sorted(found, key=lambda layer: layer.layer))

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(group.window for group in self.groups)

    @property
    def bytes_per_token(self) -> int:
        """In all layers."""
        return sum(layer.values for layer in self.layers) * self.dtype.itemsize

    @property
    def bytes_per_slot(self) -> int:
        """A token's share of a block."""
        widest = max(sum(layer.values for layer in group.layers) for group in self.groups)
        return widest * self.dtype.itemsize

    def num_blocks(self, memory: int, block_size: int) -> int:
        """Whole blocks of `block_size` tokens in `memory` bytes."""
        return memory // (self.bytes_per_slot * block_size)


class KvCache:
    """Per layer, keys [blocks, kv_heads, block_size, key_dim] and values likewise.

    The i-th layers of all groups share their tensors: a block belongs to one group at a time.
    Zeroed at first: a slot that was never written must not hold NaN.
    """

    def __init__(
        self, layout: KvLayout, num_blocks: int, block_size: int, device: torch.device | str
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_size = block_size

        def zeros(heads: int, dim: int) -> Tensor:
            shape = (num_blocks, heads, block_size, dim)
            return torch.zeros(shape, dtype=layout.dtype, device=device)

        widest = max((group.layers for group in layout.groups), key=len)
        self._tensors = [
            (zeros(kv.heads, kv.key_dim), zeros(kv.heads, kv.value_dim)) for kv in widest
        ]
        self._places = {
            kv.layer: (group, place)
            for group, members in enumerate(layout.groups)
            for place, kv in enumerate(members.layers)
        }

    def group(self, layer: int) -> int:
        """Whose block tables the layer uses."""
        return self._places[layer][0]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """(keys, values) of one layer."""
        return self._tensors[self._places[index][1]]

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for pair in self._tensors for tensor in pair]

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (source, target) in every layer."""
        copy_blocks(self.tensors, copies)


def _groups(by_window: dict[int | None, list[LayerKv]]) -> tuple[KvGroup, ...]:
    """Equally large groups, those that see most first. Layers of different shapes cannot take
    each other's blocks: then all keep what the farthest-seeing one needs."""
    if not by_window:
        return ()
    order = sorted(by_window, key=lambda window: (window is not None, -(window or 0)))
    everything = [layer for layers in by_window.values() for layer in layers]
    shapes = {(layer.heads, layer.key_dim, layer.value_dim) for layer in everything}
    if len(order) == 1 or len(shapes) > 1:
        ordered = sorted(everything, key=lambda layer: layer.layer)
        return (KvGroup(order[0], tuple(ordered)),)
    size = _group_size([len(layers) for layers in by_window.values()])
    return tuple(
        KvGroup(window, tuple(by_window[window][first : first + size]))
        for window in order
        for first in range(0, len(by_window[window]), size)
    )


def _group_size(counts: Sequence[int]) -> int:
    """The largest, so that tables are few, that leaves little padding."""
    for size in range(max(counts), 1, -1):
        if sum(-(-count // size) * size for count in counts) <= (1 + PADDING) * sum(counts):
            return size
    return 1
