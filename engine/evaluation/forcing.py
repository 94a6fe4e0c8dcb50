"""One item, several systems: every system is fed the same tokens after one shared prompt, and scored against FullKV.

The prompt runs once for all. FullKV sees the forced tokens in one forward; the others decode them one by one, as
they would when generating, side by side where they can; attention outputs are read at the same tokens. Greedy
exactness needs no generation: an answer is exact where every one of its tokens is the likeliest under its own prefix.
One sequence.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from engine.adapter import cache_keyword
from engine.baselines import registry
from engine.baselines.base import Rival, RunPlan
from engine.baselines.fanout import FanOut
from engine.baselines.matching import BudgetSpec
from engine.baselines.outputs import OutputProbe
from engine.budget import KVShape
from engine.comparison import relative_error
from engine.errors import BackendError, BudgetError, ConfigError, EngineError, PromptError
from engine.evaluation.items import MAIN, Item, Span
from engine.models import LoadedModel
from engine.prompt import PREFILL_CHUNK, prompt_parts
from engine.row_layer import attends_alone, beside_each_other

FULL = "fullkv"


@dataclass(frozen=True, slots=True)
class System:
    """A system at an operating point.

    Attributes:
        name: in the registry. share: of FullKV's bytes at prompt + forced tokens, None for its own operating point.
        parameters: those that differ from the registry's.
        match_to: name of a system with an operating point of its own, whose bytes at the end are the budget instead.
    """

    name: str
    share: float | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    match_to: str | None = None

    @property
    def label(self) -> str:
        """For tables."""
        text = self.name if self.share is None else f"{self.name} {self.share:.0%}"
        if self.match_to is not None:
            text = f"{self.name} at {self.match_to}'s bytes"
        extra = ", ".join(f"{key}={value}" for key, value in self.parameters.items())
        return f"{text} ({extra})" if extra else text


@dataclass(frozen=True, slots=True)
class Score:
    """How one span went.

    Attributes:
        nll: mean negative log-likelihood of the tokens, nats. exact: all are the likeliest. top1: share that is.
        kl: mean KL(FullKV ‖ system), nats. agreement: share whose likeliest token is FullKV's.
        choice: the right answer is the likeliest of the choices; None where the task is none.
        output_error: mean ‖o - o_full‖ / ‖o_full‖ of attention outputs over layers, heads and tokens, errors of lower
            layers included; None where the model has no output projection that can be read.
    """

    nll: float
    exact: bool
    top1: float
    kl: float
    agreement: float
    choice: bool | None = None
    output_error: float | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one system did with one item. `infeasible` says why it could not; all else is empty then.

    bytes, share: persistent at the end, and over FullKV's in the same dtype at the same length. backend: what ran.
    ms_per_token: None where it was decoded beside other systems.
    output_error_layers: the deciding span's output error of each managed layer.
    configuration: every parameter of the system and its budget in bytes, defaults included.
    """

    system: System
    scores: Mapping[str, Score] = field(default_factory=dict)
    bytes: int = 0
    share: float = 0.0
    ms_per_token: float | None = None
    backend: str = ""
    infeasible: str | None = None
    smallest_share: float | None = None
    output_error_layers: tuple[float, ...] = ()
    configuration: Mapping[str, Any] = field(default_factory=dict)


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
    settings: list[dict[str, Any]] = []
    for place, system in enumerate(systems):
        rival = registry.rival(system.name, system.parameters)
        dtype = "model" if system.name == FULL else kv_dtype
        settings.append(configuration(rival, None, shape, len(item.prompt), new, dtype))
        if system.name == FULL:
            continue
        try:
            budget = budget_of(system, shape, len(item.prompt), new, kv_dtype) if rival.budgeted else None
            settings[place] = configuration(rival, budget, shape, len(item.prompt), new, kv_dtype)
            run = RunPlan(budget, new, kv_dtype, seed, loaded.tokenizer)
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
    with OutputProbe(loaded.model, full.managed_layers, every_token=True) as probe:
        truth = _forward(loaded, full, list(item.forced[:-1]), at)[0].log_softmax(-1)
        true_outputs = probe.take()
    ready: list[tuple[int, Any]] = []
    for place, cache in caches:
        try:
            cache.settle()
            ready.append((place, cache))
        except BudgetError as error:
            refused[place] = error
    outcomes: dict[int, Outcome] = {}
    for group in _groups(ready):
        taken = _decode(loaded, [cache for _, cache in group], item, at, full.managed_layers)
        for row, (place, cache) in enumerate(group):
            log_probs = taken.logits[:, row].log_softmax(-1)
            errors = relative_error(taken.outputs[:, :, row], true_outputs) if true_outputs.numel() else None
            outcomes[place] = Outcome(
                systems[place],
                {name: score(log_probs, truth, item, span, errors) for name, span in item.spans.items()},
                cache.persistent_bytes,
                cache.persistent_bytes / shape.full_kv_bytes(total - 1),
                taken.ms_per_token,
                str(getattr(cache, "backend_name", "torch")),
                output_error_layers=_layers(errors, item),
                configuration=settings[place],
            )
            cache.forget()
    for place, system in enumerate(systems):
        if place in refused:
            why = refused[place]
            least = why.smallest_share if isinstance(why, BudgetError) else None
            outcomes[place] = Outcome(system, infeasible=str(why), smallest_share=least, configuration=settings[place])
        elif system.name == FULL:
            none = relative_error(true_outputs, true_outputs) if true_outputs.numel() else None
            outcomes[place] = Outcome(
                system,
                {name: score(truth, truth, item, span, none) for name, span in item.spans.items()},
                shape.full_kv_bytes(total - 1),
                1.0,
                None,
                "fullkv",
                output_error_layers=_layers(none, item),
                configuration=settings[place],
            )
    return [outcomes[place] for place in range(len(systems))]


