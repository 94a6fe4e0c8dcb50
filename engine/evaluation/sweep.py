"""A sweep: independent cells, each run once, finished ones kept.

A cell is one system on one item, or all simulated policies on one text at one budget. Cells of one item share its
prompt. Groups of different tasks take turns, so that a sweep that is stopped leaves an even table. Knows the store
and the measurements; prints nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from engine.config import QEvictConfig
from engine.errors import BudgetError
from engine.evaluation.answering import Answer, answer
from engine.evaluation.forcing import FULL, Outcome, System, measure
from engine.evaluation.items import Item
from engine.evaluation.promotion import promotion_experiment
from engine.evaluation.recording import record
from engine.evaluation.sample import Sample
from engine.evaluation.store import Store, cell_key
from engine.generate import VERSION
from engine.models import LoadedModel
from engine.policies import simulate, standard_policies

MOST_CACHES = 10
"""Systems that hold one prompt at the same time: each stages it in full precision."""


@dataclass(frozen=True, slots=True)
class ItemGroup:
    """Some systems on one item."""

    item: Item
    systems: tuple[System, ...]


@dataclass(frozen=True, slots=True)
class PolicyGroup:
    """Simulated policies on one text at some budgets; `item` must have a single stretch of text (task "book")."""

    item: Item
    shares: tuple[float, ...]
    config: QEvictConfig = field(default_factory=QEvictConfig)
    horizon: int = 32


@dataclass(frozen=True, slots=True)
class AnswerGroup:
    """Some systems that answer one sample in their own words."""

    item: Sample
    systems: tuple[System, ...]


Group = ItemGroup | PolicyGroup | AnswerGroup


@dataclass(frozen=True, slots=True)
class Suite:
    """What a sweep measures.

    Attributes:
        groups: in order; see `in_turns`. left_out: sentences on what a reader might expect and will not find.
        kv_dtype: what systems store full-precision tokens in. seed: of everything random.
    """

    name: str
    groups: tuple[Group, ...]
    left_out: tuple[str, ...] = ()
    kv_dtype: str = "float16"
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a sweep is: cells done and in all, seconds used, an estimate of those left, and what runs now."""

    done: int
    total: int
    seconds: float
    left: float | None
    now: str


@dataclass(frozen=True, slots=True)
class SweepResult:
    """Rows of all finished cells of the suite, in order; `missing` cells were not reached."""

    rows: list[dict[str, Any]]
    missing: int
    seconds: float
    ran: int


def in_turns(*lists: Sequence[Group]) -> tuple[Group, ...]:
    """One from each list in turn; all lists end at about the same time, as far as their lengths allow."""
    longest = max((len(groups) for groups in lists), default=0)
    spread = [
        (at * longest / len(groups), number, at, group)
        for number, groups in enumerate(lists)
        for at, group in enumerate(groups)
    ]
    return tuple(entry[3] for entry in sorted(spread, key=lambda entry: entry[:3]))


def suite_keys(loaded: LoadedModel, suite: Suite) -> list[str]:
    """Keys of all cells of a suite, in order."""
    return [cell_key(cell) for group in suite.groups for cell in _cells(loaded, suite, group)]


