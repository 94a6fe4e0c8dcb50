"""QEvict among its rivals: the same configuration, asked the same questions.

R1 token level, R2 no Quant tier, R3 the default, R4 windows of 32, INT4, promotion off: all are settings. R3's Full
tier alone is a way to look at R3's own run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.baselines.base import Rival, RunPlan
from engine.budget import KVShape, Plan, larger_plan, make_plan
from engine.cache import QEvictCache
from engine.config import QEvictConfig
from engine.trace import Tier
from engine.windows import Grid


class TieredCache(QEvictCache):
    """QEvictCache with the questions that a comparison asks."""

    storage = "real"
    compress_seconds = 0.0
    late_budget: Callable[[KVShape, int], QEvictConfig] | None = None
    """Settings that need the prompt's length, asked for when capacities are fixed."""
    running = False
    """Whether pools grow at every event, to the share of FullKV's bytes at that length."""

    def _allocate(self) -> None:
        if self.late_budget is not None and not self._plans:
            self.config = self.late_budget(self.kv_shape, self.lead.columns)
        super()._allocate()

    def _route(self) -> None:
        state = self.lead
        if self.running and state.store is not None and state.staging is None:
            plans = grown(self._plans, self.config, self.kv_shape, state.columns, state.pads)
            if plans != self._plans:
                self._grow(plans)
        super()._route()

    def persistent_tensors(self) -> dict[str, Tensor]:
        """All pools; empty while the prompt is staged. Where layers lie on several devices, names tell the first."""
        held = [(part.first, part.held.store) for part in self.parts if part.held is not None]
        found = [(first, store.persistent_tensors()) for first, store in held if store is not None]
        if len(found) == 1:
            return found[0][1]
        return {f"{first}.{name}": tensor for first, tensors in found for name, tensor in tensors.items()}

    @property
    def persistent_bytes(self) -> int:
        """Pools without the lane padding of the kernel's layout: what the plan charges."""
        return self.pool_bytes - self.lane_padding_bytes

    @property
    def allocated_bytes(self) -> int:
        """Pools, lane padding included."""
        return self.pool_bytes

    def residency(self) -> Tensor:
        """uint8 [layers, H_kv, columns] of batch row 0."""
        state = self.lead
        shape, columns = self.pool_shape, state.columns
        if state.store is None:
            return torch.full((shape.num_layers, shape.num_kv_heads, columns), int(Tier.FULL), dtype=torch.uint8)
        board = self.board.view(shape.num_layers, shape.batch, shape.groups, -1)[:, 0].cpu()
        blocks = board.clone()
        blocks[(board == Tier.SINK) | (board == Tier.LOCAL)] = int(Tier.FULL)
        out = torch.full((shape.num_layers, shape.groups, columns), int(Tier.FULL), dtype=torch.uint8)
        window = self.config.window_size
        wide = blocks.repeat_interleave(window, 2)[:, :, state.grid.offset :][:, :, :columns]
        out[:, :, : wide.shape[2]] = wide
        if out.shape[1] != shape.num_kv_heads:
            out = out.expand(-1, shape.num_kv_heads, -1).clone()
        out[:, :, : state.pads[0]] = int(Tier.EMPTY)
        return out


def grown(plans: Sequence[Plan], config: QEvictConfig, shape: KVShape, columns: int, pads: Sequence[int]) -> list[Plan]:
    """The plans of all rows at an event of a running budget: capacities for `columns`, never smaller than before."""
    config = config.replace(local_tokens=plans[0].local_tokens, planned_new_tokens=0)
    new = [make_plan(config, shape, max(1, columns), padded=pad > 0) for pad in pads]
    return [larger_plan(old, later) for old, later in zip(plans, new, strict=True)]


@dataclass(frozen=True, kw_only=True)
class QEvict(Rival):
    """Recoverable quantized eviction. Parameters are those of `QEvictConfig`; the budget comes from the run."""

    name = "qevict"
    label = "systems.qevict"
    family = "tiers"
    keeps = "recoverable"
    grows = True
    cache: ClassVar[type[TieredCache]] = TieredCache

    window_size: int = 8
    sink_tokens: int = 5
    local_tokens: int | None = None
    local_share: float = 0.25
    quant_share: float = 0.70
    bits: int = 2
    promotion: bool = True
    score_scope: str = "layer"
    ranker: str = "cumulative"
    decay_half_life: float = 64.0
    norm_p: float = 2.0
    key_norm_sign: int = -1
    prefill_queries: int | None = None
    age_normalised: bool = False
    backend: str = "auto"

    def config(self, run: RunPlan, shape: KVShape | None = None, prompt_tokens: int = 0) -> QEvictConfig:
        """The settings of a run. A budget matched at the prompt alone needs the prompt's length."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        values |= {"kv_dtype": run.kv_dtype, "planned_new_tokens": 0 if run.running else run.planned_new_tokens}
        budget = run.budget
        if budget is not None and budget.share is not None and budget.reference != "prompt":
            values["kv_budget"] = budget.share
        elif budget is not None and shape is not None:
            values["kv_budget_bytes"] = budget.model_bytes(shape, prompt_tokens, run.planned_new_tokens)
        elif budget is not None and budget.total_bytes is not None:
            values["kv_budget_bytes"] = budget.total_bytes
        return QEvictConfig(**values)

    def account(self, shape: KVShape, prompt_tokens: int, generated: int, run: RunPlan) -> int:
        config = self.config(run, shape, prompt_tokens)
        plan = make_plan(config, shape, prompt_tokens)
        if run.running:
            grid = Grid(config.window_size, config.sink_tokens)
            for columns in range(prompt_tokens + 1, prompt_tokens + generated + 1):
                if grid.ages_at(columns, config.interval):
                    plan = grown([plan], config, shape, columns, [0])[0]
        return plan.persistent_bytes * shape.num_layers

    def notices(self, shape: KVShape, prompt_tokens: int, run: RunPlan) -> list[str]:
        return make_plan(self.config(run, shape, prompt_tokens), shape, prompt_tokens).notices

    def build(self, model: PreTrainedModel, run: RunPlan) -> TieredCache:
        self.check_run(run)
        cache = self.cache(model, self.config(run))
        cache.running = run.running
        budget = run.budget
        if budget is not None and (budget.tokens is not None or budget.reference == "prompt"):
            cache.late_budget = lambda shape, columns: self.config(run, shape, columns)
        return cache


class FullTierCache(TieredCache):
    """R3's run, with Quant counted as out of reach."""

    def residency(self) -> Tensor:
        table = super().residency()
        table[table == Tier.QUANT] = int(Tier.EVICTED)
        return table


@dataclass(frozen=True, kw_only=True)
class FullTierOnly(QEvict):
    """R3-FP-tier-only, the article's diagnostic: R3's run, bytes included, with Quant counted as inaccessible.

    Missed mass, churn and residency are those of the Full tier alone; logits and outputs are R3's own.
    """

    label = "systems.qevict_r3_fp_only"
    cache = FullTierCache

    def notices(self, shape: KVShape, prompt_tokens: int, run: RunPlan) -> list[str]:
        return ["fp_only", *super().notices(shape, prompt_tokens, run)]