@dataclass(frozen=True, slots=True)
class _Taken:
    """What decoding gave: logits [steps, rows, vocabulary], attention outputs [layers, steps, rows, heads, d]."""

    logits: Tensor
    outputs: Tensor
    ms_per_token: float | None


def _groups(ready: Sequence[tuple[int, Any]]) -> list[list[tuple[int, Any]]]:
    """Caches that are decoded in one forward each: those that attend by themselves together, any other one alone."""
    together = [entry for entry in ready if attends_alone(entry[1])]
    alone = [[entry] for entry in ready if not attends_alone(entry[1])]
    return [group for group in (together, *alone) if group]


def _decode(loaded: LoadedModel, caches: Sequence[Any], item: Item, at: int, layers: list[int]) -> _Taken:
    """Feeds the forced tokens one by one, each to all caches at once.

    Reading the weights is most of a step, so ten systems together take about a quarter of their time one by one. The
    time of a token is then nobody's, and not told.
    """
    cache = caches[0] if len(caches) == 1 else beside_each_other(caches)
    logits, times, outputs = [], [], []
    with OutputProbe(loaded.model, layers, every_token=True, every_row=True) as probe:
        for step, token in enumerate(item.forced[:-1]):
            began = time.perf_counter()
            logits.append(_forward(loaded, cache, [token], at + step, len(caches))[:, 0])
            times.append(time.perf_counter() - began)
            outputs.append(probe.take().squeeze(2))
    median = sorted(times)[len(times) // 2] * 1e3 if times and len(caches) == 1 else None
    return _Taken(torch.stack(logits), torch.stack(outputs, 1), median)


def budget_of(system: System, shape: KVShape, prompt: int, new: int, kv_dtype: str) -> BudgetSpec | None:
    """A system's budget after `prompt` tokens; one that is matched gets what the other holds once all were fed.

    Raises:
        ConfigError: the system to match does not exist, or does not fit the model.
    """
    if system.match_to is not None:
        other = registry.rival(system.match_to)
        other.check(shape, shape.head_dim)
        return BudgetSpec(total_bytes=other.account(shape, prompt, new - 1, RunPlan(None, new, kv_dtype)))
    return None if system.share is None else BudgetSpec(share=system.share)


def configuration(
    rival: Rival, budget: BudgetSpec | None, shape: KVShape, prompt: int, new: int, kv_dtype: str
) -> dict[str, Any]:
    """Everything that a run of a system is told, as plain values; `budget_bytes` None for its own operating point."""
    return {
        **asdict(rival),
        "kv_dtype": kv_dtype,
        "planned_new_tokens": new,
        "budget_bytes": None if budget is None else budget.model_bytes(shape, prompt, new),
    }


def score(log_probs: Tensor, truth: Tensor, item: Item, span: Span, errors: Tensor | None = None) -> Score:
    """Scores one span.

    Args:
        log_probs, truth: [forced - 1, vocabulary]; row j predicts forced token j + 1.
        errors: relative error of attention outputs [layers, forced - 1]; column j is where token j was fed.
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
        output_error=None if errors is None else float(errors[:, rows].mean()),
    )


def _layers(errors: Tensor | None, item: Item) -> tuple[float, ...]:
    """Mean error of each layer over the deciding span."""
    if errors is None or MAIN not in item.spans:
        return ()
    span = item.spans[MAIN]
    return tuple(round(value, 6) for value in errors[:, span.begin - 1 : span.end - 1].mean(1).tolist())


def _forward(loaded: LoadedModel, cache: Any, ids: list[int], at: int, rows: int = 1) -> Tensor:
    """Logits float32 [rows, tokens, vocabulary] of the same tokens in every row."""
    model = loaded.model
    output = model(
        input_ids=torch.tensor([ids] * rows, device=model.device),
        position_ids=torch.arange(at, at + len(ids), device=model.device)[None].expand(rows, -1),
        use_cache=True,
        **{cache_keyword(model): cache},
    )
    logits: Tensor = output.logits.float()
    if logits.is_cuda:
        torch.cuda.synchronize()
    return logits
