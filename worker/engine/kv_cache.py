"""Keys and values of all layers, in blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.kv_write import copy_blocks


@dataclass(frozen=True, slots=True)
class LayerKv:
    """What one attention layer stores for each token."""

    layer: int
    heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class KvLayout:
    """What a model stores for each token, and so how many blocks fit into memory."""

    layers: tuple[LayerKv, ...]
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        values = sum(kv.heads * (kv.key_dim + kv.value_dim) for kv in self.layers)
        return values * self.dtype.itemsize

    def num_blocks(self, memory: int, block_size: int) -> int:
        """Whole blocks of `block_size` tokens in `memory` bytes."""
        return memory // (self.bytes_per_token * block_size)


class KvCache:
    """Per layer, keys [blocks, kv_heads, block_size, key_dim] and values likewise.

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

        self._layers = {
            kv.layer: (zeros(kv.heads, kv.key_dim), zeros(kv.heads, kv.value_dim))
            for kv in layout.layers
        }

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """(keys, values) of one layer."""
        return self._layers[index]

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (source, target) in every layer."""
        copy_blocks([cache for pair in self._layers.values() for cache in pair], copies)
