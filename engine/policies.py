"""Routing policies on one FullKV trace: what each would have kept, without running the model again.

    trace = record(loaded, ids, prompt_tokens)        # engine.evaluation.recording
    runs = simulate(trace, standard_policies(config))

A policy here ranks windows by FullKV's own attention, with real byte costs and the real routing rule. The
real cache ranks by the attention of its own, quantized and evicted, execution: that feedback is **not** in
these figures (`engine.evaluation.live` has it). The first event is the same in both, but for the stored
dtype: a prompt is scored in full precision. Knows torch and numpy; knows no model and no cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.budget import KVShape, Plan, make_plan
from engine.config import QEvictConfig
from engine.errors import BudgetError, ConfigError
from engine.metrics.churn import ChurnSeries, churn_series
from engine.metrics.history import TierHistory, TransitionCounts, count_transitions
from engine.metrics.lir import ReturnStats, policy_lir
from engine.metrics.mass import HorizonMass, Scope
from engine.routing import Candidates, decide
from engine.trace import Tier
from engine.windows import Grid

RULES = ("route", "random", "past_oracle", "future_oracle")
HORIZON = 32


@dataclass(frozen=True, slots=True)
class FullTrace:
    """FullKV's attention on one token sequence, teacher-forced.

    Attributes:
        prompt_tokens: P, columns known at the first event.
        prompt_mass: float32 [L, H, P], every column's attention summed over all prompt queries.
        step_mass: float32 [steps, L, H, P + steps], attention of the query at column P + s.
        shape: byte shape of the layers, in the dtype that a cache would store.
    """

    prompt_tokens: int
    prompt_mass: Tensor
    step_mass: Tensor
    shape: KVShape

    @property
    def steps(self) -> int:
        """Queries after the prompt."""
        return int(self.step_mass.shape[0])

    @property
    def total_tokens(self) -> int:
        """Columns known at the end."""
        return self.prompt_tokens + self.steps

    @property
    def num_layers(self) -> int:
        return int(self.prompt_mass.shape[0])

    @property
    def num_heads(self) -> int:
        """Query heads of a layer."""
        return int(self.prompt_mass.shape[1])

    def past(self, boundary: int) -> Tensor:
        """float32 [L, H, boundary]: attention of all queries before `boundary`."""
        out = torch.zeros(self.num_layers, self.num_heads, boundary)
        out[:, :, : self.prompt_tokens] = self.prompt_mass
        return out + self.step_mass[: boundary - self.prompt_tokens, :, :, :boundary].sum(0)

    def future(self, boundary: int, horizon: int) -> tuple[Tensor, int]:
        """(float32 [L, H, boundary], steps): attention of the next `horizon` queries on what existed at `boundary`."""
        begin = boundary - self.prompt_tokens
        part = self.step_mass[begin : begin + horizon, :, :, :boundary]
        return part.sum(0), int(part.shape[0])


@dataclass(frozen=True, slots=True)
class Policy:
    """What to simulate.

    Attributes:
        name: for tables. config: byte budget, grid and routing rule.
        rule: "route" is the paper's; "random" ranks windows by a number drawn once; the oracles hold as many
            windows as `config` routed would, best by FullKV's past or next mass, and may take evicted ones back.
        fp_only: report Quant as inaccessible; gives no bytes back.
    """

    name: str
    config: QEvictConfig
    rule: str = "route"
    fp_only: bool = False

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ConfigError(f"rule must be one of {', '.join(RULES)}, got {self.rule!r}.")
        if self.config.ranker != "cumulative" or self.config.prefill_queries is not None:
            raise ConfigError(
                "policies on a trace rank by cumulative attention: a trace holds the prompt's sums, not its queries. "
                f"Run ranker {self.config.ranker!r} in a real cache instead."
            )


def standard_policies(config: QEvictConfig) -> list[Policy]:
    """The article's variants at one budget, with its ablations and both oracles."""
    r3 = config
    return [
        Policy("R1", config.replace(window_size=1, quant_share=0.0, routing_interval=None, local_tokens=None)),
        Policy("R2", config.replace(quant_share=0.0)),
        Policy("R3", r3),
        Policy("R4", config.replace(window_size=32, routing_interval=None, local_tokens=None)),
        Policy("R3 FP-tier-only", r3, fp_only=True),
        Policy("INT4", config.replace(bits=4)),
        Policy("promotion off", config.replace(promotion=False)),
        Policy("random", r3, rule="random"),
        Policy("oracle past-mass", r3, rule="past_oracle"),
        Policy("oracle future-H", r3, rule="future_oracle"),
    ]


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """What a policy kept, and what FullKV then wanted.

    Attributes:
        plan: how its budget is spent; None for a run whose plan is not known.
        history: tiers of all windows after each event.
        masses: one per event that has a future, oldest first.
    """

    policy: Policy
    plan: Plan | None
    history: TierHistory
    masses: list[HorizonMass] = field(default_factory=list)

    def fmm(self, scope: Scope = "all", *, full_horizon: int | None = None) -> float | None:
        """Mean future missed mass over events; `full_horizon` leaves out events with fewer steps."""
        values = self.fmm_by_event(scope, full_horizon=full_horizon)
        return float(np.mean(list(values.values()))) if values else None

    def fmm_by_event(self, scope: Scope = "all", *, full_horizon: int | None = None) -> dict[int, float]:
        """Future missed mass by boundary (columns known at the event), mean over layers and heads."""
        columns = dict(zip(self.history.event_ids.tolist(), self.history.seq_lens.tolist(), strict=True))
        return {
            columns[mass.event_id]: float(mass.missed(scope, fp_only=self.policy.fp_only).mean())
            for mass in self.masses
            if full_horizon is None or mass.steps >= full_horizon
        }

    def mass_shares(self, scope: Scope = "all") -> dict[str, float] | None:
        """Mean shares of the next attention in Full, Quant and Evicted (Figure 1, right)."""
        if not self.masses:
            return None
        full, quant, evicted = np.mean([mass.mass_share(scope) for mass in self.masses], axis=0)
        return {"full": float(full), "quant": float(quant), "evicted": float(evicted)}

    @property
    def churn(self) -> ChurnSeries:
        return churn_series(self.history)

    def returns(self, min_events: int = 3) -> ReturnStats:
        """Global LIR and time to return of the Full tier."""
        return policy_lir(self.history, min_events)

    @property
    def transitions(self) -> TransitionCounts:
        return count_transitions(self.history)

    def summary(self, horizon: int = HORIZON) -> dict[str, Any]:
        """All figures as plain values."""
        churn, returns, moves = self.churn, self.returns(), self.transitions
        return {
            "policy": self.policy.name,
            "rule": self.policy.rule,
            "events": len(self.history.event_ids),
            "full_capacity": None if self.plan is None else self.plan.full_capacity,
            "quant_capacity": None if self.plan is None else self.plan.quant_capacity,
            "local_tokens": None if self.plan is None else self.plan.local_tokens,
            "fmm": self.fmm(),
            "fmm_history": self.fmm("history"),
            "fmm_full_horizon": self.fmm(full_horizon=horizon),
            "churn_per_event": churn.mean,
            "churn_per_step": churn.per_step,
            "mass_share": self.mass_shares(),
            "mass_share_history": self.mass_shares("history"),
            "lir": returns.lir,
            "lir_episodes": returns.eligible,
            "lir_rescued": returns.rescued,
            "ttr_median_events": returns.median_events,
            "ttr_median_tokens": returns.median_tokens,
            "promotions": moves.promotions,
            "demotions": moves.demotions,
            "evictions": moves.evictions,
        }


