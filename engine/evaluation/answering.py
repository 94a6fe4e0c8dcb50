"""Several systems answer one sample, each generating greedily on its own after a shared prompt.

Knows caches by what comparisons ask of them. One sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.baselines import registry
from engine.baselines.base import RunPlan
from engine.baselines.fanout import FanOut
from engine.budget import KVShape
from engine.errors import BackendError, BudgetError, ConfigError, EngineError, PromptError
from engine.evaluation import scorers
from engine.evaluation.forcing import FULL, System, _forward, budget_of, configuration
from engine.evaluation.sample import Sample
from engine.models import LoadedModel
from engine.prompt import PREFILL_CHUNK, eos_ids, prompt_parts


@dataclass(frozen=True, slots=True)
class Answer:
    """What one system said. `truncated`: it used all its tokens; `degenerate`: its end repeats itself.

    backend: what ran. configuration: every parameter of the system and its budget in bytes, defaults included.
    """

    system: System
    text: str = ""
    figures: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    truncated: bool = False
    degenerate: bool = False
    bytes: int = 0
    share: float = 0.0
    infeasible: str | None = None
    smallest_share: float | None = None
    backend: str = ""
    configuration: Mapping[str, Any] = field(default_factory=dict)


@torch.inference_mode()
def answer(
    loaded: LoadedModel, sample: Sample, systems: Sequence[System], *, kv_dtype: str = "float16", seed: int = 0
) -> list[Answer]:
    """Runs all systems on one sample; answers in their order.

    Raises:
        PromptError: more tokens than the model has positions.
    """
    total = len(sample.prompt) + len(sample.forced)
    if total > loaded.max_positions:
        raise PromptError(
            f"{sample.task} {sample.index} needs {total} positions, the model has {loaded.max_positions}."
        )
    new = len(sample.forced)
    caches: list[Any] = []
    refused: dict[int, EngineError] = {}
    first = registry.rival(FULL).build(loaded.model, RunPlan(planned_new_tokens=new))
    own: KVShape = first.kv_shape
    stored = RunPlan(kv_dtype=kv_dtype).stored(loaded.model.dtype)
    shape = KVShape(own.num_layers, own.num_kv_heads, own.head_dim, stored.itemsize)
    settings: list[dict[str, Any]] = []
    for place, system in enumerate(systems):
        rival = registry.rival(system.name, system.parameters)
        dtype = "model" if system.name == FULL else kv_dtype
        settings.append(configuration(rival, None, shape, len(sample.prompt), new, dtype))
        try:
            budget = budget_of(system, shape, len(sample.prompt), new, kv_dtype) if rival.budgeted else None
            settings[place] = configuration(rival, budget, shape, len(sample.prompt), new, dtype)
            run = RunPlan(budget, new, dtype, seed, loaded.tokenizer)
            rival.check(shape, shape.head_dim)
            rival.account(shape, len(sample.prompt), new - 1, run)
            caches.append((place, rival.build(loaded.model, run)))
        except (BudgetError, ConfigError, BackendError) as error:
            refused[place] = error
    fan = FanOut(loaded.model, [first, *(cache for _, cache in caches)])
    at = 0
    for part in prompt_parts(list(sample.prompt), PREFILL_CHUNK):
        fan.forward(part, at)
        at += len(part)
    out: dict[int, Answer] = {}
    for place, cache in caches:
        try:
            cache.settle()
        except BudgetError as error:
            refused[place] = error
            continue
        text, tokens, truncated = _generate(loaded, cache, sample, at)
        length = max(1, len(sample.prompt) + len(sample.fed) + tokens - 1)
        full = systems[place].name == FULL
        held = shape.full_kv_bytes(length) if full else int(cache.persistent_bytes)
        out[place] = Answer(
            systems[place],
            text,
            sample.score(text),
            tokens,
            truncated,
            scorers.degenerate(text),
            held,
            held / shape.full_kv_bytes(length),
            backend=FULL if full else str(getattr(cache, "backend_name", "torch")),
            configuration=settings[place],
        )
        cache.forget()
    for place, why in refused.items():
        least = why.smallest_share if isinstance(why, BudgetError) else None
        out[place] = Answer(systems[place], infeasible=str(why), smallest_share=least, configuration=settings[place])
    return [out[place] for place in range(len(systems))]


def _generate(loaded: LoadedModel, cache: Any, sample: Sample, at: int) -> tuple[str, int, bool]:
    """(text, tokens, whether the answer was cut off), greedy."""
    ends = eos_ids(loaded)
    logits = torch.empty(0)
    for token in sample.fed:
        logits = _forward(loaded, cache, [token], at)[-1]
        at += 1
    said: list[int] = []
    text = ""
    while len(said) < sample.new_tokens:
        token = int(logits.argmax())
        if token in ends:
            return text, len(said), False
        said.append(token)
        text = str(loaded.tokenizer.decode(said, skip_special_tokens=True))
        found = [text.index(stop) for stop in sample.stop if stop in text]
        if found:
            return text[: min(found)], len(said), False
        if sample.first_line and text.lstrip("\n").count("\n"):
            return text, len(said), False
        if len(said) < sample.new_tokens:
            logits = _forward(loaded, cache, [token], at)[-1]
            at += 1
    return text, len(said), True
