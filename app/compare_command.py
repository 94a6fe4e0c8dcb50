"""`qevict compare` and `qevict systems`: several systems on the same tokens, and which systems there are.

Parses, checks before a model is loaded, runs `engine.compare`, prints a table or one JSON object. Measures nothing
itself.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from app.compare_request import DEFAULT_SYSTEMS, LEAST, MOST, CompareRequest, parameters_of, sharper, split_names
from engine.config import KV_DTYPES
from engine.errors import BudgetError, ConfigError, PromptError

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def add(commands: Any) -> None:
    """Adds the subcommands to the parser's commands."""
    parser = commands.add_parser(
        "compare",
        help="two to four systems on the same tokens, at matched bytes",
        description="Run two to four systems on one prompt at matched persistent bytes. By default all of them are "
        "fed FullKV's tokens, so that every figure is about the same positions.",
    )
    parser.add_argument(
        "--systems",
        default=",".join(DEFAULT_SYSTEMS),
        metavar="NAME,NAME[,…]",
        help=f"{LEAST} to {MOST} of qevict systems (default {','.join(DEFAULT_SYSTEMS)})",
    )
    parser.add_argument("--set", action="append", default=[], metavar="SYSTEM.NAME=VALUE", help="a system's parameter")
    prompt = parser.add_argument_group("prompt (one of the three)")
    prompt.add_argument("--prompt", metavar="TEXT")
    prompt.add_argument("--prompt-file", metavar="FILE", help="UTF-8 text; - reads from stdin")
    prompt.add_argument("--document", metavar="NAME", help="a sample document")
    budget = parser.add_argument_group("budget of every system that takes one (one of the three)")
    budget.add_argument("--kv-budget", type=float, metavar="SHARE", help="of FullKV's bytes, (0, 1]; default 0.2")
    budget.add_argument("--kv-budget-bytes", type=int, metavar="BYTES", help="for the whole model")
    budget.add_argument("--kv-budget-tokens", type=int, metavar="N", help="the bytes of so many tokens")
    budget.add_argument(
        "--matched-at",
        default="prompt+new",
        metavar="prompt+new|prompt|running",
        help="length at which the budget is met; running: a share at every step, for systems that can follow",
    )
    budget.add_argument("--match-to", default="", metavar="NAME", help="QEvict gets this system's bytes instead")
    parser.add_argument("--free", action="store_true", help="each system goes its own way; texts are compared")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="TOKENS")
    parser.add_argument("--kv-dtype", default="float16", metavar="|".join(KV_DTYPES), help="stored by all systems")
    parser.add_argument("--model", default="embedded", metavar="NAME", help="embedded, a folder, or a hub name")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N, mps, or spread: over all GPUs")
    parser.add_argument("--dtype", default="auto", help="auto, float32, float16 or bfloat16")
    parser.add_argument("--seed", type=int, default=0, help="of systems that draw by lot")
    parser.add_argument("--no-chat", dest="chat", action="store_false", help="do not use the model's chat template")
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the model's end token")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(command=run)
    listing = commands.add_parser(
        "systems", help="list the systems that can be compared", description="List the systems with their parameters."
    )
    listing.add_argument("--json", action="store_true", help="as JSON")
    listing.set_defaults(command=systems)


def run(arguments: argparse.Namespace) -> int:
    """Compares what was asked for and prints what was found; 130 where Ctrl-C cut it short.

    Raises:
        EngineError: wrong input, or the model can't be loaded.
    """
    request = request_of(arguments)
    request.check()
    from app.cli import INTERRUPTED, OK, say
    from app.compare_lines import lines, report
    from app.terminal_run import LoadBar, _stop_on_ctrl_c
    from engine.compare import CompareResult, CompareStep, iter_compare
    from engine.models import load_model
    from engine.trace import Progress

    with LoadBar() as bar:
        loaded = load_model(request.model, device=request.device, dtype=request.dtype, progress=bar.show)
    result: CompareResult | None = None
    try:
        with _stop_on_ctrl_c() as stopped, LoadBar() as bar:
            events = iter_compare(loaded, request.prompt, request.choices(), request.options(), should_stop=stopped)
            for event in events:
                if isinstance(event, CompareResult):
                    result = event
                elif isinstance(event, CompareStep):
                    bar.show(Progress("decode", event.step + 1, max(1, request.max_new_tokens - 1)))
                else:
                    bar.show(event)
    except BudgetError as error:
        raise sharper(error, request, loaded) from error
    if result is None:
        raise RuntimeError("a comparison must end with a result")
    if arguments.json:
        setup = {
            "model": loaded.label,
            "device": loaded.device,
            "dtype": loaded.dtype,
            "budget": dict(request.budget),
            "matched_at": request.reference,
            "match_to": request.match_to or None,
        }
        print(json.dumps(report(result, setup), ensure_ascii=False))
    else:
        for line in lines(result):
            print(_CONTROL.sub("\N{REPLACEMENT CHARACTER}", line))
    if result.stopped:
        say("stopped.")
        return INTERRUPTED
    return OK


