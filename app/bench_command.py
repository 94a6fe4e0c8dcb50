"""`qevict bench`: speed as ratios, from the command line.

Parses, runs `engine.benchmarks`, prints a table or one JSON line per row, and draws a picture on
request. Measures nothing itself.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.errors import ConfigError

KINDS = ("attention", "decode", "prefill", "routing", "table4")
CELLS = ((4096, 256), (2048, 512), (1024, 1024))
"""Prompt and new tokens of the six cells on a GPU, each at batch 1 and 32."""


def add(commands: Any) -> None:
    """Adds the subcommand to the parser's commands."""
    bench = commands.add_parser(
        "bench",
        help="measure speed against stock transformers",
        description="Measure speed as ratios; everything compared takes turns in one process.",
    )
    bench.add_argument("kind", choices=KINDS, metavar="|".join(KINDS))
    bench.add_argument("--shape", default=None, help="attention: smollm2, llama8b, qwen0.5b; table4: small, llama8b")
    bench.add_argument("--context", default=None, metavar="N[,N…]", help="tokens in the cache")
    bench.add_argument("--batch", default="1", metavar="N[,N…]")
    bench.add_argument("--budget", default="0.2", metavar="SHARE[,…]", help="share of FullKV bytes kept")
    bench.add_argument("--kv-dtype", default="float16", metavar="NAME[,…]", help="what the tiers store")
    bench.add_argument("--full-dtype", default="float32", metavar="NAME[,…]", help="attention: what FullKV stores")
    bench.add_argument("--backend", default="fused,sdpa", metavar="NAME[,…]")
    bench.add_argument("--model", default="embedded")
    bench.add_argument("--weights", default="auto", help="auto, float32, int4 (embedded model) or bfloat16")
    bench.add_argument("--new-tokens", type=int, default=None, help="table4")
    bench.add_argument("--prompt-tokens", type=int, default=None, help="table4")
    bench.add_argument("--rounds", type=int, default=None)
    bench.add_argument("--threads", type=int, default=None, help="torch threads; default: torch's own choice")
    bench.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: processor time")
    bench.add_argument("--json", action="store_true", help="one JSON object with all rows")
    bench.add_argument("--figure", metavar="FILE.html", help="also draw the ratios")
    bench.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs one benchmark and prints its rows."""
    import torch

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    rows = []
    for row in _rows(arguments):
        rows.append(row)
        if not arguments.json:
            print(_line(arguments.kind, row), flush=True)
    if arguments.json:
        print(json.dumps({"kind": arguments.kind, "machine": machine(), "rows": rows}, ensure_ascii=False))
    if arguments.figure:
        from visuals.figures.ratios import ratio_figure

        Path(arguments.figure).write_text(ratio_figure(arguments.kind, rows).to_html(include_plotlyjs=True), "utf-8")
    return 0


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    import torch

    from engine.attention import native

    return {
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "processor": platform.processor() or platform.machine(),
        "isa": native.isa() if native.available() else None,
        "torch": torch.__version__,
        "load": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
    }


def _rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    from engine.benchmarks.timing import named_clock

    clock = named_clock(arguments.clock)
    backends = tuple(_runnable(_words(arguments.backend)))
    if arguments.kind == "attention":
        from engine.benchmarks import attention

        shapes = _words(arguments.shape or "smollm2")
        for name in shapes:
            if name not in attention.SHAPES:
                raise ConfigError(f"--shape must be one of {', '.join(attention.SHAPES)}, got {name}.")
        yield from attention.sweep(
            shapes,
            _numbers(arguments.context or "8192"),
            _shares(arguments.budget),
            kv_dtypes=_dtypes(arguments.kv_dtype),
            full_dtypes=_dtypes(arguments.full_dtype),
            batches=tuple(_numbers(arguments.batch)),
            rounds=arguments.rounds or 120,
            backends=backends,
            clock=clock,
        )
        return
    if arguments.kind == "table4":
        yield from _table4(arguments, backends)
        return
    from engine.benchmarks import decode
    from engine.models import load_model

    loaded = load_model(arguments.model, weights=arguments.weights)
    work = decode.measure_prefill if arguments.kind == "prefill" else decode.measure_decode
    default_rounds = 3 if arguments.kind == "prefill" else 40
    contexts = arguments.context or ("2048" if arguments.kind in ("prefill", "routing") else "512,2048")
    for context in _numbers(contexts):
        for batch in _numbers(arguments.batch):
            for kv_dtype in _dtypes(arguments.kv_dtype):
                for budget in _shares(arguments.budget):
                    yield work(
                        loaded,
                        context=context,
                        budget=budget,
                        kv_dtype=kv_dtype,
                        batch=batch,
                        rounds=arguments.rounds or default_rounds,
                        backends=backends,
                        clock=clock,
                    )


def _table4(arguments: argparse.Namespace, backends: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    import torch

    from engine.benchmarks import table4

    on_gpu = torch.cuda.is_available()
    name = arguments.shape or ("llama8b" if on_gpu else "small")
    if name not in table4.MODELS:
        raise ConfigError(f"--shape must be one of {', '.join(table4.MODELS)}, got {name}.")
    device = "cuda" if on_gpu else "cpu"
    model = table4.build(table4.MODELS[name], device, torch.bfloat16 if on_gpu else torch.float32)
    budget = _shares(arguments.budget)[0]
    if arguments.prompt_tokens or arguments.new_tokens or not on_gpu:
        cells = [(arguments.prompt_tokens or 256, arguments.new_tokens or (1024 if on_gpu else 64))]
        batches = _numbers(arguments.batch)
    else:
        cells = [(256, 1024), *CELLS]
        batches = [1, 32]
    for prompt, new in cells:
        for batch in batches:
            for row in table4.measure(
                model,
                prompt_tokens=prompt,
                new_tokens=new,
                batch=batch,
                budget=budget,
                backends=backends,
                repeats=arguments.rounds or 1,
            ):
                yield {"shape": name, "device": device, **row, "paper": table4.PAPER}


def _runnable(names: list[str]) -> Iterator[str]:
    """Backends that can run here; the first that cannot is an error if it was the only one."""
    import torch

    from engine.attention import unavailable
    from engine.errors import BackendError

    device = "cuda" if torch.cuda.is_available() else "cpu"
    reasons = []
    found = False
    for name in names:
        reason = unavailable(name, device)
        if reason is None:
            found = True
            yield name
        else:
            reasons.append(reason)
    if not found:
        raise BackendError(reasons[0] if reasons else "--backend must name a backend.")


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(word) for word in _words(text)]
    except ValueError as error:
        raise ConfigError(f"whole numbers are expected, separated by commas, got {text}.") from error
    if not numbers or min(numbers) < 1:
        raise ConfigError(f"numbers of 1 or more are expected, got {text}.")
    return numbers


def _shares(text: str) -> list[float]:
    try:
        shares = [float(word) for word in _words(text)]
    except ValueError as error:
        raise ConfigError(f"--budget takes shares such as 0.2,0.1, got {text}.") from error
    if not shares or not all(0.0 < share <= 1.0 for share in shares):
        raise ConfigError(f"--budget must be in (0, 1], got {text}.")
    return shares


def _dtypes(text: str) -> tuple[str, ...]:
    names = tuple(_words(text))
    for name in names:
        if name not in ("float16", "bfloat16", "float32"):
            raise ConfigError(f"a dtype must be float16, bfloat16 or float32, got {name}.")
    return names


def _line(kind: str, row: dict[str, Any]) -> str:
    """One row for a person."""
    if kind == "attention":
        ratios = "  ".join(f"{name} {value:.2f}x" for name, value in row["ratio_to_stock_sdpa"].items())
        limit = row.get("share_of_read_limit")
        tail = (
            "" if limit is None else f"; fused is {row['ratio_to_own_full']:.2f}x own_full, {limit:.0%} of read limit"
        )
        return (
            f"{row['shape']} {row['context']} tokens, budget {row['kv_budget']:.0%} ({row['kv_dtype']}, "
            f"{row['full_tokens']} + {row['quant_tokens']} tokens resident) vs full {row['full_dtype']}: {ratios}{tail}"
        )
    if kind == "prefill":
        costs = "  ".join(f"{name} {value:.2f}x" for name, value in row["cost_against_dynamic"].items())
        return f"{row['model']} ({row['weights']} weights) prompt {row['context']}: time against stock: {costs}"
    if kind in ("decode", "routing"):
        ratios = "  ".join(
            f"{name} {value:.2f}x/{row['ratio_to_static'][name]:.2f}x"
            for name, value in row["ratio_to_dynamic"].items()
        )
        shares = "  ".join(f"{name} {value:.1%}" for name, value in row["routing_share"].items())
        return (
            f"{row['model']} ({row['weights']} weights) at {row['context']} tokens, budget {row['kv_budget']:.0%}: "
            f"speed against DynamicCache/StaticCache: {ratios}; routing share: {shares}"
        )
    return (
        f"{row['shape']} {row['prompt_tokens']}+{row['new_tokens']} batch {row['batch']} {row['system']}: "
        f"TTFT {row['ttft_ms']:.0f} ms  TPOT {row['tpot_ms']:.1f} ms  {row['tokens_per_s']:.1f} tok/s  "
        f"KV {row['persistent_kv_bytes'] / 1e6:.1f} MB  {row['speed_against_full']:.2f}x of FullKV"
    )