def simulate(
    trace: FullTrace, policies: Sequence[Policy], *, horizon: int = HORIZON, seed: int = 0
) -> tuple[list[PolicyRun], dict[str, str]]:
    """Runs policies on a trace.

    Returns:
        (runs in the order of `policies`, reasons by name of those whose budget is infeasible).
    """
    runs: list[PolicyRun] = []
    refused: dict[str, str] = {}
    routed: dict[QEvictConfig, PolicyRun] = {}
    for policy in policies:
        try:
            runs.append(_simulate_one(trace, policy, horizon, seed, routed))
        except BudgetError as error:
            refused[policy.name] = str(error)
    return runs, refused


def _simulate_one(
    trace: FullTrace, policy: Policy, horizon: int, seed: int, routed: dict[QEvictConfig, PolicyRun]
) -> PolicyRun:
    config = policy.config.replace(planned_new_tokens=trace.steps)
    plan = make_plan(config, trace.shape, trace.prompt_tokens)
    base: PolicyRun | None = None
    if policy.rule == "random":
        history = _route(trace, config, plan, np.random.default_rng(seed))
    else:
        base = routed.get(config)
        if base is None:
            kept = _route(trace, config, plan, None)
            base = PolicyRun(policy, plan, kept, horizon_masses(trace, kept, config, horizon))
            routed[config] = base
        history = base.history
    if policy.rule in ("past_oracle", "future_oracle"):
        history = _oracle(trace, config, history, horizon, future=policy.rule == "future_oracle")
    elif base is not None:
        return PolicyRun(policy, plan, history, base.masses)
    return PolicyRun(policy, plan, history, horizon_masses(trace, history, config, horizon))


