"""One run: the decode loop over one cache, as an iterator of trace events.

Knows the model, the cache and the reference; knows no server and no file. `engine.generate` runs one alone,
`engine.generate_batch` several together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.adapter import cache_keyword
from engine.budget import KVShape, Plan, make_plan
from engine.cache import QEvictCache, RoutingRecord
from engine.config import QEvictConfig
from engine.errors import PromptError
from engine.model_shape import model_shape
from engine.models import LoadedModel
from engine.pieces import PieceDecoder
from engine.prefix import PrefixStore, put, take
from engine.prompt import PREFILL_CHUNK, eos_ids, prompt_parts, split_ids
from engine.readings import keyframe, memory_reading, routing_event, score_event
from engine.reference import Reference
from engine.run_options import RunOptions
from engine.run_summary import RunTally, run_end, run_meta, run_settings
from engine.trace import EndEvent, LateMetrics, MemoryReading, Progress, RunMeta, StepEvent, TraceEvent

WORKSPACE = 1.25
"""Bytes that reading a prompt takes, over those of its keys and values: scores and one layer's output."""
WAITING = Progress("decode", 0, 0)
"""Said by a run of a batch that waits until its token has been fed; no part of a trace."""


class Run:
    """One run: settled at construction, so that mistakes show before any work."""

    def __init__(
        self,
        loaded: LoadedModel,
        prompt: str,
        config: QEvictConfig,
        options: RunOptions,
        session: str,
        policy: str,
        document: str,
        prefixes: PrefixStore | None,
    ) -> None:
        ids, self.split = split_ids(loaded, document, prompt, options.chat)
        self.prefixes = prefixes
        self._settle(loaded, ids, config, options, session, policy)
        self.cache = QEvictCache(loaded.model, self.config)
        shape = model_shape(loaded, self.config)
        self.shape = KVShape(len(self.cache.managed_layers), shape.num_kv_heads, shape.head_dim, shape.element_bytes)
        first: Plan = make_plan(self.config, self.shape, self.split or len(self.ids))
        settled = self.config.replace(local_tokens=first.local_tokens)
        self.plan: Plan = make_plan(settled, self.shape, len(self.ids)) if self.split else first
        self.notices += self.plan.notices
        self.cache.on_route = self.records.append
        self.cache.expected_columns = self.split or len(self.ids)
        self.with_reference = options.reference and len(self.ids) > 1 and config.prefill_routing == "end"

    def _settle(
        self, loaded: LoadedModel, ids: list[int], config: QEvictConfig, options: RunOptions, session: str, policy: str
    ) -> None:
        """What does not depend on the cache."""
        self.loaded, self.options, self.session, self.policy = loaded, options, session, policy
        self.ids = ids
        self.prefix_used = False
        self._logits = torch.empty(0)
        self.together = False
        """Whether a batch feeds the tokens, see `engine.generate_batch`."""
        self.wanted = 0
        """The token that is to be fed next."""
        self.given: Sequence[int] = ()
        """Tokens to take instead of the model's own choice, as many as the run generates; empty = its own."""
        self.most_rows = 1
        """Runs that shared a forward with this one, itself included."""
        room = loaded.max_positions - len(self.ids)
        if room < 1:
            raise PromptError(
                f"the prompt must be shorter than the model's {loaded.max_positions} positions, got {len(self.ids)} "
                "tokens: shorten it."
            )
        self.new_tokens = min(options.max_new_tokens, room)
        self.config = config.replace(planned_new_tokens=self.new_tokens)
        self.notices = [] if self.new_tokens == options.max_new_tokens else ["new_tokens_capped"]
        self.tally = RunTally()
        self.records: list[RoutingRecord] = []
        self.reference: Reference | None = None
        self.fed: list[int] = []
        """Tokens that the run has seen and the reference has not."""
        self.generator = torch.Generator(device="cpu").manual_seed(options.seed)
        self.memory: MemoryReading | None = None

    # ---- events -------------------------------------------------------------------------------------

    def events(
        self, watched_row: Callable[[], int] | None, should_stop: Callable[[], bool] | None
    ) -> Iterator[TraceEvent]:
        began = time.perf_counter()
        stopped = should_stop or (lambda: False)
        yield self._meta()
        done = 0
        for begin, end in ((0, self.split), (self.split, len(self.ids))):
            if begin == end:
                continue
            key = PrefixStore.key(self.loaded, self.config, self.ids[:end], self.cache.backend_name)
            if end == self.split and self._restore(key):
                done = end
                yield Progress("prefill", done, len(self.ids))
                yield from self._routed(watched_row)
                continue
            for part in prompt_parts(self.ids[begin:end], self.options.prefill_chunk or PREFILL_CHUNK):
                if stopped():
                    yield self._end("stop")
                    return
                self.tally.prefill_seconds += self._forward(part)
                done += len(part)
                yield Progress("prefill", done, len(self.ids))
            if self.with_reference and self.reference is None:
                room = len(self.ids) - end + self.new_tokens
                self.reference = Reference(self.loaded.model, self.cache, room, self.options.horizon)
            elif self.reference is not None:
                self.fed += self.ids[begin:end]
            with torch.inference_mode():
                self.cache.settle()
                if end == self.split and self.prefixes is not None:
                    self.prefixes.add(key, take(self.cache, self.records, self._logits))
            yield from self._routed(watched_row)
        yield from self._decode(self._logits, began, watched_row, stopped)

    @torch.inference_mode()
    def _restore(self, key: str) -> bool:
        """Starts from a kept document, if there is one and no reference has to see it in full precision."""
        if self.prefixes is None or self.with_reference:
            return False
        snapshot = self.prefixes.get(key)
        if snapshot is None:
            return False
        put(self.cache, snapshot)
        self._logits = snapshot.logits
        self.records += snapshot.events
        self.prefix_used = True
        return True

    def _decode(
        self,
        logits: Tensor,
        began: float,
        watched_row: Callable[[], int] | None,
        stopped: Callable[[], bool],
    ) -> Iterator[TraceEvent]:
        decoder = PieceDecoder(self.loaded.tokenizer)
        ends = eos_ids(self.loaded)
        why = "length"
        for number in range(self.new_tokens):
            if stopped():
                why = "stop"
                break
            token = self._sample(logits)
            if number == 0:
                self.tally.ttft_seconds = time.perf_counter() - began
            ended = token in ends and not self.options.ignore_eos
            piece = "" if ended else decoder.push(token)
            self.tally.text.append(piece)
            self.tally.tokens += 1
            yield StepEvent(len(self.ids) + number + 1, [piece], [token])
            if ended:
                why = "eos"
                break
            if number + 1 == self.new_tokens:
                break
            if self.together:
                self.wanted = token
                yield WAITING
            else:
                self.tally.decode_seconds += self._forward([token])
            logits = self._logits
            if self.reference is not None:
                self.fed.append(token)
            if self.routing_due:
                yield from self._routed(watched_row)
        rest = decoder.flush()
        if rest:
            self.tally.text.append(rest)
        if self.reference is not None:
            yield from self._late(self.reference.observe(self.fed))
            self.fed = []
            yield from self._late(self.reference.finish())
        yield self._end(why)

    def _routed(self, watched_row: Callable[[], int] | None) -> Iterator[TraceEvent]:
        """Events of the routing that has just happened."""
        records, self.records[:] = list(self.records), []
        for record in records:
            if self.reference is not None:
                yield from self._late(self.reference.observe(self.fed))
                self.fed = []
                self.reference.open(record)
            self.memory = memory_reading(self.cache)
            self.tally.peak = max(self.tally.peak, self.memory.persistent)
            self.tally.events += 1
            self.tally.route_seconds += record.seconds
            if record.event_id == 0:
                yield keyframe(self.cache, record, self.memory)
                event = routing_event(self.cache, record, self.memory)
                self.tally.count(event)
            else:
                event = routing_event(self.cache, record, self.memory)
                self.tally.count(event)
                yield event
            rows = self.plan_rows
            row = record.event_id % rows if watched_row is None else watched_row()
            yield score_event(self.cache, record, row)
            if record.event_id and record.event_id % self.options.keyframe_every == 0:
                yield keyframe(self.cache, record, self.memory)

    def _late(self, late: list[LateMetrics]) -> Iterator[LateMetrics]:
        self.tally.late += late
        yield from late

    # ---- work ---------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _forward(self, ids: list[int]) -> float:
        """Feeds tokens, keeps the last logits, returns seconds."""
        began = time.perf_counter()
        model = self.loaded.model
        at = self.cache.get_seq_length(self.cache.managed_layers[0])
        device = self.cache.device
        output = model(
            input_ids=torch.tensor([ids], device=device),
            position_ids=torch.arange(at, at + len(ids), device=device)[None],
            use_cache=True,
            logits_to_keep=1,
            **{cache_keyword(model): self.cache},
        )
        self._logits = output.logits[0, -1].float()
        return time.perf_counter() - began

    def fed_with(self, logits: Tensor, seconds: float, rows: int) -> None:
        """A batch of `rows` has fed the token that was wanted: float32 [vocabulary] after it."""
        self._logits = logits
        self.tally.decode_seconds += seconds
        self.most_rows = max(self.most_rows, rows)

    def needed_bytes(self) -> int:
        """Most bytes that the run takes beside the model, an upper bound."""
        length = len(self.ids) + self.new_tokens
        kept = self.plan.persistent_bytes * self.shape.num_layers
        full = self.shape.full_kv_bytes(length) if self.with_reference else 0
        return int(self.shape.full_kv_bytes(len(self.ids)) * WORKSPACE) + kept + full

    def _sample(self, logits: Tensor) -> int:
        if self.given:
            return self.given[self.tally.tokens]
        options = self.options
        if options.temperature == 0.0:
            return int(logits.argmax())
        probs = (logits.cpu() / options.temperature).softmax(-1)
        if options.top_p < 1.0:
            ordered, index = probs.sort(descending=True)
            beyond = ordered.cumsum(0) - ordered > options.top_p
            probs = probs.scatter(0, index, ordered.masked_fill(beyond, 0.0))
        return int(torch.multinomial(probs, 1, generator=self.generator))

    # ---- facts ---------------------------------------------------------------------------------------

    @property
    def routing_due(self) -> bool:
        """Whether a routing event has happened that was not told yet."""
        return bool(self.records)

    @property
    def plan_rows(self) -> int:
        """Board rows."""
        groups = self.shape.num_kv_heads if self.config.score_scope == "kv_head" else 1
        return self.shape.num_layers * groups

    @property
    def kv_dtype(self) -> str:
        return self.loaded.dtype if self.config.kv_dtype == "model" else self.config.kv_dtype

    def _meta(self) -> RunMeta:
        return run_meta(self)

    def settings(self) -> dict[str, Any]:
        """Everything that the run was asked for, by name."""
        return run_settings(self)

    def _end(self, why: str) -> EndEvent:
        return run_end(self, why)
