"""Feeds a cache and the oracle the same random queries, keys and values, without a model in between."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from engine.attention import unavailable
from engine.cache import QEvictCache
from engine.config import QEvictConfig
from engine.quant import unpack
from engine.tier_board import RoutingRecord
from engine.tiers import SHADOW_BASE
from engine.trace import Tier
from tests.engine.oracle import Oracle, turn
from tests.tiny import tiny_model

torch.set_num_threads(1)

BACKENDS = [name for name in ("eager", "sdpa", "fused") if unavailable(name, "cpu", 16) is None]
"""Backends that run on this machine's CPU."""

THETA = 1e4
NUMPY = {torch.float16: np.float16, torch.float32: np.float32}


@lru_cache(maxsize=32)
def shared_model(
    layers: int, groups: int, kv_heads: int, dim: int, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """A model of the right shape: its weights do not matter here."""
    return tiny_model(num_layers=layers, groups=groups, num_kv_heads=kv_heads, head_dim=dim, dtype=dtype)


class Drive:
    """One cache, driven by hand.

    Args:
        config: settings.
        layers, groups, kv_heads, dim: shape; `groups` query heads per KV head.
        pads: left-padding columns of every batch row.
        dtype: of queries, keys and values.
        spread: standard deviation of queries and keys: larger is more peaked.
        softcap: of the logits.
        check_bytes: after every forward, compare the bytes of the real tensors with the plan.
    """

    def __init__(
        self,
        config: QEvictConfig,
        *,
        layers: int = 2,
        groups: int = 2,
        kv_heads: int = 2,
        dim: int = 16,
        pads: tuple[int, ...] = (0,),
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        spread: float = 1.3,
        softcap: float | None = None,
        row_seeds: tuple[int, ...] | None = None,
    ) -> None:
        self.config, self.layers, self.kv_heads, self.dim = config, layers, kv_heads, dim
        self.heads, self.pads, self.dtype, self.softcap = groups * kv_heads, list(pads), dtype, softcap
        self.cache = QEvictCache(shared_model(layers, groups, kv_heads, dim, dtype), config)
        self.records: list[RoutingRecord] = []
        self.cache.on_route = self.records.append
        self.spread = spread
        self.inv_freq = THETA ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
        seeds = row_seeds or tuple(seed * 1000 + b for b in range(len(pads)))
        self.draws = [np.random.default_rng(s) for s in seeds]
        self.columns = 0
        self.seen: list[list[tuple[Tensor, Tensor, Tensor]]] = []
        """All forwards, per layer: queries, keys, values as the cache got them."""
        self.outputs: list[list[Tensor]] = []

    @property
    def batch(self) -> int:
        return len(self.pads)

    def draw(self, tokens: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Random q, post-RoPE k, v for every layer. A row's numbers do not depend on its neighbours."""
        shape = (self.layers, tokens, self.dim)
        rows = []
        for b, draw in enumerate(self.draws):
            q = draw.normal(size=(self.heads, *shape)) * self.spread
            k = draw.normal(size=(self.kv_heads, *shape)) * self.spread
            v = draw.normal(size=(self.kv_heads, *shape))
            at = np.arange(self.columns, self.columns + tokens) - self.pads[b]
            for t in range(tokens):
                for head in range(self.kv_heads):
                    for layer in range(self.layers):
                        k[head, layer, t] = turn(k[head, layer, t], max(0, int(at[t])), self.inv_freq)
            rows.append((q, k, v))
        out = []
        for layer in range(self.layers):
            q, k, v = (torch.from_numpy(np.stack([row[i][:, layer] for row in rows])).to(self.dtype) for i in range(3))
            out.append((q, k, v))
        return out

    def feed(self, new: list[tuple[Tensor, Tensor, Tensor]]) -> list[Tensor]:
        """One forward: what a model would do with its cache, layer by layer."""
        tokens = new[0][0].shape[2]
        self.columns += tokens
        columns = torch.arange(self.columns)
        mask = (columns[None] >= torch.tensor(self.pads)[:, None]).long() if any(self.pads) else None
        positions = columns[None, self.columns - tokens :] - torch.tensor(self.pads)[:, None]
        outputs = []
        for layer, (q, k, v) in zip(self.cache.layers, new, strict=True):
            tagged, values = layer.update(k, v)
            outputs.append(
                layer.attend(
                    torch.nn.Identity(),
                    q,
                    tagged,
                    values,
                    mask,
                    scale=self.dim**-0.5,
                    softcap=self.softcap,
                    position_ids=positions.clamp_min(0),
                )
            )
        self.seen.append(new)
        self.outputs.append(outputs)
        return outputs

    def step(self, tokens: int) -> list[Tensor]:
        return self.feed(self.draw(tokens))

    def run(self, steps: list[int]) -> Drive:
        for tokens in steps:
            self.step(tokens)
        return self

    def oracle(self) -> Oracle:
        """The oracle with this cache's capacities; the cache must have routed once."""
        plans = self.cache.state.pool.plans
        return Oracle(
            self.config,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv_heads,
            pads=self.pads,
            shift=self.pads,
            local_tokens=plans[0].local_tokens,
            full_capacity=[plan.full_capacity for plan in plans],
            quant_capacity=[plan.quant_capacity for plan in plans],
            inv_freq=self.inv_freq,
            scale=self.dim**-0.5,
            softcap=self.softcap,
            stored=NUMPY[self.cache.stored_dtype],
        )

    def replay(self) -> tuple[Oracle, list[list[NDArray[Any]]]]:
        """Runs the oracle over all that was fed; capacities must not have grown meanwhile."""
        oracle = self.oracle()
        outputs = [
            oracle.forward([tuple(x.double().numpy() for x in layer) for layer in step])  # type: ignore[misc]
            for step in self.seen
        ]
        return oracle, outputs

    # ---- what the engine holds, row by row

    def rows(self) -> list[RowView]:
        return [RowView(self.cache, n) for n in range(self.cache.state.shape.rows)]


class RowView:
    """One decision row of the real store, read back slot by slot."""

    def __init__(self, cache: QEvictCache, n: int) -> None:
        self.store, self.n, self.cache = cache.state.pool, n, cache

    @property
    def arena(self) -> dict[int, int]:
        """Block to arena slot."""
        ids = self.store.arena_ids[self.n].tolist()
        found = {block: slot for slot, block in enumerate(ids) if block >= 0}
        assert len(found) == sum(block >= 0 for block in ids), "a block lies in two slots"
        return found

    @property
    def live(self) -> dict[int, int]:
        """Block to ledger slot of live entries."""
        return {b: slot for slot, b in enumerate(self.store.ledger_ids[self.n].tolist()) if b >= 0}

    @property
    def shadows(self) -> dict[int, int]:
        """Block to ledger slot of entries whose window was promoted."""
        ids = self.store.ledger_ids[self.n].tolist()
        return {SHADOW_BASE - b: slot for slot, b in enumerate(ids) if b <= SHADOW_BASE}

    @property
    def board(self) -> list[Tier]:
        return [Tier(t) for t in self.cache.board[self.n].tolist()]

    def raw_entry(self, slot: int) -> tuple[bytes, ...]:
        """All bytes of a ledger entry."""
        packed = self.store.read_entries(torch.tensor([self.n]), torch.tensor([slot]))
        names = ("key_codes", "key_scale", "key_zero", "value_codes", "value_scale", "value_zero")
        return tuple(getattr(packed, name).contiguous().numpy().tobytes() for name in names)

    def codes(self, slot: int) -> tuple[Tensor, Tensor]:
        """Unpacked key codes [heads, d, Ω] and value codes [heads, Ω, d]."""
        packed = self.store.read_entries(torch.tensor([self.n]), torch.tensor([slot]))
        bits = self.cache.config.bits
        return unpack(packed.key_codes, bits, -1)[0], unpack(packed.value_codes, bits, -2)[0]


def check_prefixes(cache: QEvictCache) -> None:
    """Occupied arena slots and live ledger entries are prefixes, and counts say how long."""
    store = cache.state.pool
    held = store.arena_ids >= 0
    slots = torch.arange(store.slots)
    assert torch.equal(held, slots[None] < store.arena_count[:, None])
    live = store.ledger_ids >= 0
    places = torch.arange(store.ledger_ids.shape[1])
    assert torch.equal(live, places[None] < store.live_count[:, None])
    used = (store.ledger_ids != -1).sum(1)
    assert bool((used <= store.quant_capacity).all()), "more ledger entries than are paid for"


def check_bytes(cache: QEvictCache) -> None:
    """Bytes of the real tensors equal the formula and fit the budget."""
    store = cache.state.pool
    shape = cache.state.shape
    widest = max(plan.arena_blocks for plan in store.plans), max(plan.quant_capacity for plan in store.plans)
    costs = store.plans[0].costs
    formula = (widest[0] * costs.full + widest[1] * costs.quant) * shape.num_layers * shape.batch
    real = sum(tensor.numel() * tensor.element_size() for tensor in store.persistent_tensors().values())
    assert real - store.lane_padding_bytes == formula
    for plan in store.plans:
        assert plan.persistent_bytes <= plan.total_bytes
