"""Byte costs and capacities: pure integer arithmetic, the single source of every byte figure.

    B_sink + B_local + |F|·M_f + |ledger|·M_q  ≤  B_total        (paper §2.1, §2.3)

All costs are per layer and batch row. They are computed from shapes alone; `tiers.TierStore` holds
tensors whose summed `nbytes` equal them (lane padding of the kernel layout is reported apart).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.config import QEvictConfig
from engine.errors import BudgetError
from engine.windows import Grid

INDEX_BYTES = 8
"""int32 block id + float32 score, for every arena block and ledger entry."""
META_BYTES = 2
"""float16 scale or zero."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """What the bytes of one layer depend on: `element_bytes` is c_f of the stored full-precision tier."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    element_bytes: int

    @property
    def token_bytes(self) -> int:
        """Full-precision bytes of one token in one layer: 2 · H_kv · d_h · c_f."""
        return 2 * self.num_kv_heads * self.head_dim * self.element_bytes

    def full_kv_bytes(self, tokens: int) -> int:
        """M_FullKV = 2 · L · H_kv · d_h · S · c_f for all layers, one row (paper §3.1)."""
        return self.num_layers * self.token_bytes * tokens


@dataclass(frozen=True, slots=True)
class WindowCosts:
    """True persistent bytes of one window in one layer.

    `full` is M_f; `quant` is M_q = codes + metadata, where metadata counts scales, zeros and index.
    """

    full: int
    quant: int
    quant_codes: int

    @property
    def quant_metadata(self) -> int:
        return self.quant - self.quant_codes


def window_costs(config: QEvictConfig, shape: KVShape) -> WindowCosts:
    """M_f and M_q of one window, index included (paper §2.3).

    Paper silent: the index. Ours is 8 bytes for every decision group: one per layer, or one per KV head.
    """
    groups = shape.num_kv_heads if config.score_scope == "kv_head" else 1
    index = INDEX_BYTES * groups
    width = shape.num_kv_heads * shape.head_dim
    codes = 2 * width * config.window_size * config.bits // 8
    value_groups = 1 if config.value_group_size is None else shape.head_dim // config.value_group_size
    key_meta = 2 * META_BYTES * width
    value_meta = 2 * META_BYTES * shape.num_kv_heads * config.window_size * value_groups
    return WindowCosts(
        full=shape.token_bytes * config.window_size + index,
        quant=codes + key_meta + value_meta + index,
        quant_codes=codes,
    )


@dataclass(frozen=True, slots=True)
class Plan:
    """How one row's budget is spent, per layer. Capacities count windows.

    `total_bytes` is B_total; `smallest_bytes` the smallest budget that would be feasible.
    """

    planned_tokens: int
    total_bytes: int
    sink_blocks: int
    local_tokens: int
    local_blocks: int
    full_capacity: int
    quant_capacity: int
    costs: WindowCosts
    smallest_bytes: int

    @property
    def arena_blocks(self) -> int:
        """Blocks of the full-precision arena: sink, Full and the local region's peak."""
        return self.sink_blocks + self.full_capacity + self.local_blocks

    @property
    def persistent_bytes(self) -> int:
        """Bytes of all pools of one layer and row: what is allocated once and never exceeded."""
        return self.arena_blocks * self.costs.full + self.quant_capacity * self.costs.quant

    @property
    def notices(self) -> list[str]:
        """What a user should know about this plan; text keys, not sentences."""
        return ["no_full_history"] if self.full_capacity == 0 and self.quant_capacity > 0 else []


def make_plan(config: QEvictConfig, shape: KVShape, prompt_tokens: int, *, padded: bool = False) -> Plan:
    """Splits the budget into sink, local, Full and Quant (paper §2.3, equation for K_f and K_q).

    Args:
        config: settings; `planned_new_tokens` is added to the prompt.
        shape: the managed layers' shape.
        prompt_tokens: columns known when the capacities are fixed.
        padded: the row is left-padded: its sink may straddle one block more, and a block that is partly
            pad must stay in full precision.

    Raises:
        BudgetError: the budget cannot hold sink, local and one window; names the smallest that can.
    """
    planned = prompt_tokens + config.planned_new_tokens
    costs = window_costs(config, shape)
    grid = Grid(config.window_size, config.sink_tokens)
    sink_blocks = grid.sink_blocks + (1 if padded else 0)
    full_total = shape.token_bytes * planned
    smallest = _smallest_total(config, costs, sink_blocks)
    if config.kv_budget_bytes is not None:
        total = config.kv_budget_bytes // shape.num_layers
    elif config.kv_budget == 1.0:
        return _whole(config, costs, grid, planned, sink_blocks, full_total, smallest)
    else:
        total = int(config.kv_budget * full_total + 1e-6)
    local = _local_tokens(config, costs, total)
    local_blocks = (local + config.interval) // config.window_size
    history = total - (sink_blocks + local_blocks) * costs.full
    if history < _window(config, costs):
        share = _share_up(smallest, full_total)
        raise BudgetError(
            f"kv_budget must hold sink, local region and one window: {total:,} bytes per layer came, the smallest "
            f"feasible is {smallest:,}, a budget of {share:.4g} of the full cache at {planned:,} planned tokens. "
            "Raise the budget, or take a longer prompt or a smaller window.",
            smallest_bytes=smallest,
            smallest_share=share,
        )
    most = grid.max_history_windows(planned, local)
    full, quant = _split(config, costs, history, most)
    return Plan(planned, total, sink_blocks, local, local_blocks, full, quant, costs, smallest)


