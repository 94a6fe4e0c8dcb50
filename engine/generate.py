"""The decode loop: an iterator of trace events.

    for event in generate(load_model(), "Once upon a time", QEvictConfig(), RunOptions()):
        ...

Yields the run as it happens; stop it between tokens with `close()`, or with `should_stop` to get a
summary too. One sequence. Knows the model, the cache and the reference; knows no server and no file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor

from engine.adapter import cache_keyword
from engine.budget import KVShape, Plan, make_plan
from engine.cache import QEvictCache, RoutingRecord
from engine.config import QEvictConfig
from engine.errors import ConfigError, OutOfMemoryError, PromptError
from engine.models import LoadedModel
from engine.pieces import PieceDecoder, pieces_of
from engine.prefix import PrefixStore, put, take
from engine.readings import keyframe, memory_reading, routing_event, score_event
from engine.reference import Reference
from engine.trace import (
    EndEvent,
    LateMetrics,
    MemoryReading,
    Progress,
    RoutingEvent,
    RunMeta,
    StepEvent,
    TraceEvent,
)

PREFILL_CHUNK = 512
"""Prompt tokens per forward: progress, and a stop that is heard, at no measured cost."""
WORKSPACE = 1.25
"""Bytes that reading a prompt takes, over those of its keys and values: scores and one layer's output."""
WAITING = Progress("decode", 0, 0)
"""Said by a run of a batch that waits until its token has been fed; no part of a trace."""
VERSION = "0.1.0"


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What a run does besides the cache's own settings.

    Attributes:
        max_new_tokens: most tokens to generate, 1 or more.
        temperature: 0 takes the likeliest token. top_p: nucleus, (0, 1].
        seed: of the sampling generator.
        reference: run FullKV beside it, for FMM, mass shares and churn.
        horizon: H of future missed mass, tokens.
        keyframe_every: routing events between two keyframes.
        prefill_chunk: prompt tokens per forward; None = 512.
        chat: wrap the prompt in the model's chat template where it has one.
        ignore_eos: go on after an end-of-sequence token.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    reference: bool = True
    horizon: int = 32
    keyframe_every: int = 32
    prefill_chunk: int | None = None
    chat: bool = True
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name, holds, rule in (
            ("max_new_tokens", self.max_new_tokens >= 1, "1 or more"),
            ("temperature", self.temperature >= 0.0, "0 or more"),
            ("top_p", 0.0 < self.top_p <= 1.0, "in (0, 1]"),
            ("horizon", self.horizon >= 1, "1 or more"),
            ("keyframe_every", self.keyframe_every >= 1, "1 or more"),
            ("prefill_chunk", self.prefill_chunk is None or self.prefill_chunk >= 1, "1 or more"),
        ):
            if not holds:
                raise ConfigError(f"{name} must be {rule}, got {getattr(self, name)}.")


@dataclass(slots=True)
class _Tally:
    """What the summary counts."""

    text: list[str] = field(default_factory=list)
    tokens: int = 0
    events: int = 0
    promotions: int = 0
    demotions: int = 0
    evictions: int = 0
    late: list[LateMetrics] = field(default_factory=list)
    peak: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    ttft_seconds: float = 0.0
    route_seconds: float = 0.0


def prompt_ids(loaded: LoadedModel, prompt: str, chat: bool) -> list[int]:
    """Token ids of a prompt, in the chat template if asked for and there.

    Raises:
        PromptError: the prompt is empty.
    """
    if not prompt.strip():
        raise PromptError("the prompt must not be empty: paste a text, choose a sample document, or give a file.")
    tokenizer = loaded.tokenizer
    if chat and tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        encoded = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        encoded = tokenizer(prompt)["input_ids"]
    ids = [int(token) for token in encoded]
    if not ids:
        raise PromptError("the prompt has no token for this model's tokenizer: write some text.")
    return ids


def model_shape(loaded: LoadedModel, config: QEvictConfig) -> KVShape:
    """Shape of all layers of a model as byte figures need it, in the dtype that `config` stores."""
    text = loaded.model.config.get_text_config(decoder=True)
    stored = loaded.dtype if config.kv_dtype == "model" else config.kv_dtype
    heads = int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
    dim = int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    return KVShape(int(text.num_hidden_layers), heads, dim, getattr(torch, stored).itemsize)


