"""From an adapter's reference to its tensors: what the engine's adapter cache calls."""

from __future__ import annotations

from worker.adapters.loader import LoadedAdapter, load_adapter
from worker.adapters.store import AdapterStore
from worker.protocol import peft
from worker.protocol.types import AdapterRef


class AdapterSource:
    """Fetches and loads adapters for one model, whose modules have `shapes` (out, in)."""

    def __init__(self, store: AdapterStore, shapes: peft.Shapes) -> None:
        self._store = store
        self._shapes = shapes

    def __call__(self, adapter: AdapterRef) -> LoadedAdapter:
        """Raises AdapterLoadError."""
        return load_adapter(self._store.fetch(adapter.digest), self._shapes)
