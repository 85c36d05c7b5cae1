"""The memory of all resident adapters: rows of linear layers, and what else each one changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from kernels.lora import LoraPool
from worker.engine.adapter_extras import ExtraTensors, LoraWeights, ModuleExtras
from worker.engine.load_probe import Probed, check, probe_merged, probe_update
from worker.engine.lora import LoraLinear
from worker.protocol.errors import AdapterLoadError

Change = tuple[LoraWeights | None, ExtraTensors | None]


class TiedTensors(NamedTuple):
    """Implements ExtraTensors."""

    tensors: Mapping[str, Tensor]
    scale: float = 1.0
    nbytes: int = 0


class LoadedAdapter(Protocol):
    """An adapter in host memory, checked against the model. `invocation`: the tokens from which
    on an activated LoRA applies, empty for one that applies throughout."""

    @property
    def modules(self) -> Mapping[str, LoraWeights]: ...
    @property
    def extras(self) -> Mapping[str, ExtraTensors]: ...
    @property
    def rank(self) -> int: ...
    @property
    def invocation(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...


class Target(Protocol):
    """Something that adapters change in another way than by rows of the pool."""

    @property
    def module(self) -> nn.Module: ...
    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """What an adapter may change here, see `worker.protocol.peft.validate`, by the end of
        its name ("" for the target's own)."""

    def held(self, lora: LoraWeights | None, host: ExtraTensors | None) -> int:
        """Values that `put` would keep of an adapter."""

    def put(self, row: int, extras: ModuleExtras) -> None:
        """Keep what the adapter whose first row is `row` changes."""

    def drop(self, row: int) -> None: ...


class OtherTarget(Target, Protocol):
    """One that is no linear layer of the pool."""

    def probe(self, row: int, lora: LoraWeights | None, host: ExtraTensors | None) -> Probed: ...


class RankPool:
    """`rank` rows in every wrapped module; an adapter of rank r owns the same r rows in each.

    Modules that an adapter doesn't change, or changes with a smaller rank, have scale 0 there.
    """

    def __init__(
        self,
        modules: Mapping[str, LoraLinear],
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        others: Mapping[str, OtherTarget] | None = None,
    ) -> None:
        self.rank = rank
        self._modules = modules
        self._others = others or {}
        self._tied = _tied(self._others)
        self._dtype, self._device = dtype, device
        for module in modules.values():
            module.attach(rank, dtype, device)

    @staticmethod
    def bytes_per_rank(modules: Mapping[str, LoraLinear], dtype: torch.dtype) -> int:
        """Device memory of one row in all modules."""
        return sum(
            LoraPool.bytes_per_row(module.in_features, module.out_features, dtype)
            for module in modules.values()
        )

    def extra_bytes(self, adapter: LoadedAdapter) -> int:
        """Device memory that `adapter` takes besides its rows."""
        targets: dict[str, Target] = {**self._others, **self._modules}
        changes = self._changes(adapter)
        held = [targets[name].held(*change) for name, change in changes.items() if name in targets]
        return sum(held) * self._dtype.itemsize

    @torch.inference_mode()
    def write(self, rows: Sequence[int], adapter: LoadedAdapter) -> None:
        """Copy `adapter` into `rows`, which no running sequence uses.

        Raises AdapterLoadError when the model has no module of a name that the adapter changes,
        and when a copy of a base weight that the file holds is not the base's.
        """
        changes = self._changes(adapter)
        unknown = changes.keys() - self._modules.keys() - self._others.keys()
        if unknown:
            message = f"{sorted(unknown)[0]}: the model has no such module"
            raise AdapterLoadError("adapter_invalid", message)
        self.release(rows)
        for name, module in self._modules.items():
            module.write(list(rows), adapter.modules.get(name))
        for name, (weights, host) in changes.items():
            if host is not None or name not in self._modules:
                self._put(name, rows[0], weights, host)

    @torch.inference_mode()
    def probe(self, rows: Sequence[int], adapter: LoadedAdapter, *, again: bool = False) -> None:
        """See `worker.engine.load_probe`. `again`: this very adapter has passed before, so that
        only its rows are new: one layer of each kind tells. Raises AdapterLoadError.
        """
        if not adapter.modules and not adapter.extras:
            raise AdapterLoadError("adapter_invalid", "it changes no module of the model")
        for name, probed in self._probed(rows, adapter, again):
            check(name, probed, self._dtype)

    def _probed(
        self, rows: Sequence[int], adapter: LoadedAdapter, again: bool
    ) -> Iterator[tuple[str, Probed]]:
        kinds: set[tuple[str, ...]] = set()
        for name, (weights, host) in sorted(self._changes(adapter).items()):
            linear = self._modules.get(name)
            if linear is None:
                if not again:
                    yield name, self._others[name].probe(rows[0], weights, host)
                continue
            if not again:
                yield name, Probed(linear.kept(rows[0]))
            if weights is not None and not again:
                yield name, probe_update(linear, rows, weights)
            kind = () if host is None else tuple(sorted(host.tensors))
            if kind not in kinds:
                yield name, probe_merged(linear, rows, weights, host)
            kinds.add(kind)

    def release(self, rows: Sequence[int]) -> None:
        """Free what the adapter of `rows` keeps besides them. None of its sequences runs."""
        for target in [*self._modules.values(), *self._others.values()]:
            target.drop(rows[0])

    def _changes(self, adapter: LoadedAdapter) -> dict[str, Change]:
        """By module. Trained token rows of an embedding count in an output head that shares its
        weight and has none of its own."""
        names = adapter.modules.keys() | adapter.extras.keys()
        changes = {name: (adapter.modules.get(name), adapter.extras.get(name)) for name in names}
        for head, table in self._tied.items():
            rows, host = adapter.extras.get(table), adapter.extras.get(head)
            if rows is None or "token_rows" not in rows.tensors:
                continue
            own = {} if host is None else host.tensors
            shared = {name: rows.tensors[name] for name in ("token_ids", "token_rows")}
            changes[head] = adapter.modules.get(head), TiedTensors({**shared, **own})
        return changes

    def _put(
        self, name: str, row: int, weights: LoraWeights | None, host: ExtraTensors | None
    ) -> None:
        target: Target = self._modules.get(name) or self._others[name]
        copy = None if host is None else host.tensors.get("base_copy")
        if copy is not None and not _same(copy.to(self._device), target.module):
            message = f"{name}: the file's base_layer.weight is not the base model's"
            raise AdapterLoadError("adapter_invalid", message)
        target.put(row, ModuleExtras.on(self._device, self._dtype, host, weights))


def _tied(others: Mapping[str, Target]) -> dict[str, str]:
    """Output heads that share an embedding's weight, with its name."""
    tables = {
        id(t.module.weight): n for n, t in others.items() if isinstance(t.module, nn.Embedding)
    }
    heads = {name: target.module for name, target in others.items() if ".tied" in target.shapes}
    return {name: tables[id(module.weight)] for name, module in heads.items()}


def _same(copy: Tensor, module: nn.Module) -> bool:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return torch.equal(copy.to(weight.dtype), weight) or torch.equal(copy, weight.to(copy.dtype))
