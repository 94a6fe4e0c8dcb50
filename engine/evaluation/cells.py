"""Cells, what a sweep is made of: one system on one item, or all simulated policies on one text at one budget.

Cells of one item share its prompt, so they are run in parts. A cell's description is all that decides its result.
Knows the measurements; knows no store, no order and no machine but this one.
"""

from __future__ import annotations

from collections.abc import Iterator
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
from engine.model_shape import model_shape
from engine.models import LoadedModel
from engine.policies import simulate, standard_policies
from engine.version import VERSION

FEW_CACHES, MANY_CACHES = 10, 40
STAGED_BYTES = 1 << 30
"""Systems that hold one prompt at the same time: at least few, and up to many while what they stage in full precision
stays below these bytes. Fewer means that a prompt is read more often."""
FIGURES = 2
"""Part of an item cell's key: a cell that lacks a figure which is measured now is another cell. 2 has output errors."""


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
Cell = dict[str, Any]
"""A description, or a description and its row."""


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
class Part:
    """Cells of one group that are run together. `cost`: rough work, in decode steps of one system."""

    group: Group
    cells: list[Cell]
    cost: float


def describe(group: Group) -> str:
    """A few words for a progress bar."""
    name = "policies" if isinstance(group, PolicyGroup) else group.item.task
    return f"{name} {group.item.length} #{group.item.index}"


def _cost(group: Group, cells: list[Cell]) -> float:
    """Rough work in decode steps, for the estimate of what is left; weights fitted to the embedded model on a CPU."""
    prompt, forced = len(group.item.prompt), len(group.item.forced)
    if isinstance(group, PolicyGroup):
        return 0.1 * prompt + 0.4 * forced + 80 * len(cells)
    reading = prompt * (0.1 + 0.014 * len(cells))
    if isinstance(group, AnswerGroup):
        return reading + len(cells) * forced
    return reading + (0.5 + 0.25 * len(cells)) * forced  # fed side by side


def cells_of(loaded: LoadedModel, suite: Suite, group: Group) -> list[Cell]:
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
    base |= {"kind": "answer"} if isinstance(group, AnswerGroup) else {"kind": "item", "figures_of": FIGURES}
    return [
        base
        | {"system": s.name, "kv_budget": s.share, "parameters": dict(s.parameters)}
        | ({} if s.match_to is None else {"match_to": s.match_to})
        for s in group.systems
    ]


def parts_of(loaded: LoadedModel, group: Group, cells: list[Cell]) -> list[Part]:
    """Some of a group's cells in the parts that are run together."""
    if isinstance(group, PolicyGroup):
        most = len(cells)
    else:
        staged = model_shape(loaded, QEvictConfig(kv_dtype="model")).full_kv_bytes(len(group.item.prompt))
        most = max(FEW_CACHES, min(MANY_CACHES, STAGED_BYTES // staged))
    chunks = [cells[begin : begin + most] for begin in range(0, len(cells), max(1, most))]
    return [Part(group, chunk, _cost(group, chunk)) for chunk in chunks]


def run_part(loaded: LoadedModel, suite: Suite, part: Part) -> Iterator[tuple[Cell, Cell]]:
    """Runs one part: each cell and its row, in order. Of `suite` only dtype and seed count."""
    group, cells = part.group, part.cells
    made: Iterator[tuple[Cell, Cell]]
    if isinstance(group, PolicyGroup):
        made = _run_policies(loaded, suite, group, cells)
    else:
        systems = [
            System(cell["system"], cell["kv_budget"], cell["parameters"], cell.get("match_to")) for cell in cells
        ]
        if isinstance(group, AnswerGroup):
            answers = answer(loaded, group.item, systems, kv_dtype=suite.kv_dtype, seed=suite.seed)
            rows = [_answer_row(group.item, said) for said in answers]
        else:
            outcomes = measure(loaded, group.item, systems, kv_dtype=suite.kv_dtype, seed=suite.seed)
            rows = [_item_row(group.item, outcome) for outcome in outcomes]
        made = iter(zip(cells, rows, strict=True))
    for cell, row in made:
        yield cell, {**cell, **row, "threads": torch.get_num_threads()}


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
        "output_error_layers": list(outcome.output_error_layers),
        "configuration": dict(outcome.configuration),
        # Tokens are forced: nothing is answered that could be cut off or repeat itself.
        "truncated": None,
        "degenerate": None,
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
        "backend": said.backend,
        "configuration": dict(said.configuration),
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
                "configuration": config.replace(planned_new_tokens=trace.steps).to_dict(),
                "backend": "simulated on a FullKV trace",
                # The budget; no cache is built, so no byte is measured.
                "share": cell["kv_budget"],
                "truncated": None,
                "degenerate": None,
                "policies": {run.policy.name: run.summary(group.horizon) for run in runs},
                "infeasible_policies": refused,
                "promotion": promotion,
            },
        )


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