def run_sweep(
    loaded: LoadedModel,
    suite: Suite,
    store: Store,
    *,
    seconds: float | None = None,
    progress: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> SweepResult:
    """Runs the cells that the store does not have.

    Args:
        seconds: no group is begun that would probably end later than this.
        should_stop: asked between groups.
    """
    began = time.perf_counter()
    work = [(group, _cells(loaded, suite, group)) for group in suite.groups]
    todo = [
        (group, [cell for cell in cells if cell_key(cell) not in store])
        for group, cells in work
        if any(cell_key(cell) not in store for cell in cells)
    ]
    total = sum(len(cells) for _, cells in work)
    done = total - sum(len(cells) for _, cells in todo)
    ran = 0
    costs = [_cost(group, cells) for group, cells in todo]
    spent = 0.0
    for place, (group, cells) in enumerate(todo):
        used = time.perf_counter() - began
        pace = used / spent if spent else None
        left = None if pace is None else pace * sum(costs[place:])
        if progress is not None:
            progress(Progress(done, total, used, left, _describe(group)))
        if should_stop is not None and should_stop():
            break
        if seconds is not None and used + (costs[place] * pace if pace else 0.0) > seconds:
            break
        for cell, row in _run(loaded, suite, group, cells):
            store.add(cell_key(cell), {**cell, **row, "threads": torch.get_num_threads()})
            done, ran = done + 1, ran + 1
        spent += costs[place]
    seconds_used = time.perf_counter() - began
    if progress is not None:
        progress(Progress(done, total, seconds_used, 0.0 if done == total else None, ""))
    keys = [cell_key(cell) for _, cells in work for cell in cells]
    rows = store.rows(list(dict.fromkeys(keys)))
    return SweepResult(rows, total - done, seconds_used, ran)


def _describe(group: Group) -> str:
    name = "policies" if isinstance(group, PolicyGroup) else group.item.task
    return f"{name} {group.item.length} #{group.item.index}"


def _cost(group: Group, cells: list[dict[str, Any]]) -> float:
    """Rough work in decode steps, for the estimate of what is left: a prompt token is a fifteenth of a step."""
    prompt = len(group.item.prompt) / 15
    if isinstance(group, PolicyGroup):
        return prompt + len(group.item.forced) / 4 + 20 * len(cells)
    batches = math.ceil(len(cells) / MOST_CACHES)
    return prompt * (1.5 * batches + 0.1 * len(cells)) + len(cells) * len(group.item.forced)


# ---- cells ------------------------------------------------------------------------------------------------


def _cells(loaded: LoadedModel, suite: Suite, group: Group) -> list[dict[str, Any]]:
    """Descriptions of a group's cells: everything that decides their result, and nothing that it does not."""
    item = group.item
    base: dict[str, Any] = {
        "model": loaded.name,
        "fingerprint": loaded.fingerprint,
        "dtype": loaded.dtype,
        "weights": loaded.weights,
        "device": loaded.device.partition(":")[0],
        "versions": {"qevict": VERSION, "torch": torch.__version__, "transformers": transformers.__version__},
        "task": item.task,
        "index": item.index,
        "length": item.length,
        "question": item.question,
        "prompt_hash": item.prompt_hash,
        "kv_dtype": suite.kv_dtype,
        "seed": suite.seed,
    }
    if isinstance(group, PolicyGroup):
        config = group.config.to_dict()
        return [
            base | {"kind": "policies", "kv_budget": share, "config": config, "horizon": group.horizon}
            for share in group.shares
        ]
    kind = "answer" if isinstance(group, AnswerGroup) else "item"
    return [
        base | {"kind": kind, "system": s.name, "kv_budget": s.share, "parameters": dict(s.parameters)}
        for s in group.systems
    ]


def _run(
    loaded: LoadedModel, suite: Suite, group: Group, cells: list[dict[str, Any]]
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    if isinstance(group, PolicyGroup):
        yield from _run_policies(loaded, suite, group, cells)
        return
    for begin in range(0, len(cells), MOST_CACHES):
        part = cells[begin : begin + MOST_CACHES]
        systems = [System(cell["system"], cell["kv_budget"], cell["parameters"]) for cell in part]
        if isinstance(group, AnswerGroup):
            answers = answer(loaded, group.item, systems, kv_dtype=suite.kv_dtype, seed=suite.seed)
            for cell, said in zip(part, answers, strict=True):
                yield cell, _answer_row(group.item, said)
            continue
        outcomes = measure(loaded, group.item, systems, kv_dtype=suite.kv_dtype, seed=suite.seed)
        for cell, outcome in zip(part, outcomes, strict=True):
            yield cell, _item_row(group.item, outcome)


def _item_row(item: Item, outcome: Outcome) -> dict[str, Any]:
    return {
        "label": outcome.system.label,
        "source": item.source,
        "notes": dict(item.notes),
        "prompt_tokens": len(item.prompt),
        "forced_tokens": len(item.forced),
        "scores": {
            name: {field_: getattr(score, field_) for field_ in score.__slots__}
            for name, score in outcome.scores.items()
        },
        "bytes": outcome.bytes,
        "share": outcome.share,
        "ms_per_token": outcome.ms_per_token,
        "backend": outcome.backend,
        "infeasible": outcome.infeasible,
        "smallest_share": outcome.smallest_share,
        "full": outcome.system.name == FULL,
    }


def _answer_row(sample: Sample, said: Answer) -> dict[str, Any]:
    return {
        "label": said.system.label,
        "source": sample.source,
        "metric": sample.metric,
        "references": list(sample.references),
        "prompt_tokens": len(sample.prompt),
        "text": said.text,
        "figures": said.figures,
        "tokens": said.tokens,
        "truncated": said.truncated,
        "degenerate": said.degenerate,
        "bytes": said.bytes,
        "share": said.share,
        "infeasible": said.infeasible,
        "smallest_share": said.smallest_share,
        "full": said.system.name == FULL,
    }


def _run_policies(
    loaded: LoadedModel, suite: Suite, group: PolicyGroup, cells: list[dict[str, Any]]
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    item = group.item
    trace = record(loaded, [*item.prompt, *item.forced], len(item.prompt), kv_dtype=suite.kv_dtype)
    for cell in cells:
        config = group.config.replace(kv_budget=cell["kv_budget"], kv_budget_bytes=None, kv_dtype=suite.kv_dtype)
        runs, refused = simulate(trace, standard_policies(config), horizon=group.horizon, seed=suite.seed)
        promotion: dict[str, Any] | None = None
        try:
            found = promotion_experiment(trace, config, horizon=group.horizon)
            promotion = {
                "promotions": len(found.promotions),
                "net_gain": [p.net_gain for p in found.promotions],
                "wanted": sum(p.wanted for p in found.promotions),
                "stayed_wanted": sum(p.stayed_wanted for p in found.promotions),
                "fmm_on_minus_off": _mean(list(found.fmm_difference.values())),
                "full_on_minus_off": _mean(list(found.full_difference.values())),
            }
        except BudgetError:
            pass
        yield (
            cell,
            {
                "source": item.source,
                "prompt_tokens": len(item.prompt),
                "forced_tokens": len(item.forced),
                "policies": {run.policy.name: run.summary(group.horizon) for run in runs},
                "infeasible_policies": refused,
                "promotion": promotion,
            },
        )


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
