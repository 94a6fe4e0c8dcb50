"""The command line: one subcommand for each thing that a person does; `qevict --help` lists them.

A wrong input gets one sentence on stderr and exit code 2, never a traceback. Imports torch, transformers and the web
framework only in the command that needs them, so that help and wrong input answer at once.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from app import bench_command, compare_command, diagnose_command, eval_command, report_command
from engine.config import BACKENDS, KV_DTYPES, RANKERS, SCORE_SCOPES
from engine.errors import EngineError
from presets.loader import DEFAULT, load_models, load_presets

OK, FAILED, WRONG_INPUT, INTERRUPTED = 0, 1, 2, 130

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class CommandError(EngineError, ValueError):
    """What was typed cannot be done; the text says why and what to type instead."""


class _Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are one line without the usage block."""

    def error(self, message: str) -> NoReturn:
        self.exit(WRONG_INPUT, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code: 0 done, 1 failed, 2 wrong input, 130 stopped by Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that is not UTF-8 gets a question mark, not a traceback.
            stream.reconfigure(errors="replace")
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    command: Callable[[argparse.Namespace], int] = arguments.command
    try:
        code = command(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        _forget_stdout()
        return OK
    except KeyboardInterrupt:
        say("stopped.")
        return INTERRUPTED
    except EngineError as error:
        say(str(error))
        return WRONG_INPUT
    except OSError as error:
        if error.errno == errno.ENOSPC:
            say(f"no disk space left ({error.filename or 'while writing'}): free some and try again.")
            return WRONG_INPUT
        raise
    return code


def say(sentence: str) -> None:
    """One line on stderr."""
    print(f"qevict: {sentence}", file=sys.stderr)


def plain(text: str) -> str:
    """`text` without control characters: a model's or a file's words may not steer the terminal."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def _forget_stdout() -> None:
    """Lets the interpreter end quietly after the reader of our output has gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="qevict", description="Watch and measure a KV cache that routes windows between tiers.")
    parser.add_argument("--version", action="version", version=f"qevict {version()}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=_Parser)
    _add_serve(commands)
    _add_run(commands)
    for name, command, text in (
        ("presets", _presets, "list the named settings"),
        ("models", _models, "list models that are known or on this machine"),
        ("doctor", _doctor, "say what this machine can do, and what to install for the rest"),
    ):
        listing = commands.add_parser(name, help=text, description=text.capitalize() + ".")
        listing.add_argument("--json", action="store_true", help="as JSON")
        listing.set_defaults(command=command)
        if name == "doctor":
            listing.add_argument(
                "--fix-database", action="store_true", help="mend the session database; end the server first"
            )
        if name == "models":
            listing.add_argument("--convert", action="store_true", help="prepare the embedded model for quick loading")
    _add_sessions(commands)
    bench_command.add(commands)
    compare_command.add(commands)
    diagnose_command.add(commands)
    eval_command.add(commands)
    report_command.add(commands)
    return parser


def version() -> str:
    """The installed version, or "(not installed)"."""
    import importlib.metadata

    try:
        return importlib.metadata.version("qevict-lab")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def _add_serve(commands: Any) -> None:
    serve = commands.add_parser("serve", help="start the page", description="Start the page and the HTTP API.")
    serve.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    serve.add_argument("--port", type=int, help="port to listen on (default 7860)")
    serve.add_argument("--desktop", action="store_true", help="show the page in a window of its own")
    serve.set_defaults(command=_serve)


def _add_run(commands: Any) -> None:
    run = commands.add_parser(
        "run",
        help="generate text and print what the cache did",
        description="Generate text with the QEvict cache: the text on stdout, progress on stderr.",
    )
    prompt = run.add_argument_group("prompt (one of the two)")
    prompt.add_argument("--prompt", metavar="TEXT")
    prompt.add_argument("--prompt-file", metavar="FILE", help="UTF-8 text; - reads from stdin")
    prompt.add_argument("--document", metavar="FILE", help="text compressed on its own, before the prompt is read")
    model = run.add_argument_group("model")
    model.add_argument("--model", default="embedded", metavar="NAME", help="embedded, a folder, or a hub name")
    model.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N, mps, or spread: over all GPUs")
    model.add_argument("--dtype", default="auto", help="auto, float32, float16 or bfloat16")
    model.add_argument(
        "--weights", default="auto", help="auto, float32, float16, bfloat16 or int4 (the embedded model)"
    )
    cache = run.add_argument_group("cache (each overrides the preset)")
    cache.add_argument("--preset", default=DEFAULT, metavar="NAME", help=f"see qevict presets (default {DEFAULT})")
    cache.add_argument("--kv-budget", type=float, metavar="SHARE", help="share of FullKV bytes kept, (0, 1]")
    cache.add_argument("--kv-budget-bytes", type=int, metavar="BYTES", help="absolute budget, all layers")
    cache.add_argument("--quant-share", type=float, metavar="Q", help="byte share of the INT2 or INT4 tier, [0, 1]")
    cache.add_argument("--bits", type=int, metavar="2|4")
    cache.add_argument("--window-size", type=int, metavar="TOKENS")
    cache.add_argument("--sink-tokens", type=int, metavar="TOKENS")
    cache.add_argument("--local-tokens", type=int, metavar="TOKENS")
    cache.add_argument("--kv-dtype", metavar="|".join(KV_DTYPES))
    cache.add_argument("--no-promotion", dest="promotion", action="store_false", default=None)
    cache.add_argument("--score-scope", metavar="|".join(SCORE_SCOPES))
    cache.add_argument("--ranker", metavar="|".join(RANKERS))
    cache.add_argument("--backend", metavar="|".join(BACKENDS))
    text = run.add_argument_group("generation")
    text.add_argument("--max-new-tokens", type=int, default=256, metavar="TOKENS")
    text.add_argument("--temperature", type=float, default=0.0, help="0 = greedy")
    text.add_argument("--top-p", type=float, default=1.0)
    text.add_argument("--seed", type=int, default=0)
    text.add_argument("--prefill-chunk", type=int, metavar="TOKENS", help="read the prompt in pieces")
    text.add_argument("--no-reference", dest="reference", action="store_false", help="skip FullKV: no FMM, no churn")
    text.add_argument("--no-chat", dest="chat", action="store_false", help="do not use the model's chat template")
    text.add_argument("--ignore-eos", action="store_true", help="go on after the model's end token")
    out = run.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="end with one JSON line")
    out.add_argument("--save", action=argparse.BooleanOptionalAction, default=True, help="store the session")
    run.set_defaults(command=_run)


def _add_sessions(commands: Any) -> None:
    sessions = commands.add_parser("sessions", help="list, show, export or delete stored sessions")
    kinds = sessions.add_subparsers(title="actions", required=True, metavar="ACTION", parser_class=_Parser)
    listing = kinds.add_parser("list", help="newest first")
    listing.add_argument("--limit", type=int, default=50)
    listing.add_argument("--json", action="store_true")
    listing.set_defaults(command=_sessions_list)
    show = kinds.add_parser("show", help="settings, figures and text of one session")
    show.add_argument("session")
    show.add_argument("--json", action="store_true")
    show.set_defaults(command=_sessions_show)
    export = kinds.add_parser("export", help="every event of one session as JSON lines")
    export.add_argument("session")
    export.add_argument("--output", metavar="FILE", help="default: stdout")
    export.set_defaults(command=_sessions_export)
    delete = kinds.add_parser("delete", help="remove one session for good")
    delete.add_argument("session")
    delete.set_defaults(command=_sessions_delete)


def _serve(arguments: argparse.Namespace) -> int:
    from app.settings import Settings

    env = dict(os.environ)
    if arguments.port is not None:
        env["QEVICT_PORT"] = str(arguments.port)
    if arguments.host is not None:
        env["QEVICT_HOST"] = arguments.host
    settings = Settings.from_env(env)
    say("starting ...")
    from app.main import serve

    serve(settings, desktop=arguments.desktop)
    return OK


def _run(arguments: argparse.Namespace) -> int:
    from app.terminal_run import run

    return run(arguments)


def _presets(arguments: argparse.Namespace) -> int:
    presets = load_presets().values()
    if arguments.json:
        return _print_json(
            [
                {"name": p.name, "title": p.title_en, "note": p.note_en, "group": p.group, "config": p.config.to_dict()}
                for p in presets
            ]
        )
    _print_table((p.name, p.title_en + (" (default)" if p.name == DEFAULT else ""), p.note_en) for p in presets)
    return OK


def _models(arguments: argparse.Namespace) -> int:
    if arguments.convert:
        from app.terminal_run import LoadBar
        from engine.embedded import ensure_converted

        with LoadBar() as bar:
            folder = ensure_converted(bar.show)
        print(f"The embedded model is ready in {folder}")
        return OK
    from app.doctor import cached_models

    here = cached_models()
    known = {note.name: note for note in load_models()}
    names = [*known, *(name for name in here if name not in known)]
    rows = []
    for name in names:
        note = known.get(name)
        rows.append(
            {
                "name": name,
                "title": note.title_en if note else name,
                "note": note.note_en if note else "",
                "parameters_millions": note.parameters_millions if note else None,
                "gated": note.gated if note else None,
                "here": name in here,
                "bytes": here.get(name),
            }
        )
    if arguments.json:
        return _print_json(rows)
    _print_table((str(r["name"]), "here" if r["here"] else "to fetch", str(r["note"])) for r in rows)
    return OK


def _doctor(arguments: argparse.Namespace) -> int:
    if arguments.fix_database:
        return _fix_database(arguments.json)
    from app.doctor import diagnose, lines

    report = diagnose()
    if arguments.json:
        return _print_json(report)
    for line in lines(report):
        print(line)
    return OK


def _fix_database(as_json: bool) -> int:
    from app.repair import fix
    from app.settings import Settings

    said = fix(Settings.from_env().database)
    if as_json:
        return _print_json(said)
    for sentence in said:
        print(plain(sentence))
    return OK


@contextlib.contextmanager
def _open_sessions() -> Iterator[Any]:
    from app.sessions import Sessions
    from app.settings import Settings

    settings = Settings.from_env()
    if not settings.database.is_file():
        raise CommandError(f"there are no stored sessions yet in {settings.database}: qevict run makes one.")
    store = Sessions(settings.database)
    try:
        yield store
    finally:
        store.close()


def _sessions_list(arguments: argparse.Namespace) -> int:
    import datetime

    with _open_sessions() as store:
        infos = store.list(limit=max(1, arguments.limit))
    if arguments.json:
        return _print_json([_session_row(info) for info in infos])
    _print_table(
        (i.id, f"{datetime.datetime.fromtimestamp(i.created):%Y-%m-%d %H:%M}", i.state, i.model, i.title) for i in infos
    )
    return OK


def _session_row(info: Any) -> dict[str, Any]:
    names = ("id", "created", "model", "policy", "title", "state", "num_events", "settings", "versions", "summary")
    return {name: getattr(info, name) for name in names}


def _sessions_show(arguments: argparse.Namespace) -> int:
    with _open_sessions() as store:
        info = store.get(arguments.session)
    if arguments.json:
        return _print_json(_session_row(info))
    for name, value in _session_row(info).items():
        shown = json.dumps(value, ensure_ascii=False) if isinstance(value, Mapping) else str(value)
        print(f"{name:>12}  {plain(shown)}")
    return OK


def _sessions_export(arguments: argparse.Namespace) -> int:
    with _open_sessions() as store:
        events: Iterator[bytes] = store.events(arguments.session)
        if arguments.output is None:
            for body in events:
                sys.stdout.buffer.write(body + b"\n")
            sys.stdout.buffer.flush()
        else:
            _write_whole(Path(arguments.output), events)
            say(f"wrote {arguments.output}.")
    return OK


def _write_whole(path: Path, bodies: Iterable[bytes]) -> None:
    """Writes a file of one body a line, whole or not at all."""
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            for body in bodies:
                file.write(body + b"\n")
        part.replace(path)
    except OSError as error:
        raise CommandError(f"cannot write {path} ({error.strerror or error}).") from error
    finally:
        part.unlink(missing_ok=True)


def _sessions_delete(arguments: argparse.Namespace) -> int:
    with _open_sessions() as store:
        store.delete(arguments.session)
    say(f"deleted {plain(arguments.session)}.")
    return OK


def _print_json(value: object) -> int:
    print(json.dumps(value, ensure_ascii=False, indent=2, default=str))
    return OK


def _print_table(rows: Iterable[Sequence[str]]) -> None:
    cells = [[plain(cell) for cell in row] for row in rows]
    if not cells:
        return
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]) - 1)]
    for row in cells:
        print("  ".join([cell.ljust(width) for cell, width in zip(row, widths, strict=False)] + [row[-1]]).rstrip())