def event_boundaries(config: QEvictConfig, prompt_tokens: int, total_tokens: int) -> list[int]:
    """Columns known at each routing event: the prompt's end, then whenever a window ages."""
    grid = Grid(config.window_size, config.sink_tokens)
    later = range(prompt_tokens + 1, total_tokens + 1)
    return [prompt_tokens, *(columns for columns in later if grid.ages_at(columns, config.interval))]


def decision_groups(config: QEvictConfig, shape: KVShape) -> int:
    """Decisions per layer."""
    return shape.num_kv_heads if config.score_scope == "kv_head" else 1


def by_blocks(columns: Tensor, config: QEvictConfig) -> Tensor:
    """Sums of columns [..., columns] over the blocks of the grid, sink included: [..., blocks]."""
    grid = Grid(config.window_size, config.sink_tokens)
    count = grid.num_blocks(columns.shape[-1])
    tail = count * config.window_size - grid.offset - columns.shape[-1]
    padded = torch.nn.functional.pad(columns, (grid.offset, tail))
    blocks: Tensor = padded.unflatten(-1, (count, config.window_size)).sum(-1)
    return blocks


def row_scores(mass: Tensor, config: QEvictConfig, shape: KVShape) -> Tensor:
    """Head means of masses [L, H, columns] for every decision row and block: [L·G, blocks]."""
    groups = decision_groups(config, shape)
    return by_blocks(mass.unflatten(1, (groups, -1)).mean(2).flatten(0, 1), config)


def _route(trace: FullTrace, config: QEvictConfig, plan: Plan, random: np.random.Generator | None) -> TierHistory:
    """The paper's routing rule on FullKV's masses (or on numbers drawn once)."""
    grid = Grid(config.window_size, config.sink_tokens)
    rows = trace.num_layers * decision_groups(config, trace.shape)
    total = grid.num_blocks(trace.total_tokens)
    sink = grid.sink_blocks
    tiers = torch.full((rows, total), int(Tier.EMPTY), dtype=torch.uint8)
    recorded = torch.zeros(rows, total, dtype=torch.bool)
    drawn = None if random is None else torch.from_numpy(random.random((rows, total))).float()
    full = torch.full((rows,), plan.full_capacity)
    quant = torch.full((rows,), plan.quant_capacity)
    boundaries = event_boundaries(config, trace.prompt_tokens, trace.total_tokens)
    mass = torch.zeros(trace.num_layers, trace.num_heads, trace.total_tokens)
    mass[:, :, : trace.prompt_tokens] = trace.prompt_mass
    known = trace.prompt_tokens
    boards = []
    for boundary in boundaries:
        if boundary > known:
            mass += trace.step_mass[known - trace.prompt_tokens : boundary - trace.prompt_tokens].sum(0)
            known = boundary
        begun, aged = grid.num_blocks(boundary), grid.aged_blocks(boundary, plan.local_tokens)
        fresh = tiers[:, :begun]
        fresh[fresh == Tier.EMPTY] = int(Tier.LOCAL)
        if aged > sink:
            ids = torch.arange(sink, aged).expand(rows, -1)
            here = tiers[:, sink:aged]
            scores = row_scores(mass, config, trace.shape)[:, sink:aged] if drawn is None else drawn[:, sink:aged]
            if config.age_normalised:
                first = (ids * config.window_size - grid.offset).clamp_min(0)
                scores = scores / (boundary - first).clamp_min(1)
            candidates = Candidates(
                torch.where(here == Tier.EVICTED, -1, ids), scores, here == Tier.QUANT, recorded[:, sink:aged]
            )
            target = decide(candidates, full, quant, config.promotion)
            tiers[:, sink:aged] = torch.where(here == Tier.EVICTED, here, target)
            now = tiers[:, sink:aged]
            # An entry of the ledger is written once, and freed only when its window is evicted.
            recorded[:, sink:aged] = (recorded[:, sink:aged] | (now == Tier.QUANT)) & (now != Tier.EVICTED)
        boards.append(tiers[:, sink:].numpy().copy())
    events = np.arange(len(boundaries), dtype=np.int64)
    return TierHistory(events, np.array(boundaries, dtype=np.int64), np.stack(boards))


