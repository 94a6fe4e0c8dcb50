"""`qevict diagnose`: the article's diagnostics on one text, measured beside printed.

Parses, loads, runs `engine.evaluation.diagnose`, prints tables or one JSON object. Measures nothing itself.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from engine.errors import PromptError

TABLES = (
    ("table14", "Table 14: future missed mass and churn"),
    ("table15", "Table 15: scores under quantized execution against FullKV's"),
    ("table16", "Table 16: late important returns, m = 3"),
    ("table18", "Table 18: promotion, here on the same text"),
    ("figure1", "Figure 1, right: next attention by tier"),
)


def add(commands: Any) -> None:
    """Adds the subcommand to the parser's commands."""
    parser = commands.add_parser(
        "diagnose",
        help="FMM, churn, LIR and mass shares of the article's policies on your text",
        description="From one FullKV run: what each policy would have kept and what FullKV then wanted. "
        "Prints Tables 14, 15, 16, 18 and Figure 1 as measured, the article's figures beside them.",
    )
    parser.add_argument("--prompt-file", metavar="FILE", help="a UTF-8 text; default: a sample document")
    parser.add_argument("--document", metavar="NAME", help="a sample document instead")
    parser.add_argument("--preset", default="paper-20", metavar="NAME", help="see qevict presets")
    parser.add_argument("--kv-budget", type=float, metavar="SHARE", help="share of FullKV bytes kept, (0, 1]")
    parser.add_argument("--tokens", type=int, default=1152, metavar="N", help="tokens of the text that are used")
    parser.add_argument("--steps", type=int, default=128, metavar="N", help="the last of them, fed one by one")
    parser.add_argument("--horizon", type=int, default=32, metavar="H", help="tokens of future missed mass")
    parser.add_argument("--live", action="store_true", help="also run the real cache (Table 15 needs it)")
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--weights", default="float32", help="float32, or int4 (embedded model)")
    parser.add_argument("--kv-dtype", default="float16", help="what byte costs and tiers are in")
    parser.add_argument("--seed", type=int, default=0, help="of the random policy")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Diagnoses one text and prints what was found."""
    from engine.evaluation.diagnose import DiagnoseOptions, diagnose
    from engine.models import load_model
    from presets.loader import load_preset

    config = load_preset(arguments.preset).config
    if arguments.kv_budget is not None:
        config = config.replace(kv_budget=arguments.kv_budget, kv_budget_bytes=None)
    options = DiagnoseOptions(arguments.steps, arguments.horizon, arguments.live, arguments.kv_dtype, arguments.seed)
    text = text_of(arguments)
    loaded = load_model(arguments.model, device=arguments.device, weights=arguments.weights)
    ids = [int(token) for token in loaded.tokenizer(text, verbose=False)["input_ids"]][: max(2, arguments.tokens)]
    if len(ids) <= options.steps + 1:
        raise PromptError(
            f"the text must be longer than --steps {options.steps}, got {len(ids)} tokens: take fewer steps."
        )
    report = diagnose(loaded, ids, config, options, progress=_tell)
    if arguments.json:
        print(json.dumps(report, ensure_ascii=False))
        return 0
    for line in lines(report):
        print(line)
    return 0


def text_of(arguments: argparse.Namespace) -> str:
    """The text that was asked for.

    Raises:
        PromptError: a file that cannot be read. DocumentError: no such document.
    """
    from app.documents import get_document, load_documents

    if arguments.prompt_file:
        try:
            return Path(arguments.prompt_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PromptError(f"cannot read {arguments.prompt_file} as UTF-8 text ({error}).") from error
    if arguments.document:
        return get_document(arguments.document).text
    return max((doc for doc in load_documents().values() if doc.language == "en"), key=lambda doc: doc.tokens).text


def _tell(stage: str, done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{stage} {done}/{total}   ", end="" if done < total else "\r", file=sys.stderr, flush=True)


def lines(report: dict[str, Any]) -> list[str]:
    """The report for a person."""
    setup = report["setup"]
    out = [
        f"{setup['model']}, {setup['prompt_tokens']} + {setup['steps']} tokens, "
        f"budget {setup['config']['kv_budget']:.0%}, against {report['article']}"
    ]
    for key, title in TABLES:
        out += ["", title]
        rows = report[key]
        if rows is None:
            out.append("  needs --live: scores under quantized execution come from the real cache only")
            continue
        out.append(f"  {'policy':<18}{'figure':<20}{'measured':>10}  {'paper':>8}  unit, source")
        for row in rows:
            unit = f"{row['unit']}, {row['source']}".lstrip(", ")
            out.append(
                f"  {row['system']:<18}{row['quantity']:<20}{_number(row['measured']):>10}  "
                f"{_number(row['paper']):>8}  {unit}"
            )
    out += ["", "Promotion, each against the same event without it"]
    out += promotion_lines(report["promotion"])
    out += ["", "The article's directions, on this one text"]
    for row in report["directions"]:
        verdict = {True: "holds", False: "DOES NOT HOLD", None: "not measured"}[row["holds"]]
        figures = ", ".join(f"{name} {_number(value)}" for name, value in row.items() if isinstance(value, float))
        out.append(f"  {verdict:<14}{row['claim']} ({row['quantity']}: {figures})")
    for name, sentence in report["infeasible"].items():
        out.append(f"  {name} is left out: {sentence}")
    out += ["", "What differs from the article"]
    out += [f"  {sentence}" for sentence in report["differs"]]
    return out


def promotion_lines(found: dict[str, Any]) -> list[str]:
    """The promotion experiment for a person."""
    out = [
        f"  {found['promotions']} promotions, {found['positive']} with a net gain; interval over {found['resampled']}"
    ]
    for name, value in found["each_promotion"].items():
        if value is not None:
            out.append(f"  {name.replace('_', ' '):<18} {_interval(value)} of the row's next attention")
    if found["lift"]:
        out.append(f"  lift               {_interval(found['lift'])} of what windows that stayed in Quant got")
    if found["fmm_on_minus_off"]:
        out.append(f"  FMM on - off       {_interval(found['fmm_on_minus_off'])}")
    return out


def _interval(value: dict[str, Any]) -> str:
    ends = "" if value["low"] is None else f" [{value['low']:+.5f}, {value['high']:+.5f}]"
    return f"{value['mean']:+.5f}{ends} (n {value['n']})"


def _number(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, int):
        return str(value)
    return f"{value:.2f}" if abs(value) >= 10 else f"{value:.4f}"
