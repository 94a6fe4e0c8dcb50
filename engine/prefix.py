"""A document that is asked again: compressed pools kept after its last token, and put back.

A snapshot holds the tiers as they stood when the document ended and nothing else: a fraction of what
the full cache would keep. The store is bounded in bytes and forgets what was used longest ago. Its
bytes are the product's, not the run's: they are reported apart. One batch row; no open chunk.
"""

from __future__ import annotations

import copy
import hashlib
import json
import threading
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from engine.attention.state import KVState
from engine.budget import Plan
from engine.cache import QEvictCache, QEvictLayer, RoutingRecord
from engine.config import QEvictConfig
from engine.errors import CacheUseError
from engine.models import LoadedModel
from engine.tiers import TierStore

DEFAULT_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class PartPools:
    """The layers of one device: their state without its pools, and copies of these, in `dtype`."""

    state: KVState
    pools: dict[str, Tensor]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A cache as it stood after a routing event, and the logits of its last token.

    `nbytes` counts the copied tensors.
    """

    parts: list[PartPools]
    plans: list[Plan]
    board: Tensor
    aged: int
    events: list[RoutingRecord]
    stock_layers: list[Any]
    logits: Tensor

    @property
    def nbytes(self) -> int:
        records = sum(r.before.nbytes + r.after.nbytes + r.scores.nbytes for r in self.events)
        pools = sum(pool.nbytes for part in self.parts for pool in part.pools.values())
        return pools + self.board.nbytes + self.logits.nbytes + records


def take(cache: QEvictCache, events: list[RoutingRecord], logits: Tensor) -> Snapshot:
    """Copies a cache right after a routing event.

    Raises:
        CacheUseError: a chunk is staged, or queries wait to be scored.
    """
    return Snapshot(
        parts=[_copied(state) for state in cache.states],
        plans=list(cache.lead.pool.plans),
        board=cache.board.clone(),
        aged=cache.aged_blocks,
        events=list(events),
        stock_layers=[copy.deepcopy(layer) for layer in cache.layers if not isinstance(layer, QEvictLayer)],
        logits=logits.clone(),
    )


def _copied(state: KVState) -> PartPools:
    if state.staging is not None or (state.ring is not None and state.ring.count):
        raise CacheUseError("a snapshot must be taken right after a routing event.")
    store = state.pool
    pools = {name: tensor.clone() for name, tensor in store.persistent_tensors().items()}
    pools.update(arena_count=store.arena_count.clone(), live_count=store.live_count.clone())
    bare = replace(state, store=None, ring=None, arena_bias=torch.empty(0), pads=list(state.pads))
    return PartPools(bare, pools, store.dtype)


def put(cache: QEvictCache, snapshot: Snapshot) -> None:
    """Brings a fresh cache of the same model and settings to where the snapshot was taken.

    Raises:
        CacheUseError: the snapshot's layers lie on other devices than the cache's.
    """
    lie = [(part.device, part.count) for part in cache.parts]
    if lie != [(kept.state.device, kept.state.shape.num_layers) for kept in snapshot.parts]:
        raise CacheUseError("a snapshot can be put back only where every layer lies on the device that it lay on.")
    states = []
    for part, kept in zip(cache.parts, snapshot.parts, strict=True):
        part.rope.ensure(kept.state.columns)
        state = replace(kept.state, rope=part.rope, pads=list(kept.state.pads), config=cache.config)
        store = TierStore(cache.config, state.shape, snapshot.plans, kept.dtype, state.device)
        for name, tensor in kept.pools.items():
            getattr(store, name).copy_(tensor)
        state.store = store
        state.refresh()
        states.append(state)
    stock = iter(copy.deepcopy(snapshot.stock_layers))
    cache.layers = [layer if isinstance(layer, QEvictLayer) else next(stock) for layer in cache.layers]
    cache.adopt(states, snapshot.plans, snapshot.board.clone(), snapshot.aged, len(snapshot.events))


class PrefixStore:
    """Snapshots by model, settings and tokens; bounded, least recently used first out. Safe from any thread."""

    def __init__(self, max_bytes: int = DEFAULT_BYTES) -> None:
        self.max_bytes = max_bytes
        self._held: OrderedDict[str, Snapshot] = OrderedDict()
        self._lock = threading.Lock()
        self.hits = 0
        self.misses = 0

    @staticmethod
    def key(loaded: LoadedModel, config: QEvictConfig, token_ids: list[int], backend: str) -> str:
        """What must be the same for a snapshot to be usable."""
        facts = [loaded.fingerprint, loaded.weights, loaded.dtype, loaded.device, backend, config.to_dict(), token_ids]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def get(self, key: str) -> Snapshot | None:
        """The snapshot, now the most recently used one; None where there is none."""
        with self._lock:
            found = self._held.get(key)
            if found is None:
                self.misses += 1
                return None
            self.hits += 1
            self._held.move_to_end(key)
            return found

    def add(self, key: str, snapshot: Snapshot) -> None:
        """Keeps a snapshot; one larger than the whole store is not kept."""
        with self._lock:
            self._held.pop(key, None)
            if snapshot.nbytes > self.max_bytes:
                return
            self._held[key] = snapshot
            while sum(held.nbytes for held in self._held.values()) > self.max_bytes:
                self._held.popitem(last=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all snapshots."""
        with self._lock:
            return sum(held.nbytes for held in self._held.values())

    def bytes_under(self, beginning: str) -> int:
        """Bytes of the snapshots whose keys begin so."""
        with self._lock:
            return sum(held.nbytes for key, held in self._held.items() if key.startswith(beginning))

    def __len__(self) -> int:
        return len(self._held)