def request_of(arguments: argparse.Namespace) -> CompareRequest:
    """The comparison that the arguments describe.

    Raises:
        PromptError: not exactly one prompt, or a file that can't be read. ConfigError: more than one budget.
        DocumentError: no such document.
    """
    budgets = {
        "share": arguments.kv_budget,
        "total_bytes": arguments.kv_budget_bytes,
        "tokens": arguments.kv_budget_tokens,
    }
    given = {kind: value for kind, value in budgets.items() if value is not None}
    if len(given) > 1:
        raise ConfigError("give at most one of --kv-budget, --kv-budget-bytes and --kv-budget-tokens.")
    return CompareRequest(
        prompt=_prompt(arguments),
        systems=split_names(arguments.systems),
        budget=given or {"share": 0.2},
        mode="free" if arguments.free else "teacher",
        max_new_tokens=arguments.max_new_tokens,
        match_to=arguments.match_to,
        parameters=parameters_of(arguments.set),
        model=arguments.model,
        device=arguments.device,
        dtype=arguments.dtype,
        kv_dtype=arguments.kv_dtype,
        chat=arguments.chat,
        ignore_eos=arguments.ignore_eos,
        reference=arguments.matched_at,
        seed=arguments.seed,
    )


def _prompt(arguments: argparse.Namespace) -> str:
    given = [arguments.prompt, arguments.prompt_file, arguments.document]
    if sum(value is not None for value in given) != 1:
        raise PromptError("give exactly one of --prompt TEXT, --prompt-file FILE and --document NAME.")
    if arguments.prompt is not None:
        return str(arguments.prompt)
    if arguments.document is not None:
        from app.documents import get_document

        return get_document(arguments.document).text
    try:
        if arguments.prompt_file == "-":
            return sys.stdin.buffer.read().decode("utf-8")
        return Path(arguments.prompt_file).read_text(encoding="utf-8")
    except OSError as error:
        raise PromptError(f"cannot read {arguments.prompt_file} ({error.strerror or error}).") from error
    except UnicodeDecodeError as error:
        raise PromptError(f"{arguments.prompt_file} must be UTF-8 text, but byte {error.start} is not.") from error


def systems(arguments: argparse.Namespace) -> int:
    """Lists the systems."""
    from app.compare_lines import system_label, system_line, system_loss
    from engine.baselines import registry

    infos = registry.systems()
    if arguments.json:
        rows = [
            info.to_dict()
            | {
                "label": system_label(info.name, "en"),
                "line": system_line(info.name, "en"),
                "loss": system_loss(info.name, "en"),
            }
            for info in infos
        ]
        print(json.dumps(rows, ensure_ascii=False, indent=2))
        return 0
    width = max(len(info.name) for info in infos)
    for info in infos:
        point = "budget" if info.budgeted else "own operating point"
        words = f"{info.keeps}, {info.storage} storage, {point}"
        words += ", can follow a running budget" if info.grows else ""
        words += ", in teacher-forced comparisons only" if info.needs_reference else ""
        print(f"{info.name:<{width}}  {system_label(info.name, 'en')}: {system_line(info.name, 'en')} ({words})")
        if info.unavailable:
            print(f"{'':<{width}}  not here: {info.unavailable}")
        known = ", ".join(_parameter(parameter) for parameter in info.parameters)
        if known:
            print(f"{'':<{width}}    {known}")
    return 0


def _parameter(parameter: Any) -> str:
    choices = f" of {'|'.join(parameter.choices)}" if parameter.choices else ""
    default = "none" if parameter.default is None else parameter.default
    return f"{parameter.name}={default}{choices}"