def _split(config: QEvictConfig, costs: WindowCosts, history: int, most: int) -> tuple[int, int]:
    """K_f and K_q: floored shares, then left-over bytes to Full, then Quant, then no idle slot."""
    share = config.quant_share
    quant_bytes = int(history * share + 1e-6) if share > 0 else 0
    full = 0 if share == 1.0 else (history - quant_bytes) // costs.full
    quant = quant_bytes // costs.quant
    left = history - full * costs.full - quant * costs.quant
    if share < 1.0:
        more = left // costs.full
        full, left = full + more, left - more * costs.full
    if share > 0.0:
        more = left // costs.quant
        quant, left = quant + more, left - more * costs.quant
    if share == 1.0:
        return 0, min(quant, most)
    full, quant = min(full, most), quant
    while full + quant > most and quant > 0:
        quant -= 1
        left += costs.quant
        if left >= costs.full and full < most:
            full, left = full + 1, left - costs.full
    if full + quant == most and costs.full > costs.quant:
        # Every window is resident: what is left over still buys precision.
        swaps = min(quant, left // (costs.full - costs.quant))
        full, quant = full + swaps, quant - swaps
    return full, quant


def _whole(
    config: QEvictConfig,
    costs: WindowCosts,
    grid: Grid,
    planned: int,
    sink_blocks: int,
    full_total: int,
    smallest: int,
) -> Plan:
    """Budget 1.0 means by definition: every window of the planned length held in Full."""
    local = config.local_tokens or _local_tokens(config, costs, full_total)
    local_blocks = (local + config.interval) // config.window_size
    full = grid.max_history_windows(planned, local)
    total = (sink_blocks + local_blocks + full) * costs.full
    return Plan(planned, total, sink_blocks, local, local_blocks, full, 0, costs, smallest)


def _local_tokens(config: QEvictConfig, costs: WindowCosts, total: int) -> int:
    """The largest multiple of Ω, at least one window, whose peak fits `local_share` of the budget.

    It leaves room for the sink, of a padded row too, and for one window: so that a larger budget is never
    infeasible where a smaller one was not, and the rows of a batch share one local region.
    """
    if config.local_tokens is not None:
        return config.local_tokens
    sink_blocks = Grid(config.window_size, config.sink_tokens).sink_blocks + 1
    room = total - sink_blocks * costs.full - _window(config, costs)
    peak_blocks = min(int(config.local_share * total), room) // costs.full
    interval_blocks = config.interval // config.window_size
    return max(1, peak_blocks - interval_blocks) * config.window_size


def _window(config: QEvictConfig, costs: WindowCosts) -> int:
    """Bytes of the cheapest history window that this configuration keeps."""
    return costs.quant if config.quant_share > 0 else costs.full


def _smallest_total(config: QEvictConfig, costs: WindowCosts, sink_blocks: int) -> int:
    """Smallest budget in bytes per layer: sink + local at its smallest peak + one window."""
    local = config.local_tokens or config.window_size
    blocks = sink_blocks + (local + config.interval) // config.window_size
    return blocks * costs.full + _window(config, costs)


def _share_up(part: int, whole: int) -> float:
    """part / whole, rounded up to 1e-4 so that the named budget really works."""
    return -(-part * 10_000 // max(1, whole)) / 10_000


def larger_plan(old: Plan, new: Plan) -> Plan:
    """`new` with capacities that are never smaller than `old`'s, and that fit the larger budget together."""
    costs, total = new.costs, max(old.total_bytes, new.total_bytes)
    local_blocks = max(old.local_blocks, new.local_blocks)
    history = total - (new.sink_blocks + local_blocks) * costs.full
    full = max(old.full_capacity, min(new.full_capacity, (history - old.quant_capacity * costs.quant) // costs.full))
    quant = max(old.quant_capacity, min(new.quant_capacity, (history - full * costs.full) // costs.quant))
    return replace(
        new,
        total_bytes=total,
        local_tokens=old.local_tokens,
        local_blocks=local_blocks,
        full_capacity=full,
        quant_capacity=quant,
    )
