"""The figures of one run, all from its stored trace: nothing is measured again.

What a trace can't hold stands in the card's texts: scores of FullKV head by head, so no QSA. Knows traces and
metrics; knows no session store.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from app.analysis_card import Card, Say
from engine.metrics.churn import churn_series
from engine.metrics.history import TierHistory, count_transitions, read_history
from engine.metrics.lir import policy_lir
from engine.metrics.memory import memory_series
from engine.trace import LateMetrics, RoutingEvent, RunMeta, StepEvent, Tier, TraceEvent
from visuals.figures.churn import churn_figure, transition_figure
from visuals.figures.fmm import fmm_figure, mass_share_figure
from visuals.figures.lir import lir_figure, time_to_return_figure
from visuals.figures.memory import memory_figure
from visuals.figures.regret import Regretted, most_regretted, regret_figure

MOST_CELLS = 60_000_000
"""Events x rows x windows whose history is played: a longer run has no figures of returns and moves."""

BYTES = {
    "sink": "bytes_sink",
    "local": "bytes_local",
    "full": "bytes_full",
    "codes": "bytes_codes",
    "metadata": "bytes_metadata",
    "shadow": "bytes_shadow",
}
"""Parts of the memory, and the columns that hold them."""


class RunTrace:
    """A run's events, in order.

    Args:
        events: a trace that begins with its meta event.
    """

    def __init__(self, events: Sequence[TraceEvent]) -> None:
        self._events = list(events)
        self.meta = next((event for event in self._events if isinstance(event, RunMeta)), None)
        late = {event.event_id: event for event in self._events if isinstance(event, LateMetrics)}
        self._late = [late[event_id] for event_id in sorted(late)]
        self._tokens = {event.event_id: event.seq_len for event in self._events if isinstance(event, RoutingEvent)}

    def facts(self) -> list[tuple[str, str]]:
        """(key of a label, value) of the set-up."""
        meta = self.meta
        if meta is None:
            return []
        versions = ", ".join(f"{name} {value}" for name, value in meta.versions.items())
        setup = f"Ω {meta.window_size}, q {meta.quant_share:g}, INT{meta.bits}, {meta.kv_budget:.1%}"
        return [
            ("model", meta.model),
            ("policy", f"{meta.policy}: {setup}"),
            ("kv_dtype", meta.kv_dtype),
            ("prompts", str(meta.prompt_tokens)),
            ("reference", meta.reference),
            ("versions", versions),
        ]

    def notes(self, say: Say) -> list[str]:
        """What can't be drawn, and why."""
        notes = [say("no_qsa_in_trace")]
        if self.meta is None:
            return [say("no_trace")]
        if not self._late:
            notes.insert(0, say("no_reference"))
        if not self._playable:
            notes.append(say("too_long_to_play"))
        return notes

    def cards(self, say: Say) -> list[Card]:
        """All figures that the trace allows."""
        if self.meta is None:
            return []
        cards = self._missed(say) if self._late else []
        history = read_history(self._events) if self._playable else None
        if history is not None and len(history.event_ids) > 1:
            cards += self._moved(history, say)
        return [*cards, *self._memory(say)]

    @property
    def _playable(self) -> bool:
        meta = self.meta
        return meta is not None and len(self._tokens) * meta.rows * meta.max_windows <= MOST_CELLS

    def _missed(self, say: Say) -> list[Card]:
        late = self._late
        horizon = max(event.steps for event in late)
        values = {"horizon": horizon}
        lines: list[dict[str, Any]] = [
            {
                "event": event.event_id,
                "tokens": self._tokens.get(event.event_id),
                "fmm": event.fmm,
                "fmm_fp_only": event.fmm_fp_only,
                "fmm_history": event.fmm_history,
                "churn": event.churn,
                "steps": event.steps,
                **dict(zip(("full", "quant", "evicted"), event.mass_share, strict=True)),
            }
            for event in late
        ]
        cards = [
            Card(
                "fmm",
                "run",
                partial(fmm_figure, late, scope="both", words=say.figure("fmm")),
                ("event", "tokens", "fmm", "fmm_fp_only", "fmm_history", "steps"),
                lines,
                "engine/metrics/fmm.py",
                values,
            ),
            Card(
                "mass",
                "run",
                partial(mass_share_figure, late, words=say.figure("fmm")),
                ("event", "tokens", "full", "quant", "evicted"),
                lines,
                "engine/metrics/mass.py",
                values,
            ),
            Card(
                "churn",
                "run",
                partial(churn_figure, late, words=say.figure("churn")),
                ("event", "tokens", "churn"),
                lines,
                "engine/metrics/churn.py",
                values,
            ),
        ]
        return [*cards, *self._regret(say, values)]

    def _regret(self, say: Say, values: dict[str, Any]) -> list[Card]:
        meta = self.meta
        if meta is None or not any(event.regret for event in self._late):
            return []
        worst = most_regretted(self._late, meta.rows)
        pieces = list(meta.pieces)
        for event in self._events:
            if isinstance(event, StepEvent):
                del pieces[event.seq_len - len(event.pieces) :]
                pieces += event.pieces
        return [
            Card(
                "regret",
                "run",
                partial(regret_figure, worst, meta.rows, words=say.figure("regret")),
                ("window", "mass", "rows", "events", "words"),
                [
                    {
                        "window": one.window,
                        "mass": one.mass,
                        "rows": one.rows,
                        "events": one.events,
                        "words": _words(meta, pieces, one),
                    }
                    for one in worst
                ],
                "engine/metrics/mass.py",
                values,
            )
        ]

    def _moved(self, history: TierHistory, say: Say) -> list[Card]:
        moves = count_transitions(history)
        ids, tokens = history.event_ids.tolist(), history.seq_lens.tolist()
        kinds = (
            ("promotions", Tier.QUANT, Tier.FULL),
            ("demotions", Tier.FULL, Tier.QUANT),
            ("aged_full", Tier.LOCAL, Tier.FULL),
            ("aged_quant", Tier.LOCAL, Tier.QUANT),
        )
        lines = [
            {
                "event": ids[place],
                "tokens": tokens[place],
                **{name: int(moves.counts[place, source, target]) for name, source, target in kinds},
                "evictions": int(moves.counts[place, :, Tier.EVICTED].sum()),
            }
            for place in range(1, len(ids))
        ]
        later = type(moves)(moves.counts[1:])
        stats = {self.meta.policy if self.meta else "": policy_lir(history)}
        one = next(iter(stats.values()))
        values = {"rescued": one.rescued, "eligible": one.eligible, "events": one.min_events}
        churn = churn_series(history)
        cards = [
            Card(
                "moves",
                "run",
                partial(transition_figure, later, ids[1:], words=say.figure("churn")),
                ("event", "tokens", "promotions", "demotions", "aged_full", "aged_quant", "evictions"),
                lines,
                "engine/metrics/history.py",
            ),
            Card(
                "returns",
                "run",
                partial(lir_figure, stats, words=say.figure("lir")),
                ("policy", "eligible", "rescued", "lir", "median_events", "median_tokens"),
                [
                    {
                        "policy": next(iter(stats)),
                        "eligible": one.eligible,
                        "rescued": one.rescued,
                        "lir": one.lir,
                        "median_events": one.median_events,
                        "median_tokens": one.median_tokens,
                    }
                ],
                "engine/metrics/lir.py",
                values,
            ),
            Card(
                "absence",
                "run",
                partial(time_to_return_figure, stats, words=say.figure("lir")),
                ("events", "tokens"),
                [
                    {"events": int(events), "tokens": int(length)}
                    for events, length in zip(one.return_events, one.return_tokens, strict=True)
                ],
                "engine/metrics/lir.py",
                values,
            ),
        ]
        if not self._late:  # churn needs no reference: the trace's own boards tell it
            lines_of_churn = [
                {"event": int(event), "churn": float(value)}
                for event, value in zip(churn.event_ids, churn.per_event, strict=True)
            ]
            cards.append(
                Card(
                    "churn",
                    "run",
                    partial(churn_figure, churn, words=say.figure("churn")),
                    ("event", "churn"),
                    lines_of_churn,
                    "engine/metrics/churn.py",
                )
            )
        return cards

    def _memory(self, say: Say) -> list[Card]:
        series = memory_series(self._events)
        if not len(series.event_ids) or self.meta is None:
            return []
        persistent = series.persistent
        lines = [
            {
                "event": int(series.event_ids[place]),
                "tokens": int(series.seq_lens[place]),
                **{column: int(series.parts[name][place]) for name, column in BYTES.items()},
                "bytes": int(persistent[place]),
                "bytes_budget": int(series.budget[place]),
                "bytes_full_kv": int(series.full_kv[place]),
            }
            for place in range(len(series.event_ids))
        ]
        columns = ("event", "tokens", *BYTES.values(), "bytes", "bytes_budget", "bytes_full_kv")
        return [
            Card(
                "memory",
                "run",
                partial(memory_figure, series, kv_dtype=self.meta.kv_dtype, words=say.figure("memory")),
                columns,
                lines,
                "engine/metrics/memory.py",
                {"kv_dtype": self.meta.kv_dtype},
            )
        ]


def _words(meta: RunMeta, pieces: Sequence[str], one: Regretted) -> str:
    """A window's text; untrusted."""
    first = meta.sink_tokens + one.window * meta.window_size
    return "".join(pieces[first : first + meta.window_size])
