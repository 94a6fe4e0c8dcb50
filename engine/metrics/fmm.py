"""Future missed mass, live: the accumulator that reduces FullKV's attention as it appears.

Attention probabilities of the reference exist for one layer and one chunk at a time. `FutureMass` reduces
them at once, for all routing events whose future they belong to. Knows torch and the tiers after each event;
knows no model, no cache, no scores. The definitions stand in `engine.metrics.mass` and `engine.metrics.churn`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.metrics.churn import selection_churn
from engine.metrics.mass import SCOPES, HorizonMass, Scope
from engine.trace import LateMetrics, Tier

_EVICTED, _QUANT, _FULL, _PROTECTED, _NONE = range(5)
"""What a block counts as in the sums of one event; _NONE: it did not exist at the event, or is cut by it."""
_KINDS = 4


@dataclass(slots=True)
class _Cut:
    """The last block of an event off the grid: columns [low, high) of it existed, and what it counted as."""

    low: int
    high: int
    classes: Tensor
    """uint8 [layers, groups]."""


@dataclass(slots=True)
class _Pending:
    """One event whose future has not ended. Its tensors lie in slot `slot` of the accumulator."""

    event_id: int
    boundary: int
    blocks: int
    churn: float | None
    cut: _Cut | None


@dataclass(slots=True)
class _Plan:
    """Which events one chunk of queries feeds: the same for all layers, so it is made once."""

    first: int = 0
    last: int = 0
    """Slots [first, last) are fed."""
    queries: list[tuple[int, int]] = field(default_factory=list)
    """Distinct ranges of the chunk's queries that the events want."""
    choice: Tensor | None = None
    """int64 [events], which range each event takes; None where there is only one."""
    choices: list[int] = field(default_factory=list)
    blocks: int = 0
    """Blocks that the widest of these events knows."""


