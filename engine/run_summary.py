"""What a run says of itself: its first event, its settings, and the summary at its end.

Knows what a run has counted; runs nothing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import transformers

from engine.pieces import pieces_of
from engine.trace import EndEvent, LateMetrics, RoutingEvent, RunMeta
from engine.version import VERSION

if TYPE_CHECKING:
    from engine.run import Run


@dataclass(slots=True)
class RunTally:
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

    def count(self, event: RoutingEvent) -> None:
        """Adds the moves of one routing event."""
        self.promotions += event.promotions
        self.demotions += event.demotions
        self.evictions += event.evictions


def run_meta(run: Run) -> RunMeta:
    """The first event of a run."""
    plan, config = run.plan, run.config
    planned = plan.planned_tokens
    return RunMeta(
        session=run.session,
        model=run.loaded.label,
        policy=run.policy,
        num_layers=run.shape.num_layers,
        rows=run.plan_rows,
        window_size=config.window_size,
        sink_tokens=config.sink_tokens,
        local_tokens=plan.local_tokens,
        max_windows=max(1, -(-(planned - config.sink_tokens) // config.window_size)),
        kv_budget=config.kv_budget,
        quant_share=config.quant_share,
        bits=config.bits,
        kv_dtype=run.kv_dtype,
        backend=run.cache.backend_name,
        reference="fullkv-teacher" if run.with_reference else "none",
        prompt_tokens=len(run.ids),
        planned_tokens=planned,
        full_window_bytes=plan.costs.full,
        quant_window_bytes=plan.costs.quant,
        quant_code_bytes=plan.costs.quant_codes,
        full_capacity=plan.full_capacity,
        quant_capacity=plan.quant_capacity,
        total_bytes=plan.total_bytes * run.shape.num_layers,
        full_kv_bytes=run.shape.full_kv_bytes(planned),
        pieces=pieces_of(run.loaded.tokenizer, run.ids),
        notices=run.notices,
        settings=run.settings(),
        versions={
            "qevict": VERSION,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "model": run.loaded.fingerprint,
        },
    )


def run_settings(run: Run) -> dict[str, Any]:
    """Everything that a run was asked for, by name."""
    return {
        "model": run.loaded.name,
        "device": run.loaded.device,
        "dtype": run.loaded.dtype,
        "weights": run.loaded.weights,
        "threads": torch.get_num_threads(),
        **run.config.to_dict(),
        **{f"run_{name}": value for name, value in asdict(run.options).items()},
    }


def run_end(run: Run, why: str) -> EndEvent:
    """The last event of a run, with its summary: bytes, metrics, routing, timing."""
    tally, cache = run.tally, run.cache
    padding = cache.lane_padding_bytes if tally.events else 0
    pools = cache.pool_bytes - padding if tally.events else 0
    length = len(run.ids) + tally.tokens
    full = run.shape.full_kv_bytes(max(1, length))
    steps = max(1, tally.tokens - 1)
    engine_seconds = tally.prefill_seconds + tally.decode_seconds
    reference_seconds = 0.0 if run.reference is None else run.reference.seconds
    summary = {
        "text": "".join(tally.text),
        "num_tokens": tally.tokens,
        "settings": run.settings(),
        "backend": cache.backend_name,
        "kv": {
            "total_bytes": run.plan.total_bytes * run.shape.num_layers,
            "peak_persistent_bytes": pools,
            "peak_occupied_bytes": tally.peak,
            "full_kv_bytes": full,
            "planned_full_kv_bytes": run.shape.full_kv_bytes(run.plan.planned_tokens),
            "share": pools / full,
            "kv_dtype": run.kv_dtype,
            "prefill_peak_bytes": cache.prefill_peak_bytes,
            "scoring_bytes": cache.scoring_bytes,
            "kernel_bytes": cache.workspace_bytes,
            "prefix_bytes": 0 if run.prefixes is None else run.prefixes.nbytes,
            "lane_padding_bytes": padding,
        },
        "metrics": mean_metrics(tally.late),
        "routing": {
            "events": tally.events,
            "promotions": tally.promotions,
            "demotions": tally.demotions,
            "evictions": tally.evictions,
        },
        "timing": {
            "prompt_tokens": len(run.ids),
            "document_tokens": run.split,
            "prefix_used": run.prefix_used,
            "ttft_ms": tally.ttft_seconds * 1e3,
            "tpot_ms": tally.decode_seconds / steps * 1e3,
            "tokens_per_s": steps / tally.decode_seconds if tally.decode_seconds else 0.0,
            "batch_rows": run.most_rows,
            "reference_share": reference_seconds / max(1e-9, engine_seconds + reference_seconds),
            "route_ms": tally.route_seconds / max(1, tally.events) * 1e3,
        },
    }
    return EndEvent(why, summary)


def mean_metrics(late: list[LateMetrics]) -> dict[str, Any] | None:
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
