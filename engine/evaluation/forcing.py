"""One item, several systems: every system is fed the same tokens after one shared prompt, and scored against FullKV.

The prompt runs once for all. FullKV sees the forced tokens in one forward; the others decode them one by one, as
they would when generating. Greedy exactness needs no generation: an answer is exact where every one of its tokens
is the likeliest under its own prefix. One sequence.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from engine.adapter import cache_keyword
from engine.baselines import registry
from engine.baselines.base import RunPlan
from engine.baselines.fanout import FanOut
from engine.baselines.matching import BudgetSpec
from engine.budget import KVShape
from engine.errors import BackendError, BudgetError, ConfigError, EngineError, PromptError
from engine.evaluation.items import Item, Span
from engine.generate import PREFILL_CHUNK, prompt_parts
from engine.models import LoadedModel

FULL = "fullkv"


@dataclass(frozen=True, slots=True)
class System:
    """A system at an operating point.

    Attributes:
        name: in the registry. share: of FullKV's bytes at prompt + forced tokens, None for its own operating point.
        parameters: those that differ from the registry's.
    """

    name: str
    share: float | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """For tables."""
        text = self.name if self.share is None else f"{self.name} {self.share:.0%}"
        extra = ", ".join(f"{key}={value}" for key, value in self.parameters.items())
        return f"{text} ({extra})" if extra else text


@dataclass(frozen=True, slots=True)
class Score:
    """How one span went.

    Attributes:
        nll: mean negative log-likelihood of the tokens, nats. exact: all are the likeliest. top1: share that is.
        kl: mean KL(FullKV ‖ system), nats. agreement: share whose likeliest token is FullKV's.
        choice: the right answer is the likeliest of the choices; None where the task is none.
    """

    nll: float
    exact: bool
    top1: float
    kl: float
    agreement: float
    choice: bool | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one system did with one item. `infeasible` says why it could not; all else is empty then.

    bytes, share: persistent at the end, and over FullKV's in the same dtype at the same length. backend: what ran.
    """

    system: System
    scores: Mapping[str, Score] = field(default_factory=dict)
    bytes: int = 0
    share: float = 0.0
    ms_per_token: float | None = None
    backend: str = ""
    infeasible: str | None = None
    smallest_share: float | None = None


@torch.inference_mode()
def measure(
    loaded: LoadedModel, item: Item, systems: Sequence[System], *, kv_dtype: str = "float16", seed: int = 0
) -> list[Outcome]:
    """Runs FullKV and the systems on one item; outcomes in the order of `systems`.

    Args:
        kv_dtype: what systems store full-precision tokens in; FullKV keeps the model's own.

    Raises:
        PromptError: more tokens than the model has positions, or a prompt of fewer than 2.
        ConfigError: an unknown system or parameter. UnsupportedModelError: the model can't be managed.
    """
    total = len(item.prompt) + len(item.forced)
    if total > loaded.max_positions:
        raise PromptError(f"item {item.task} {item.index} has {total} tokens, the model {loaded.max_positions} places.")
    if len(item.prompt) < 2:
        raise PromptError(f"item {item.task} {item.index} has a prompt of {len(item.prompt)} tokens; 2 are needed.")
    new = len(item.forced)
    full = registry.rival(FULL).build(loaded.model, RunPlan(planned_new_tokens=new))
    own: KVShape = full.kv_shape
    stored = RunPlan(kv_dtype=kv_dtype).stored(loaded.model.dtype)
    shape = KVShape(own.num_layers, own.num_kv_heads, own.head_dim, stored.itemsize)
    caches: list[Any] = []
    refused: dict[int, EngineError] = {}
    for place, system in enumerate(systems):
        if system.name == FULL:
            continue
        rival = registry.rival(system.name, system.parameters)
        budget = BudgetSpec(share=system.share) if system.share is not None and rival.budgeted else None
        run = RunPlan(budget, new, kv_dtype, seed, loaded.tokenizer)
        try:
            rival.check(shape, shape.head_dim)
            rival.account(shape, len(item.prompt), new - 1, run)
            caches.append((place, rival.build(loaded.model, run)))
        except (BudgetError, ConfigError, BackendError) as error:
            refused[place] = error
    fan = FanOut(loaded.model, [full, *(cache for _, cache in caches)])
    at = 0
    for part in prompt_parts(list(item.prompt), PREFILL_CHUNK):
        fan.forward(part, at)
        at += len(part)
    full.settle()
    truth = _forward(loaded, full, list(item.forced[:-1]), at).log_softmax(-1)
    outcomes: dict[int, Outcome] = {}
    for place, cache in caches:
        try:
            cache.settle()
        except BudgetError as error:
            refused[place] = error
            continue
        logits, times = [], []
        for step, token in enumerate(item.forced[:-1]):
            began = time.perf_counter()
            logits.append(_forward(loaded, cache, [token], at + step)[0])
            times.append(time.perf_counter() - began)
        log_probs = torch.stack(logits).log_softmax(-1)
        outcomes[place] = Outcome(
            systems[place],
            {name: score(log_probs, truth, item, span) for name, span in item.spans.items()},
            cache.persistent_bytes,
            cache.persistent_bytes / shape.full_kv_bytes(total - 1),
            sorted(times)[len(times) // 2] * 1e3 if times else None,
            str(getattr(cache, "backend_name", "")),
        )
        cache.forget()
    for place, system in enumerate(systems):
        if place in refused:
            why = refused[place]
            least = why.smallest_share if isinstance(why, BudgetError) else None
            outcomes[place] = Outcome(system, infeasible=str(why), smallest_share=least)
        elif system.name == FULL:
            scores = {name: score(truth, truth, item, span) for name, span in item.spans.items()}
            outcomes[place] = Outcome(system, scores, shape.full_kv_bytes(total - 1), 1.0, None, "fullkv")
    return [outcomes[place] for place in range(len(systems))]


def score(log_probs: Tensor, truth: Tensor, item: Item, span: Span) -> Score:
    """Scores one span.

    Args:
        log_probs, truth: [forced - 1, vocabulary]; row j predicts forced token j + 1.
    """
    rows = slice(span.begin - 1, span.end - 1)
    ours, theirs = log_probs[rows], truth[rows]
    wanted = torch.tensor(item.forced[span.begin : span.end], device=ours.device)
    best = ours.argmax(-1)
    hits = best == wanted
    kl = (theirs.exp() * (theirs - ours)).sum(-1).clamp_min(0.0)
    choice = None
    if item.choices:
        choice = int(ours[0, list(item.choices)].argmax()) == 0
    return Score(
        nll=float(-ours.gather(1, wanted[:, None]).mean()),
        exact=bool(hits.all()),
        top1=float(hits.float().mean()),
        kl=float(kl.mean()),
        agreement=float((best == theirs.argmax(-1)).float().mean()),
        choice=choice,
    )


def _forward(loaded: LoadedModel, cache: Any, ids: list[int], at: int) -> Tensor:
    """Logits float32 [tokens, vocabulary]."""
    model = loaded.model
    output = model(
        input_ids=torch.tensor([ids], device=model.device),
        position_ids=torch.arange(at, at + len(ids), device=model.device)[None],
        use_cache=True,
        **{cache_keyword(model): cache},
    )
    logits: Tensor = output.logits[0].float()
    if logits.is_cuda:
        torch.cuda.synchronize()
    return logits