class FutureMass:
    """Accumulates, for every routing event, where FullKV's next H queries look (paper §3.5, Table 14, Figure 1).

    FMM_H(r) = Σ_{τ=r+1..min(r+H,T)} Σ_{i∈E_r} A_τ(i) / Σ_{τ=r+1..min(r+H,T)} Σ_{i≤r} A_τ(i)

    A ratio of sums for each layer and query head, then the mean. Only positions that existed at the event count.
    Paper silent: events near the end. As the formula says, they use what future there is; with
    `full_horizon_only` they yield nothing instead.

    Columns are those of the batch row, padding included: pads have no mass. Block b of the grid covers columns
    [bΩ − offset, (b+1)Ω − offset), offset = −n_sink mod Ω, so that the sink fills whole blocks.

    The order of calls, inside or outside of inference mode: `open` at each event; `observe` for each layer of
    each chunk, in order, once all events with a boundary inside the chunk are open; then `close_due`, and
    `finish` at the end of the run.

    Args:
        num_layers: layers that the cache manages; `observe` counts them from 0.
        num_heads: query heads of a layer.
        window_size: Ω, tokens.
        sink_tokens: n_sink, tokens.
        horizon: H, queries.
        groups: decisions per layer: 1, or the number of KV heads (`score_scope="kv_head"`).
        scope: denominator of the mass shares in `LateMetrics`; both FMM scopes are always there.
        full_horizon_only: drop events that the run's end cuts short.
        regret_top: evicted windows named per event.
        keep: keep the per-head `HorizonMass` of every closed event in `closed`.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(
        self,
        num_layers: int,
        num_heads: int,
        window_size: int,
        sink_tokens: int,
        *,
        horizon: int = 32,
        groups: int = 1,
        scope: Scope = "all",
        full_horizon_only: bool = False,
        regret_top: int = 16,
        keep: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        if min(num_layers, num_heads, window_size, horizon, groups) < 1 or min(sink_tokens, regret_top) < 0:
            raise ValueError("layers, heads, window_size, horizon and groups must be 1 or more.")
        if num_heads % groups:
            raise ValueError(f"num_heads must be a multiple of groups, got {num_heads} and {groups}.")
        if scope not in SCOPES:
            raise ValueError(f"scope must be one of {', '.join(SCOPES)}, got {scope!r}.")
        self.num_layers, self.num_heads, self.groups = num_layers, num_heads, groups
        self.window_size, self.horizon = window_size, horizon
        self.offset = -sink_tokens % window_size
        self.sink_blocks = (sink_tokens + self.offset) // window_size
        self.scope, self.full_horizon_only, self.regret_top = scope, full_horizon_only, regret_top
        self.closed: list[HorizonMass] = []
        self._keep = keep
        self._device = torch.device(device)
        self._kinds = torch.arange(_KINDS, dtype=torch.uint8, device=self._device).view(_KINDS, 1)
        table = torch.full((256,), _PROTECTED, dtype=torch.uint8, device=self._device)
        table[Tier.EVICTED], table[Tier.QUANT], table[Tier.FULL] = _EVICTED, _QUANT, _FULL
        self._class_of_tier = table
        self._pending: list[_Pending] = []
        self._start = 0  # slot of self._pending[0]; pending events lie in consecutive slots
        self._classes = self._zeros(torch.uint8, num_layers, 0, groups, 0)
        self._missed = self._zeros(torch.float32, num_layers, 0, groups, 0)
        self._sums = self._zeros(torch.float32, num_layers, 0, num_heads, _KINDS)
        self._seen = [0] * num_layers
        self._last_tiers: np.ndarray | None = None
        self._plan_key: tuple[int, int] | None = None
        self._plan = _Plan()

    @property
    def pending(self) -> int:
        """Events whose future has not ended."""
        return len(self._pending)

    def wants(self, first_column: int, num_queries: int) -> bool:
        """Whether any open event needs the attention of these query columns."""
        end = first_column + num_queries
        return any(p.boundary < end and first_column < p.boundary + self.horizon for p in self._pending)

    @torch.inference_mode()
    def open(self, event_id: int, boundary: int, tiers: Tensor) -> float | None:
        """Starts a routing event.

        Args:
            event_id: r.
            boundary: columns that existed at the event; its future is columns boundary … boundary + H − 1.
            tiers: uint8 [layers, groups, blocks], `Tier` right after the event, sink blocks included; blocks that
                had not begun are ignored.

        Returns:
            Churn against the event before, mean over layers and groups; None for the first event.

        Raises:
            ValueError: shapes that do not fit, events out of order, or queries after `boundary` already observed.
        """
        blocks = -(-(boundary + self.offset) // self.window_size)
        shape = (self.num_layers, self.groups)
        if tiers.dim() != 3 or tuple(tiers.shape[:2]) != shape or tiers.shape[2] < blocks:
            raise ValueError(f"tiers must be [{shape[0]}, {shape[1]}, {blocks} or more], got {tuple(tiers.shape)}.")
        if self._pending and boundary < self._pending[-1].boundary:
            raise ValueError(f"events must come in order, got boundary {boundary} after {self._pending[-1].boundary}.")
        if max(self._seen) > boundary:
            raise ValueError(f"open must precede its future: {max(self._seen)} columns seen, boundary {boundary}.")
        churn = self._churn(tiers[:, :, :blocks])
        classes = self._class_of_tier[tiers[:, :, :blocks].to(self._device, torch.long)]
        cut = None
        if (boundary + self.offset) % self.window_size:
            low = max((blocks - 1) * self.window_size - self.offset, 0)
            cut = _Cut(low, boundary, classes[:, :, -1].clone())
            classes[:, :, -1] = _NONE
        slot = self._new_slot(blocks)
        self._classes[:, slot, :, :blocks] = classes
        self._pending.append(_Pending(event_id, boundary, blocks, churn, cut))
        self._plan_key = None
        return churn

    @torch.inference_mode()
    def observe(self, layer: int, first_column: int, probs: Tensor) -> None:
        """Adds one layer's attention for one chunk of consecutive queries. Keeps nothing of `probs`.

        Args:
            layer: from 0, among the managed layers.
            first_column: column of the first query.
            probs: float [heads, queries, columns], FullKV attention; `columns` ≥ what existed at any open event.

        Raises:
            ValueError: shapes that do not fit, or queries skipped or repeated while an event wants them.
        """
        num_heads, num_queries, columns = probs.shape
        end = first_column + num_queries
        if num_heads != self.num_heads:
            raise ValueError(f"probs must have {self.num_heads} heads, got {num_heads}.")
        if first_column < self._seen[layer]:
            raise ValueError(f"queries must come once and in order: column {first_column} of layer {layer} was seen.")
        plan = self._plan_for(first_column, num_queries)
        skipped = self._seen[layer], first_column
        if skipped[0] < skipped[1] and self.wants(skipped[0], skipped[1] - skipped[0]):
            raise ValueError(f"columns {skipped[0]} to {skipped[1] - 1} of layer {layer} are missing.")
        self._seen[layer] = end
        if plan.first == plan.last:
            return
        needed = self._pending[plan.last - 1 - self._start].boundary
        if columns < needed:
            raise ValueError(f"probs must reach column {needed - 1}, got {columns} columns.")

        # [ranges, heads, columns]: queries are summed first, which shrinks all that follows.
        limit = min(plan.blocks * self.window_size - self.offset, columns)
        parts = [probs[:, low:high, :limit].sum(dim=1, dtype=torch.float32) for low, high in plan.queries]
        per_column = parts[0].unsqueeze(0) if len(parts) == 1 else torch.stack(parts)
        tail = plan.blocks * self.window_size - self.offset - limit
        if self.window_size == 1:
            mass = per_column
        else:
            padded = F.pad(per_column, (self.offset, tail)) if self.offset or tail else per_column
            mass = padded.view(len(parts), num_heads, plan.blocks, self.window_size).sum(-1)
        # [ranges, groups, heads of a group, blocks] -> one range for each event
        mass = mass.view(len(parts), self.groups, num_heads // self.groups, plan.blocks)
        mean = mass.mean(dim=2)
        if plan.choice is not None:
            mass, mean = mass[plan.choice], mean[plan.choice]

        fed = slice(plan.first, plan.last)
        classes = self._classes[layer, fed, :, : plan.blocks]
        masks = (classes.unsqueeze(2) == self._kinds).to(torch.float32)  # [events, groups, kinds, blocks]
        if plan.choice is None and self.groups == 1:
            events = plan.last - plan.first
            flat = mass.view(num_heads, plan.blocks) @ masks.view(events * _KINDS, plan.blocks).T
            self._sums[layer, fed] += flat.view(num_heads, events, _KINDS).transpose(0, 1)
        else:
            sums = torch.matmul(mass, masks.transpose(2, 3))  # [events, groups, heads of a group, kinds]
            self._sums[layer, fed] += sums.reshape(-1, num_heads, _KINDS)
        self._missed[layer, fed, :, : plan.blocks].addcmul_(mean, masks[:, :, _EVICTED])
        self._add_cut_blocks(layer, plan, per_column)

    def close_due(self, seq_len: int) -> list[LateMetrics]:
        """Ends the events whose whole horizon has been observed once `seq_len` columns are known; oldest first."""
        known = min([seq_len, *self._seen])
        out = []
        while self._pending and self._pending[0].boundary + self.horizon <= known:
            out.append(self._close(self.horizon))
        return out

    def finish(self, seq_len: int) -> list[LateMetrics]:
        """Ends all events; those with a shorter future say so in `steps`, those without any yield nothing."""
        out = self.close_due(seq_len)
        known = min([seq_len, *self._seen])
        while self._pending:
            steps = min(known - self._pending[0].boundary, self.horizon)
            if steps <= 0 or self.full_horizon_only:
                self._drop()
            else:
                out.append(self._close(steps))
        return out

    def _zeros(self, dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._device)

    def _churn(self, tiers: Tensor) -> float | None:
        rows = tiers.reshape(self.num_layers * self.groups, -1).to("cpu", torch.uint8).numpy().copy()
        before, self._last_tiers = self._last_tiers, rows
        return None if before is None else float(selection_churn(before, rows).mean())

    def _new_slot(self, blocks: int) -> int:
        """A slot never used before, behind the last pending event, with room for `blocks` blocks; its sums are 0."""
        count, have = len(self._pending), self._classes.shape[1]
        wide = self._classes.shape[3]
        if self._start + count == have or blocks > wide:
            # Half of the slots stay free, so that a move happens once in many events.
            slots = max(8, 2 * (count + 1))
            width = wide if blocks <= wide else blocks + blocks // 4 + 8
            old = slice(self._start, self._start + count)
            for name in ("_classes", "_missed", "_sums"):
                tensor: Tensor = getattr(self, name)
                last = tensor.shape[3] if name == "_sums" else width
                moved = self._zeros(tensor.dtype, tensor.shape[0], slots, tensor.shape[2], last)
                if name == "_classes":
                    moved.fill_(_NONE)
                moved[:, :count, :, : tensor.shape[3]] = tensor[:, old]
                setattr(self, name, moved)
            self._start = 0
        return self._start + count

    def _plan_for(self, first_column: int, num_queries: int) -> _Plan:
        if self._plan_key == (first_column, num_queries):
            return self._plan
        end = first_column + num_queries
        fed = [
            (place, (max(p.boundary - first_column, 0), min(p.boundary + self.horizon - first_column, num_queries)))
            for place, p in enumerate(self._pending)
            if p.boundary < end and first_column < p.boundary + self.horizon
        ]
        plan = _Plan()
        if fed:
            # Events are in order and share one horizon: those that a chunk feeds are neighbours.
            plan.first, plan.last = self._start + fed[0][0], self._start + fed[-1][0] + 1
            plan.queries = sorted({queries for _, queries in fed})
            plan.choices = [plan.queries.index(queries) for _, queries in fed]
            if len(plan.queries) > 1:
                plan.choice = torch.tensor(plan.choices, device=self._device)
            plan.blocks = max(self._pending[place].blocks for place, _ in fed)
        self._plan_key, self._plan = (first_column, num_queries), plan
        return plan

    def _add_cut_blocks(self, layer: int, plan: _Plan, per_column: Tensor) -> None:
        """Adds the part of the boundary's block that existed at the event; only events off the grid have one."""
        for place, choice in enumerate(plan.choices):
            slot = plan.first + place
            event = self._pending[slot - self._start]
            if event.cut is None:
                continue
            mass = per_column[choice, :, event.cut.low : event.cut.high].sum(-1).view(self.groups, -1)
            kinds = (event.cut.classes[layer].unsqueeze(1) == self._kinds.view(1, -1)).to(torch.float32)
            self._sums[layer, slot] += (mass.unsqueeze(2) * kinds.unsqueeze(1)).view(self.num_heads, _KINDS)
            self._missed[layer, slot, :, event.blocks - 1] += mass.mean(1) * kinds[:, _EVICTED]

    def _drop(self) -> _Pending:
        self._start += 1
        self._plan_key = None
        return self._pending.pop(0)

    def _close(self, steps: int) -> LateMetrics:
        slot = self._start
        event = self._drop()
        sums = self._sums[:, slot].to("cpu", torch.float64).numpy()
        mass = HorizonMass(
            event_id=event.event_id,
            steps=steps,
            evicted=sums[:, :, _EVICTED].copy(),
            quant=sums[:, :, _QUANT].copy(),
            full=sums[:, :, _FULL].copy(),
            protected=sums[:, :, _PROTECTED].copy(),
            regret=self._regret(slot, event.blocks, steps),
        )
        if self._keep:
            self.closed.append(mass)
        return mass.late(event.churn, self.scope)

    def _regret(self, slot: int, blocks: int, steps: int) -> list[tuple[int, int, float]]:
        windows = blocks - self.sink_blocks
        if windows <= 0 or not self.regret_top:
            return []
        missed = self._missed[:, slot, :, self.sink_blocks : blocks].reshape(-1)
        top = torch.topk(missed, min(self.regret_top, len(missed)))
        worst = [
            (place // windows, place % windows, mass / steps)
            for place, mass in zip(top.indices.tolist(), top.values.tolist(), strict=True)
            if mass > 0
        ]
        return sorted(worst, key=lambda entry: (-entry[2], entry[0], entry[1]))