def generate(
    loaded: LoadedModel,
    prompt: str,
    config: QEvictConfig | None = None,
    options: RunOptions | None = None,
    *,
    session: str = "",
    watched_row: Callable[[], int] | None = None,
    should_stop: Callable[[], bool] | None = None,
    policy: str = "qevict",
    document: str = "",
    prefixes: PrefixStore | None = None,
) -> Iterator[TraceEvent]:
    """Runs one prompt and yields its trace; events carry seq 0, 1, 2, ….

    Args:
        loaded: the model. prompt: text.
        config: cache settings; `planned_new_tokens` is set to the run's own number of new tokens.
        options: everything else.
        session: id that the trace carries.
        watched_row: board row whose scores are recorded at each event; None = one after the other.
        should_stop: asked between tokens and prompt chunks; True ends the run with a summary.
        policy: name that the trace carries.
        document: text in front of the prompt that is compressed on its own, before the prompt is read. The same
            document asked again then starts from `prefixes`, unless a reference must see it in full precision.
        prefixes: where such documents are kept; None keeps none.

    Raises:
        PromptError, BudgetError, BackendError, UnsupportedModelError, OutOfMemoryError: before or during the run.
    """
    run = _Run(loaded, prompt, config or QEvictConfig(), options or RunOptions(), session, policy, document, prefixes)
    yield from alone(run, watched_row, should_stop)


def alone(
    run: _Run, watched_row: Callable[[], int] | None, should_stop: Callable[[], bool] | None
) -> Iterator[TraceEvent]:
    """The numbered events of a run that shares its forwards with no other.

    Raises:
        OutOfMemoryError: during the run.
    """
    seq = 0
    try:
        for event in run.events(watched_row, should_stop):
            yield _numbered(event, seq)
            seq += 1
    except (torch.OutOfMemoryError, MemoryError) as error:
        loaded = run.loaded
        raise OutOfMemoryError(
            f"{loaded.label} ran out of memory on {loaded.device} with a prompt of {len(run.ids)} tokens: "
            "take a shorter prompt or a smaller model."
        ) from error


def prompt_parts(ids: list[int], chunk: int) -> list[list[int]]:
    """The prompt in forwards of `chunk` tokens; none has one token, which the cache would take for decoding."""
    chunk = max(2, chunk)
    starts = list(range(0, len(ids), chunk))
    if len(ids) > 1 and len(ids) - starts[-1] == 1:
        # chunk - 1 and 2 tokens where there is room for that, else one forward of 3.
        starts[-1:] = [starts[-1] - 1] if chunk > 2 else []
    return [ids[begin:end] for begin, end in zip(starts, [*starts[1:], len(ids)], strict=True)]


def _split_ids(loaded: LoadedModel, document: str, prompt: str, chat: bool) -> tuple[list[int], int]:
    """All token ids, and how many of them are the document; 0 where there is none."""
    if not document.strip():
        return prompt_ids(loaded, prompt, chat), 0
    if not prompt.strip():
        raise PromptError("a document must come with a question: the prompt is empty.")
    whole = prompt_ids(loaded, f"{document}\n\n{prompt}", chat)
    alone = prompt_ids(loaded, document, chat)
    pairs = enumerate(zip(whole, alone, strict=False))
    shared = next((place for place, (a, b) in pairs if a != b), min(len(whole), len(alone)))
    # A forward of one token would count as decoding: both parts need two.
    return whole, shared if 2 <= shared <= len(whole) - 2 else 0


def _numbered(event: TraceEvent, seq: int) -> TraceEvent:
    object.__setattr__(event, "seq", seq)
    return event


