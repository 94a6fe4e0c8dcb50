"""Tables 14, 15, 16 and 18 and Figure 1 of the article on one text: measured, printed, and what differs.

One FullKV trace answers all but the agreement of scores, which needs the real cache (`live=True`). One text gives
no interval: `engine.evaluation.directions` repeats this over many. Knows models and traces; prints nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from engine.config import QEvictConfig
from engine.errors import ConfigError
from engine.evaluation import paper
from engine.evaluation.live import LiveRun, run_live
from engine.evaluation.promotion import listed, promotion_experiment, summarise
from engine.evaluation.recording import record
from engine.evaluation.series import series
from engine.models import LoadedModel
from engine.policies import HORIZON, Policy, PolicyRun, simulate, standard_policies

BOTH_DIFFER = 0.5
"""Budgets count as the article's where they agree to half a percentage point."""
LIVE = ("R2", "R3", "R4", "promotion off", "INT4", "R1")


@dataclass(frozen=True, slots=True)
class DiagnoseOptions:
    """What to diagnose.

    Attributes:
        steps: tokens of the text that are fed one by one after the prompt part. horizon: H of FMM.
        live: run the real cache too, for the scores under quantized execution. kv_dtype: of byte costs and tiers.
        seed: of the random policy. live_policies: which of them are run with `live`.
    """

    steps: int = 128
    horizon: int = HORIZON
    live: bool = False
    kv_dtype: str = "float16"
    seed: int = 0
    live_policies: tuple[str, ...] = LIVE

    def __post_init__(self) -> None:
        for name in ("steps", "horizon"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be 1 or more, got {getattr(self, name)}.")


def diagnose(
    loaded: LoadedModel,
    ids: Sequence[int],
    config: QEvictConfig,
    options: DiagnoseOptions | None = None,
    *,
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Any]:
    """All diagnostics of one text at one budget, as plain values.

    Args:
        ids: the text; its last `options.steps` tokens are fed one by one, teacher-forced, the rest is the prompt.
        progress: told (stage, done, total).

    Raises:
        PromptError: the text is too short or too long. BudgetError: the default policy is infeasible.
    """
    options = options or DiagnoseOptions()
    tell = progress or (lambda *_: None)
    trace = record(
        loaded,
        ids,
        len(ids) - options.steps,
        kv_dtype=options.kv_dtype,
        progress=lambda done, total: tell("reference", done, total),
    )
    config = config.replace(kv_dtype=options.kv_dtype)
    promoted = promotion_experiment(trace, config, horizon=options.horizon)
    policies = standard_policies(config)
    runs, refused = simulate(trace, policies, horizon=options.horizon, seed=options.seed)
    by_name = {run.policy.name: run for run in runs}
    live: dict[str, LiveRun] = {}
    if options.live:
        wanted = [policy for policy in policies if policy.name in options.live_policies and policy.name in by_name]
        for place, policy in enumerate(wanted):
            tell("live", place, len(wanted))
            live[policy.name] = run_live(loaded, ids, trace, policy, kv_dtype=options.kv_dtype, horizon=options.horizon)
        tell("live", len(wanted), len(wanted))
    return {
        "article": paper.ARTICLE,
        "setup": _setup(loaded, trace.prompt_tokens, config, options),
        "differs": _differences(loaded, trace.prompt_tokens, config, options),
        "table14": _table14(by_name, live),
        "table15": _table15(live),
        "table16": _table16(by_name, live),
        "table18": _table18(by_name, live),
        "figure1": _figure1(by_name, live),
        "promotion": summarise([promoted]) | {"each": listed(promoted, 50)},
        "policies": [run.summary(options.horizon) for run in runs],
        "live_policies": [run.run.summary(options.horizon) for run in live.values()],
        "infeasible": refused,
        "directions": directions(by_name),
        "oracle_checks": _oracle_checks(by_name),
        "series": series(by_name, live),
    }


def _setup(loaded: LoadedModel, prompt_tokens: int, config: QEvictConfig, options: DiagnoseOptions) -> dict[str, Any]:
    return {
        "model": loaded.label,
        "fingerprint": loaded.fingerprint,
        "weights": loaded.weights,
        "dtype": loaded.dtype,
        "prompt_tokens": prompt_tokens,
        "steps": options.steps,
        **asdict(options),
        "config": config.to_dict(),
    }


def _differences(loaded: LoadedModel, prompt_tokens: int, config: QEvictConfig, options: DiagnoseOptions) -> list[str]:
    """What the reader must keep in mind before comparing the two columns."""
    said = [
        f"model: {loaded.label}, the article used {', '.join(paper.MODELS)}",
        f"context: one text of {prompt_tokens} + {options.steps} tokens; the article used long contexts and does not "
        "print their number for these tables",
        "FMM: over all positions, as the formula says, and over history alone (fmm_history): the article does not say "
        "whether its denominator holds sink and local region",
        "text: teacher-forced on the text itself, one text, so no interval",
        "simulation: policies rank windows by FullKV's attention; the feedback of quantization and eviction on scores "
        "is missing, except where a row says live",
    ]
    if abs(config.kv_budget * 100 - 20) > BOTH_DIFFER or config.kv_budget_bytes is not None:
        budget = (
            f"{config.kv_budget:.0%}" if config.kv_budget_bytes is None else f"{config.kv_budget_bytes:,} bytes in all"
        )
        said.append(f"budget: {budget}; the article's default for diagnostics is 20 %")
    for name, theirs in (("window_size", 8), ("quant_share", 0.7), ("bits", 2), ("sink_tokens", 5)):
        own = getattr(config, name)
        if own != theirs:
            said.append(f"{name}: {own}, the article {theirs}")
    said.append(f"stored dtype: {options.kv_dtype}; scores and FullKV: {loaded.dtype}, weights {loaded.weights}")
    said.append("local region: from local_share here; the article's size for these tables is not printed")
    return said


def _percent(value: float | None) -> float | None:
    return None if value is None else 100.0 * value


def _pair(system: str, quantity: str, table: str, measured: float | None, unit: str, source: str) -> dict[str, Any]:
    """One row of a table: ours, theirs, and whether it was simulated or run."""
    return {
        "system": system,
        "quantity": quantity,
        "measured": measured,
        "paper": paper.published(table, system, quantity),
        "unit": unit,
        "source": source,
    }


def _both(
    runs: dict[str, PolicyRun], live: dict[str, LiveRun], names: Sequence[str]
) -> list[tuple[str, PolicyRun, str]]:
    out = [(name, runs[name], "trace") for name in names if name in runs]
    out += [(name, live[name].run, "live") for name in names if name in live]
    if "R3 FP-tier-only" in names and "R3" in live:
        base = live["R3"].run
        policy = Policy("R3 FP-tier-only", base.policy.config, fp_only=True)
        out.append(("R3 FP-tier-only", PolicyRun(policy, base.plan, base.history, base.masses), "live"))
    return out


def _table14(runs: dict[str, PolicyRun], live: dict[str, LiveRun]) -> list[dict[str, Any]]:
    """Future missed mass (per cent) and churn."""
    rows = []
    for name, run, source in _both(runs, live, ("R1", "R2", "R3", "R4", "R3 FP-tier-only")):
        rows.append(_pair(name, "fmm", "Table 14", _percent(run.fmm()), "%", source))
        rows.append(_pair(name, "fmm_history", "Table 14", _percent(run.fmm("history")), "%", source))
        if not run.policy.fp_only:
            churn = run.churn
            rows.append(_pair(name, "churn", "Table 14", churn.mean, "per event", source))
            rows.append(_pair(name, "churn_per_step", "Table 14", churn.per_step, "per step", source))
    return rows


def _table15(live: dict[str, LiveRun]) -> list[dict[str, Any]] | None:
    """Agreement of scores under quantized execution; None without live runs."""
    found = live["R3"].agreement if "R3" in live else None
    summary = None if found is None else found.summary()
    if summary is None:
        return None
    values = {
        "qsa_mean": summary.mean,
        "qsa_first_event": summary.first_event,
        "qsa_last_event": summary.last_event,
        "qsa_layer_min": summary.layer_min,
        "qsa_layer_max": summary.layer_max,
        "qsa_head_min": summary.head_min,
        "mass_ratio": summary.mass_ratio,
        "qsa_interval_mean": summary.interval_mean,
        "mass_ratio_interval": summary.interval_mass_ratio,
    }
    return [_pair("R3", name, "Table 15", value, "", "live") for name, value in values.items()]


def _table16(runs: dict[str, PolicyRun], live: dict[str, LiveRun]) -> list[dict[str, Any]]:
    """Late important returns, m = 3."""
    rows = []
    for name, run, source in _both(runs, live, ("R3", "R4", "oracle past-mass", "oracle future-H")):
        found = run.returns()
        rows.append(_pair(name, "lir", "Table 16", _percent(found.lir), "%", source))
        rows.append(_pair(name, "lir_rescued", "Table 16", found.rescued, "episodes", source))
        rows.append(_pair(name, "lir_episodes", "Table 16", found.eligible, "episodes", source))
        rows.append(_pair(name, "ttr_median_events", "Table 16", found.median_events, "events", source))
        rows.append(_pair(name, "ttr_median_tokens", "Table 16", found.median_tokens, "tokens", source))
    return rows


def _table18(runs: dict[str, PolicyRun], live: dict[str, LiveRun]) -> list[dict[str, Any]]:
    """Promotion off and on, on the same text."""
    rows = []
    for name, run, source in _both(runs, live, ("promotion off", "R3")):
        rows.append(_pair(name, "fmm", "Table 18", _percent(run.fmm()), "%", source))
        rows.append(_pair(name, "lir", "Table 18", _percent(run.returns().lir), "%", source))
        rows.append(_pair(name, "promotions", "Table 18", run.transitions.promotions, "Q to F", source))
        found = live[name].agreement if source == "live" else None
        summary = None if found is None else found.summary()
        if summary is not None:
            rows.append(_pair(name, "qsa_mean", "Table 18", summary.mean, "", source))
            rows.append(_pair(name, "mass_ratio", "Table 18", summary.mass_ratio, "", source))
    return rows


def _figure1(runs: dict[str, PolicyRun], live: dict[str, LiveRun]) -> list[dict[str, Any]]:
    """Attention mass by tier, of history alone (the article's shares sum to 98 %), and of everything."""
    rows = []
    for name, run, source in _both(runs, live, ("R2", "R3")):
        shares, all_ = run.mass_shares("history"), run.mass_shares("all")
        for tier in ("full", "quant", "evicted"):
            row = _pair(name, tier, "Figure 1", None if shares is None else 100 * shares[tier], "% of history", source)
            rows.append(row | {"measured_of_all": None if all_ is None else 100 * all_[tier]})
    return rows


def directions(runs: dict[str, PolicyRun]) -> list[dict[str, Any]]:
    """Whether each direction of the article holds on this one text; a claim that fails is a finding."""
    out = []
    for sentence, low, high, quantity in paper.CLAIMS:
        if low not in runs or high not in runs:
            continue
        a, b = (runs[name].summary()[quantity] for name in (low, high))
        holds = None if a is None or b is None else bool(a < b)
        out.append({"claim": sentence, "quantity": quantity, low: a, high: b, "holds": holds})
    return out


def _oracle_checks(runs: dict[str, PolicyRun]) -> dict[str, bool]:
    """What must hold by definition, whatever the model: a failure here is a mistake of the program."""
    checks = {}
    if "R3" in runs and "oracle future-H" in runs:
        ours, best = runs["R3"].fmm(), runs["oracle future-H"].fmm()
        checks["future oracle misses no more than R3"] = ours is not None and best is not None and best <= ours + 1e-9
    if "R3" in runs and "R3 FP-tier-only" in runs:
        ours, alone = runs["R3"].fmm(), runs["R3 FP-tier-only"].fmm()
        checks["full-precision tier alone misses no less than R3"] = (
            ours is not None and alone is not None and alone >= ours - 1e-9
        )
    return checks