def _oracle(trace: FullTrace, config: QEvictConfig, base: TierHistory, horizon: int, *, future: bool) -> TierHistory:
    """Sets of the same sizes as `base`, the best by what FullKV has wanted, or will want next."""
    sink = Grid(config.window_size, config.sink_tokens).sink_blocks
    boards = base.tiers.copy()
    for place, boundary in enumerate(base.seq_lens.tolist()):
        board = boards[place]
        aged = np.isin(board, (Tier.FULL, Tier.QUANT, Tier.EVICTED))
        if future:
            scores = future_shares(trace, boundary, config, horizon)
        else:
            scores = row_scores(trace.past(boundary), config, trace.shape)
        wide = np.full(board.shape, -np.inf)
        values = scores[:, sink:].numpy()
        wide[:, : values.shape[1]] = values
        order = np.argsort(np.where(aged, -wide, np.inf), axis=1, kind="stable")
        ranks = np.empty_like(order)
        np.put_along_axis(ranks, order, np.broadcast_to(np.arange(board.shape[1]), board.shape), axis=1)
        full = (board == Tier.FULL).sum(1, keepdims=True)
        held = full + (board == Tier.QUANT).sum(1, keepdims=True)
        best = np.where(ranks < full, int(Tier.FULL), np.where(ranks < held, int(Tier.QUANT), int(Tier.EVICTED)))
        boards[place] = np.where(aged, best, board)
    return TierHistory(base.event_ids, base.seq_lens, boards)


def future_shares(trace: FullTrace, boundary: int, config: QEvictConfig, horizon: int) -> Tensor:
    """What each block adds to its row's FMM if it is missing, float32 [L·G, blocks]; a row sums to 1, or to 0."""
    mass, _ = trace.future(boundary, horizon)
    whole = mass.sum(-1, keepdim=True)
    return row_scores(torch.where(whole > 0, mass / whole.clamp_min(1e-30), 0.0), config, trace.shape)


def horizon_masses(
    trace: FullTrace, history: TierHistory, config: QEvictConfig, horizon: int = HORIZON
) -> list[HorizonMass]:
    """Where FullKV's next queries look, by tier, for every event that has a future.

    Args:
        history: tiers of windows after each event; rows are layers, or layers times decision groups.
    """
    grid = Grid(config.window_size, config.sink_tokens)
    groups = history.tiers.shape[1] // trace.num_layers
    out = []
    for place, (event_id, boundary) in enumerate(
        zip(history.event_ids.tolist(), history.seq_lens.tolist(), strict=True)
    ):
        mass, steps = trace.future(boundary, horizon)
        if not steps:
            continue
        board = torch.from_numpy(history.tiers[place].astype(np.int64))
        columns = torch.full((board.shape[0], boundary), int(Tier.SINK), dtype=torch.int64)
        wide = board.repeat_interleave(config.window_size, 1)
        first = max(0, grid.first_column(grid.sink_blocks))
        room = min(wide.shape[1], boundary - first)
        columns[:, first : first + room] = wide[:, :room]
        grouped = mass.unflatten(1, (groups, -1))
        table = columns.view(trace.num_layers, groups, 1, boundary)

        def total(*tiers: Tier, grouped: Tensor = grouped, table: Tensor = table) -> Any:
            chosen = torch.isin(table, torch.tensor([int(tier) for tier in tiers]))
            return (grouped * chosen).sum(-1).flatten(1, 2).double().numpy()

        out.append(
            HorizonMass(
                event_id,
                steps,
                evicted=total(Tier.EVICTED),
                quant=total(Tier.QUANT),
                full=total(Tier.FULL),
                protected=total(Tier.SINK, Tier.LOCAL),
            )
        )
    return out