class _Run:
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
        ids, self.split = _split_ids(loaded, document, prompt, options.chat)
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
        self.tally = _Tally()
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
                self._count(event)
            else:
                event = routing_event(self.cache, record, self.memory)
                self._count(event)
                yield event
            rows = self.plan_rows
            row = record.event_id % rows if watched_row is None else watched_row()
            yield score_event(self.cache, record, row)
            if record.event_id and record.event_id % self.options.keyframe_every == 0:
                yield keyframe(self.cache, record, self.memory)

    def _count(self, event: RoutingEvent) -> None:
        self.tally.promotions += event.promotions
        self.tally.demotions += event.demotions
        self.tally.evictions += event.evictions

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
        plan, config = self.plan, self.config
        planned = plan.planned_tokens
        return RunMeta(
            session=self.session,
            model=self.loaded.label,
            policy=self.policy,
            num_layers=self.shape.num_layers,
            rows=self.plan_rows,
            window_size=config.window_size,
            sink_tokens=config.sink_tokens,
            local_tokens=plan.local_tokens,
            max_windows=max(1, -(-(planned - config.sink_tokens) // config.window_size)),
            kv_budget=config.kv_budget,
            quant_share=config.quant_share,
            bits=config.bits,
            kv_dtype=self.kv_dtype,
            backend=self.cache.backend_name,
            reference="fullkv-teacher" if self.with_reference else "none",
            prompt_tokens=len(self.ids),
            planned_tokens=planned,
            full_window_bytes=plan.costs.full,
            quant_window_bytes=plan.costs.quant,
            quant_code_bytes=plan.costs.quant_codes,
            full_capacity=plan.full_capacity,
            quant_capacity=plan.quant_capacity,
            total_bytes=plan.total_bytes * self.shape.num_layers,
            full_kv_bytes=self.shape.full_kv_bytes(planned),
            pieces=pieces_of(self.loaded.tokenizer, self.ids),
            notices=self.notices,
            settings=self._settings(),
            versions={
                "qevict": VERSION,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "model": self.loaded.fingerprint,
            },
        )

    def _settings(self) -> dict[str, Any]:
        return {
            "model": self.loaded.name,
            "device": self.loaded.device,
            "dtype": self.loaded.dtype,
            "weights": self.loaded.weights,
            "threads": torch.get_num_threads(),
            **self.config.to_dict(),
            **{f"run_{name}": value for name, value in asdict(self.options).items()},
        }

    def _end(self, why: str) -> EndEvent:
        tally, cache = self.tally, self.cache
        padding = cache.lane_padding_bytes if tally.events else 0
        pools = cache.pool_bytes - padding if tally.events else 0
        length = len(self.ids) + tally.tokens
        full = self.shape.full_kv_bytes(max(1, length))
        steps = max(1, tally.tokens - 1)
        engine_seconds = tally.prefill_seconds + tally.decode_seconds
        reference_seconds = 0.0 if self.reference is None else self.reference.seconds
        summary = {
            "text": "".join(tally.text),
            "num_tokens": tally.tokens,
            "settings": self._settings(),
            "backend": cache.backend_name,
            "kv": {
                "total_bytes": self.plan.total_bytes * self.shape.num_layers,
                "peak_persistent_bytes": pools,
                "peak_occupied_bytes": tally.peak,
                "full_kv_bytes": full,
                "planned_full_kv_bytes": self.shape.full_kv_bytes(self.plan.planned_tokens),
                "share": pools / full,
                "kv_dtype": self.kv_dtype,
                "prefill_peak_bytes": cache.prefill_peak_bytes,
                "scoring_bytes": cache.scoring_bytes,
                "kernel_bytes": cache.workspace_bytes,
                "prefix_bytes": 0 if self.prefixes is None else self.prefixes.nbytes,
                "lane_padding_bytes": padding,
            },
            "metrics": _mean_metrics(tally.late),
            "routing": {
                "events": tally.events,
                "promotions": tally.promotions,
                "demotions": tally.demotions,
                "evictions": tally.evictions,
            },
            "timing": {
                "prompt_tokens": len(self.ids),
                "document_tokens": self.split,
                "prefix_used": self.prefix_used,
                "ttft_ms": tally.ttft_seconds * 1e3,
                "tpot_ms": tally.decode_seconds / steps * 1e3,
                "tokens_per_s": steps / tally.decode_seconds if tally.decode_seconds else 0.0,
                "batch_rows": self.most_rows,
                "reference_share": reference_seconds / max(1e-9, engine_seconds + reference_seconds),
                "route_ms": tally.route_seconds / max(1, tally.events) * 1e3,
            },
        }
        return EndEvent(why, summary)


def _mean_metrics(late: list[LateMetrics]) -> dict[str, Any] | None:
    """Means over routing events; None where no reference ran or no future was seen."""
    if not late:
        return None
    churn = [event.churn for event in late if event.churn is not None]
    count = len(late)
    return {
        "fmm": sum(event.fmm for event in late) / count,
        "fmm_history": sum(event.fmm_history for event in late) / count,
        "fmm_fp_only": sum(event.fmm_fp_only for event in late) / count,
        "churn": sum(churn) / len(churn) if churn else None,
        "mass_share": {
            name: sum(event.mass_share[i] for event in late) / count
            for i, name in enumerate(("full", "quant", "evicted"))
        },
    }


def eos_ids(loaded: LoadedModel) -> set[int]:
    """All ids that end a sequence for this model."""
    found: set[int] = set()
    for source in (loaded.model.generation_config, loaded.model.config, loaded.tokenizer):
        value = getattr(source, "eos_token_id", None)
        found.update(value if isinstance(value, list) else [] if value is None else [int(value)])
    return found
