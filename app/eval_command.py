"""`qevict eval`: quality and fidelity with intervals, from the command line.

Parses, builds a suite, runs it with a resumable store, prints tables or one JSON object, and writes the report.
Measures nothing itself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from app.bench_command import machine
from app.eval_lines import lines
from app.eval_plan import Bar, plan, plan_lines
from engine.errors import ConfigError, PromptError

KINDS = ("quick", "full", "directions", "ablation", "task")
QUICK_MINUTES = 10.0


def add(commands: Any) -> None:
    """Adds the subcommands to the parser's commands."""
    parser = commands.add_parser(
        "eval",
        help="quality against bytes, with intervals: quick, full, directions, ablation, task",
        description="Measure fidelity and tasks under each system, on the same items. Finished cells are kept in a "
        "file: run the same command again to go on where it stopped.",
    )
    parser.add_argument("kind", choices=KINDS, metavar="|".join(KINDS))
    parser.add_argument("--data", metavar="FOLDER", help="a folder of .txt files; default: the sample documents")
    parser.add_argument("--what", default="q", help="ablation: window, q, bits, promotion, budget, ranker or scope")
    parser.add_argument(
        "--task",
        default="book",
        help="task, ablation: book, niah1_raw, kvline, …; task: also RULER's "
        "(vt, cwe, niah_single_1, …), LongBench's and gsm8k",
    )
    parser.add_argument("--benchmark-data", metavar="PATH", help="file or folder of qa_1, qa_2, LongBench or gsm8k")
    parser.add_argument("--systems", metavar="NAME[@SHARE],…", help="task: such as qevict@0.2,snapkv@0.2,kivi-2")
    parser.add_argument("--kv-budget", type=float, default=0.2, metavar="SHARE", help="ablation, task")
    parser.add_argument("--length", type=int, default=1024, metavar="TOKENS", help="ablation, task: of the prompt")
    parser.add_argument("--count", type=int, default=20, metavar="N", help="ablation, task: items")
    parser.add_argument("--question", default="after", help="task: asked after compression, or inside the prompt")
    parser.add_argument("--minutes", type=float, metavar="M", help="stop then; quick: 10 by default, 0 = no limit")
    parser.add_argument("--store", metavar="FILE.jsonl", help="finished cells; default: in the data folder")
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--weights", default="float32", help="float32, or int4 (embedded model)")
    parser.add_argument("--kv-dtype", default="float16", help="what all systems store full-precision tokens in")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--ray",
        metavar="auto|ADDRESS",
        help="run the cells on a Ray cluster (extra `cluster`): auto takes one that runs, or starts one here; "
        "--threads is then of each part. This process alone writes the file",
    )
    parser.add_argument("--plan", action="store_true", help="say what would run and for how long, and run nothing")
    parser.add_argument("--json", action="store_true", help="one JSON object with all tables")
    parser.add_argument("--report", metavar="FILE.html", help="also write the report")
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs one suite and prints its tables."""
    import torch

    from engine.evaluation.store import Store
    from engine.evaluation.sweep import run_sweep
    from engine.models import load_model

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    texts = _texts(arguments.data)
    store = Store(_store_path(arguments))
    loaded = load_model(arguments.model, device=arguments.device, weights=arguments.weights)
    suite = _suite(arguments, loaded, texts)
    if arguments.plan:
        found = plan(loaded, suite, store)
        print(json.dumps(found, ensure_ascii=False) if arguments.json else "\n".join(plan_lines(found)))
        return 0
    minutes = QUICK_MINUTES if arguments.minutes is None and arguments.kind == "quick" else arguments.minutes
    with contextlib.ExitStack() as stack:
        runner = _ray(arguments, loaded, suite, stack) if arguments.ray else None
        bar = stack.enter_context(contextlib.closing(Bar()))
        seconds = minutes * 60 if minutes else None
        result = run_sweep(loaded, suite, store, seconds=seconds, progress=bar.show, runner=runner)
    left_out = list(suite.left_out)
    if result.missing:
        left_out.insert(0, f"{result.missing} cells that the time did not reach: run the same command again to go on")
    answer = {
        "kind": arguments.kind,
        "suite": suite.name,
        "model": loaded.label,
        "fingerprint": loaded.fingerprint,
        "weights": loaded.weights,
        "kv_dtype": suite.kv_dtype,
        "seed": suite.seed,
        "machine": machine(),
        "store": None if store.path is None else str(store.path),
        "seconds": result.seconds,
        "cells": len(result.rows),
        "ran_now": result.ran,
        "missing": result.missing,
        "left_out": left_out,
        **tables_of(result.rows, arguments.what if arguments.kind == "ablation" else None),
    }
    if arguments.report:
        from app.eval_page import page

        write_page(Path(arguments.report), page(answer, None))
    if arguments.json:
        print(json.dumps(answer, ensure_ascii=False))
    else:
        for line in lines(answer):
            print(line)
    return 0


def _ray(arguments: argparse.Namespace, loaded: Any, suite: Any, stack: contextlib.ExitStack) -> Any:
    """What runs the parts on Ray, connected until `stack` ends."""
    from engine.evaluation.cluster import ModelSource, connected, ray_runner

    ray = stack.enter_context(connected(arguments.ray))
    source = ModelSource(arguments.model, arguments.device, arguments.weights)
    return ray_runner(ray, source, suite, threads=arguments.threads, gpu=loaded.device.startswith("cuda"))


def tables_of(rows: Sequence[Mapping[str, Any]], what: str | None) -> dict[str, Any]:
    """All tables that the rows allow."""
    from engine.evaluation import tables
    from engine.evaluation.pairings import matched_differences

    scores = tables.score_table(rows)
    return {
        "scores": scores,
        "answers": tables.answer_table(rows),
        "pareto": tables.pareto_points(scores),
        "pareto_error": tables.pareto_points(scores, figure="output_error"),
        "rivals": tables.rival_differences(rows),
        "variants": [row for name in tables.VARIANTS for row in tables.rival_differences(rows, name)],
        "quantizers": matched_differences(rows),
        "directions": tables.direction_table(rows),
        "policies": tables.policy_table(rows),
        "promotion": tables.promotion_table(rows),
        "ablation": tables.ablation_table(rows, what) if what else [],
    }


# ---- what to measure ----------------------------------------------------------------------------------------


def _texts(folder: str | None) -> list[Any]:
    from app.documents import load_documents
    from engine.evaluation.items import Text, read_texts

    if folder:
        return read_texts(Path(folder))
    return [Text(doc.id, doc.text) for doc in load_documents().values() if doc.language == "en"]


def _store_path(arguments: argparse.Namespace) -> Path:
    if arguments.store:
        return Path(arguments.store)
    from app.settings import Settings

    name = f"ablation-{arguments.what}" if arguments.kind == "ablation" else arguments.kind
    return Settings.from_env().data_dir / "evaluations" / f"{name}.jsonl"


def _suite(arguments: argparse.Namespace, loaded: Any, texts: list[Any]) -> Any:
    from engine.evaluation import suites

    common: dict[str, Any] = {"seed": arguments.seed, "kv_dtype": arguments.kv_dtype}
    if arguments.kind in ("quick", "full", "directions"):
        made = getattr(suites, arguments.kind)(loaded, texts, **common)
    elif arguments.kind == "ablation":
        made = suites.ablation(
            loaded,
            texts,
            arguments.what,
            share=arguments.kv_budget,
            length=arguments.length,
            count=arguments.count,
            task=arguments.task,
            **common,
        )
    else:
        if arguments.task in suites.PUBLISHED:
            common["data"] = Path(arguments.benchmark_data) if arguments.benchmark_data else None
        build = suites.benchmark if arguments.task in suites.PUBLISHED else suites.one_task
        made = build(
            loaded,
            texts,
            arguments.task,
            systems_of(arguments.systems, arguments.kv_budget),
            length=arguments.length,
            count=arguments.count,
            question=arguments.question,
            **common,
        )
    if not made.groups:
        raise PromptError(
            "no text is as long as the prompt that was asked for: name longer ones with --data, or a smaller --length."
        )
    return made


def systems_of(text: str | None, share: float) -> list[Any]:
    """Systems from "name@share,name": those that a budget decides get `share` where none is given.

    Raises:
        ConfigError: an unknown system, or a share that is no number.
    """
    from engine.baselines import registry
    from engine.evaluation.forcing import System

    out = []
    for word in (text or "qevict,qevict-r2,streamingllm,snapkv,h2o,kivi-2").split(","):
        name, _, own = word.strip().partition("@")
        budgeted = registry.rival(name).budgeted
        try:
            value = float(own) if own else share
        except ValueError as error:
            raise ConfigError(f"--systems takes names such as qevict@0.2, got {word.strip()!r}.") from error
        out.append(System(name, value if budgeted else None))
    return out


def write_page(path: Path, page: str) -> None:
    """Writes a page.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path} ({error.strerror or error}).") from error
