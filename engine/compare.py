"""Several systems on the same prompt, at matched bytes.

    for event in iter_compare(loaded, text, ["fullkv", "qevict", "snapkv", "kivi-2"]):
        ...                                   # Progress, CompareStep …, CompareResult last

Teacher mode: FullKV chooses the tokens; every system is fed the same ones step by step beside it, so
that logits, attention outputs and residency line up. Free mode: every system goes its own way. The
prompt runs once for all. Greedy; one sequence. Knows no server and no file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.adapter import cache_keyword
from engine.baselines import registry
from engine.baselines.base import Rival, RunPlan
from engine.baselines.fanout import FanOut
from engine.baselines.leader import Leader
from engine.baselines.matching import BudgetSpec
from engine.baselines.outputs import OutputProbe
from engine.baselines.recorder import FutureMasses, Reference
from engine.baselines.rival_cache import RivalCache
from engine.baselines.witness import Witness
from engine.budget import KVShape
from engine.comparison import (
    MOST_SYSTEMS,
    CompareOptions,
    CompareResult,
    CompareStep,
    Frame,
    SystemChoice,
    SystemResult,
    churn,
    frame,
    same_sets,
)
from engine.errors import ConfigError, OutOfMemoryError, PromptError
from engine.models import LoadedModel
from engine.pieces import PieceDecoder, pieces_of
from engine.prompt import PREFILL_CHUNK, eos_ids, prompt_ids, prompt_parts
from engine.tally import Tally
from engine.trace import Progress, Tier

__all__ = [
    "BudgetSpec",
    "CompareOptions",
    "CompareResult",
    "CompareStep",
    "Frame",
    "SystemChoice",
    "SystemResult",
    "compare",
    "iter_compare",
]


def compare(
    loaded: LoadedModel,
    prompt: str,
    systems: Sequence[SystemChoice | str],
    options: CompareOptions | None = None,
) -> CompareResult:
    """The result of `iter_compare`."""
    for event in iter_compare(loaded, prompt, systems, options):
        if isinstance(event, CompareResult):
            return event
    raise RuntimeError("a comparison must end with a result")


def iter_compare(
    loaded: LoadedModel,
    prompt: str,
    systems: Sequence[SystemChoice | str],
    options: CompareOptions | None = None,
    *,
    should_stop: Callable[[], bool] | None = None,
) -> Iterator[Progress | CompareStep | CompareResult]:
    """Runs a comparison and yields its progress; the last event is the result.

    Args:
        systems: one to `MOST_SYSTEMS`, names or choices.
        should_stop: asked between steps; True ends the comparison with what there is.

    Raises:
        ConfigError, BudgetError, BackendError, PromptError, UnsupportedModelError: before any work.
        OutOfMemoryError: during the run.
    """
    run = _Comparison(loaded, prompt, systems, options or CompareOptions())
    try:
        yield from run.events(should_stop or (lambda: False))
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise OutOfMemoryError(
            f"{loaded.label} ran out of memory on {loaded.device} while comparing {len(run.results)} systems: take a "
            "shorter prompt, fewer systems or a smaller model."
        ) from error


class _Comparison:
    """One comparison: settled at construction, so that mistakes show before any work."""

    def __init__(
        self, loaded: LoadedModel, prompt: str, systems: Sequence[SystemChoice | str], options: CompareOptions
    ) -> None:
        self.loaded, self.options = loaded, options
        choices = [SystemChoice(choice) if isinstance(choice, str) else choice for choice in systems]
        if not 1 <= len(choices) <= MOST_SYSTEMS:
            raise ConfigError(f"a comparison takes 1 to {MOST_SYSTEMS} systems, got {len(choices)}.")
        self.ids = prompt_ids(loaded, prompt, options.chat)
        room = loaded.max_positions - len(self.ids)
        if room < 1:
            raise PromptError(
                f"the prompt must be shorter than the model's {loaded.max_positions} positions, got {len(self.ids)} "
                "tokens: shorten it."
            )
        self.new_tokens = min(options.max_new_tokens, room)
        self.reference = RivalCache(loaded.model, Reference(), RunPlan(planned_new_tokens=self.new_tokens))
        stored = RunPlan(kv_dtype=options.kv_dtype).stored(loaded.model.dtype)
        own = self.reference.kv_shape
        self.shape = KVShape(own.num_layers, own.num_kv_heads, own.head_dim, stored.itemsize)
        text = loaded.model.config.get_text_config(decoder=True)
        rivals = [registry.rival(choice.name, choice.parameters) for choice in choices]
        self.masses: FutureMasses | None = None
        self.witness: Witness | None = None
        if options.mode == "teacher":
            self.masses = FutureMasses(
                own.num_layers,
                int(text.num_attention_heads),
                own.num_kv_heads,
                systems=len(choices),
                horizon=options.horizon,
                block=options.interval,
                device=self.reference.device,
            )
            if any(rival.needs_reference for rival in rivals):
                self.witness = Witness(self.masses, max(rival.lookahead() for rival in rivals))
            self.reference.rival = Reference(masses=self.masses, witness=self.witness)
        self.results: list[SystemResult] = []
        self.caches: list[Any] = []
        for choice, rival in zip(choices, rivals, strict=True):
            self._enter(choice, rival, choices)
        self.residency: list[Tensor] = []
        self.churn: list[list[float]] = [[] for _ in choices]

    def _enter(self, choice: SystemChoice, rival: Rival, choices: list[SystemChoice]) -> None:
        info = next(info for info in registry.systems() if info.name == choice.name)
        budget: BudgetSpec | None = choice.budget or self.options.budget
        prompt, new = len(self.ids), self.new_tokens
        if choice.match_to is not None:
            other = next((entry for entry in choices if entry.name == choice.match_to), SystemChoice(choice.match_to))
            budget = registry.match_to(
                other.name, self.shape, prompt, new, kv_dtype=self.options.kv_dtype, parameters=other.parameters
            )
        if not rival.budgeted:
            budget = None
        options = self.options
        run = RunPlan(budget, new, options.kv_dtype, options.seed, self.loaded.tokenizer, self.witness)
        rival.check_run(run)
        rival.check(self.shape, self.shape.head_dim)
        expected = rival.account(self.shape, prompt, new - 1, run)
        said = None
        if budget is not None:
            share, total, tokens = budget.resolved(self.shape, prompt, new)
            said = {"share": share, "bytes": float(total), "tokens": tokens}
        self.caches.append(rival.build(self.loaded.model, run))
        self.results.append(
            SystemResult(
                choice.name,
                info.label,
                info.family,
                info.keeps,
                info.storage,
                dict(choice.parameters),
                said,
                rival.notices(self.shape, prompt, run),
                expected,
            )
        )

    # ---- events -------------------------------------------------------------------------------------

    def events(self, stopped: Callable[[], bool]) -> Iterator[Progress | CompareStep | CompareResult]:
        began = time.perf_counter()
        fan = FanOut(self.loaded.model, [self.reference, *self.caches])
        logits: Tensor | None = None
        done = 0
        for part in prompt_parts(self.ids, PREFILL_CHUNK):
            logits = fan.forward(part, done)
            done += len(part)
            yield Progress("prefill", done, len(self.ids))
            if stopped():
                break
        if logits is None:
            raise PromptError("the prompt has no token.")
        prefill = time.perf_counter() - began
        self.times: list[list[float]] = [[] for _ in range(len(self.caches) + 1)]
        if len(self.ids) > done:
            yield self._result([], None, prefill, began, stopped=True)
            return
        self._settle([self.reference])
        if self.options.mode == "teacher":
            yield from self._teacher(int(logits.argmax()), stopped, prefill, began)
        else:
            self._settle(self.caches)
            yield from self._free(logits, stopped, prefill, began)

    def _teacher(
        self, first: int, stopped: Callable[[], bool], prefill: float, began: float
    ) -> Iterator[Progress | CompareStep | CompareResult]:
        probe = OutputProbe(self.loaded.model, self.reference.managed_layers)
        leader = Leader(
            lambda token: self._step(0, self.reference, token),
            probe,
            first,
            limit=self.new_tokens - 1,
            ends=() if self.options.ignore_eos else eos_ids(self.loaded),
            ahead=0 if self.witness is None else self.witness.ahead,
        )
        with probe:
            leader.run_ahead()
        self._settle(self.caches)
        with probe:
            yield from self._follow(leader, probe, first, stopped, prefill, began)

    def _follow(
        self,
        leader: Leader,
        probe: OutputProbe,
        first: int,
        stopped: Callable[[], bool],
        prefill: float,
        began: float,
    ) -> Iterator[Progress | CompareStep | CompareResult]:
        decoder = PieceDecoder(self.loaded.tokenizer)
        tokens = [first]
        pieces = [decoder.push(first)]
        tally = Tally(self.results)
        self._look()
        halted = False
        while leader.more and not (halted := stopped()):
            led = leader.next()
            if self.witness is not None:
                self.witness.pass_step()
            tally.begin(led.truth, led.choice)
            found = []
            for number, cache in enumerate(self.caches):
                own = self._step(number + 1, cache, led.fed).log_softmax(-1)
                found.append(tally.add(number, own, led.truth, led.choice, probe.take(), led.outputs))
            step = len(tokens) - 1
            tokens.append(led.choice)
            pieces.append(decoder.push(led.choice))
            if (step + 1) % self.options.interval == 0:
                self._look()
            yield CompareStep(
                step, led.choice, pieces[-1], tuple(kl for kl, _ in found), tuple(agrees for _, agrees in found)
            )
        if self.masses is not None:
            self.masses.finish()
        tally.finish(self.masses, self.churn)
        text = "".join(pieces) + decoder.flush()
        yield self._result(tokens, text, prefill, began, stopped=halted, perplexity=tally.perplexity)

    def _free(
        self, logits: Tensor, stopped: Callable[[], bool], prefill: float, began: float
    ) -> Iterator[Progress | CompareStep | CompareResult]:
        ends = eos_ids(self.loaded)
        runs: list[list[int]] = []
        total = self.new_tokens * (len(self.caches) + 1)
        halted = False
        for number, cache in enumerate([self.reference, *self.caches]):
            tokens = [int(logits.argmax())]
            self._look_at(number - 1)
            for step in range(self.new_tokens - 1):
                halted = halted or stopped()
                if halted or (tokens[-1] in ends and not self.options.ignore_eos):
                    break
                tokens.append(int(self._step(number, cache, tokens[-1]).argmax()))
                if (step + 1) % self.options.interval == 0:
                    self._look_at(number - 1)
                yield Progress("decode", number * self.new_tokens + len(tokens), total)
            runs.append(tokens)
        pieces = [pieces_of(self.loaded.tokenizer, tokens) for tokens in runs]
        texts = ["".join(own) for own in pieces]
        for tokens, own, text, result in zip(runs[1:], pieces[1:], texts[1:], self.results, strict=True):
            result.token_ids, result.pieces, result.text = tokens, own, text
            pairs = enumerate(zip(tokens, runs[0], strict=False))
            shorter = min(len(tokens), len(runs[0]))
            same = len(tokens) == len(runs[0])
            result.first_difference = next((at for at, (a, b) in pairs if a != b), None if same else shorter)
        yield self._result(runs[0], texts[0], prefill, began, stopped=halted)

    # ---- work ---------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _settle(self, caches: Sequence[Any]) -> None:
        """Ends the prompt of some caches."""
        for cache in caches:
            at = time.perf_counter()
            cache.settle()
            for own, result in zip(self.caches, self.results, strict=True):
                if own is cache:
                    result.compress_ms = (time.perf_counter() - at) * 1e3

    @torch.inference_mode()
    def _step(self, number: int, cache: Any, token: int) -> Tensor:
        """One decode step of one cache: logits float32 [vocabulary]."""
        model = self.loaded.model
        at = int(cache.get_seq_length(self.reference.managed_layers[0]))
        began = time.perf_counter()
        output = model(
            input_ids=torch.tensor([[token]], device=model.device),
            position_ids=torch.tensor([[at]], device=model.device),
            use_cache=True,
            **{cache_keyword(model): cache},
        )
        logits: Tensor = output.logits[0, -1].float()
        if logits.is_cuda:
            torch.cuda.synchronize()
        self.times[number].append(time.perf_counter() - began)
        return logits

    @torch.inference_mode()
    def _look(self) -> None:
        """Residency of every system now: an event for the masses, a frame, and churn."""
        now = [cache.residency() for cache in self.caches]
        if not self.residency:
            for number in same_sets(now):
                self.results[number].notices.append("same_set")
        if self.masses is not None:
            self.masses.boundary(now)
        for number, (table, result) in enumerate(zip(now, self.results, strict=True)):
            if self.residency:
                self.churn[number].append(churn(self.residency[number], table))
            if self.options.frames:
                result.frames.append(frame(table, self.options.sink_tokens, self.options.interval))
        self.residency = now

    @torch.inference_mode()
    def _look_at(self, number: int) -> None:
        """A frame of one system that goes its own way; -1 is the reference, which needs none."""
        if number >= 0 and self.options.frames:
            table = self.caches[number].residency()
            self.results[number].frames.append(frame(table, self.options.sink_tokens, self.options.interval))

    def _result(
        self,
        tokens: list[int],
        text: str | None,
        prefill: float,
        began: float,
        *,
        stopped: bool,
        perplexity: float | None = None,
    ) -> CompareResult:
        for result, cache, times in zip(self.results, self.caches, self.times[1:], strict=True):
            length = max(1, int(cache.get_seq_length(self.reference.managed_layers[0])))
            result.bytes, result.allocated_bytes = cache.persistent_bytes, cache.allocated_bytes
            result.share = result.bytes / self.shape.full_kv_bytes(length)
            table = cache.residency()
            result.full_tokens = float((table == Tier.FULL).float().mean())
            result.quant_tokens = float((table == Tier.QUANT).float().mean())
            result.ms_per_token = _median_ms(times)
        stored = RunPlan(kv_dtype=self.options.kv_dtype).stored(self.loaded.model.dtype)
        return CompareResult(
            mode=self.options.mode,
            prompt_tokens=len(self.ids),
            token_ids=tokens,
            text=text or "",
            pieces=pieces_of(self.loaded.tokenizer, self.ids + tokens),
            kv_dtype=str(stored).removeprefix("torch."),
            full_kv_bytes=self.shape.full_kv_bytes(len(self.ids) + max(0, len(tokens) - 1)),
            perplexity=perplexity,
            reference_ms_per_token=_median_ms(self.times[0]),
            prefill_ms=prefill * 1e3,
            seconds=time.perf_counter() - began,
            stopped=stopped,
            systems=self.results,
        )


def _median_ms(times: list[float]) -> float:
    return sorted(times)[len(times) // 2] * 1e3 if times else 0.0
