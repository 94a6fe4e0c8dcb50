"""Where the Analysis tab's figures come from: bundled results, the data folder, uploads, diagnoses, stored runs,
and the article itself.

A source is one short text such as "session:ID"; `payload` turns it into all that the browser draws. Knows files,
sessions and what makes cards; measures nothing.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.analysis_card import Card, Say
from app.analysis_results import ENDINGS, ResultCache, Results, ResultsError, read_results, result_files
from app.settings import ASSETS, Settings
from app.texts import text
from engine.errors import EngineError

if TYPE_CHECKING:
    from app.sessions import SessionInfo, Sessions
    from visuals.palette import Theme

BUNDLED = ASSETS / "results"
"""Results that come with the program, written by real runs."""
ARTICLE = "article"
KEPT_UPLOADS = 8
MOST_UPLOAD_BYTES = 512 * 1024
MOST_EVENTS = 20_000
"""Events of a trace that are read for figures."""


class AnalysisSources:
    """All sources of one server. Safe from any thread.

    Args:
        settings: where the data folder is.
        sessions: stored runs.
        bundled: the folder of results that come with the program.
        diagnosis: what a diagnosis that was started here found, by its id; None where there is none.
    """

    def __init__(
        self,
        settings: Settings,
        sessions: Sessions,
        *,
        bundled: Path = BUNDLED,
        diagnosis: Callable[[str], dict[str, Any] | None] | None = None,
    ) -> None:
        self._folder = settings.data_dir / "evaluations"
        self._sessions = sessions
        self._bundled = bundled
        self._diagnosis = diagnosis or (lambda _: None)
        self._cache = ResultCache()
        self._lock = threading.Lock()
        self._uploads: OrderedDict[str, tuple[str, Results]] = OrderedDict()

    # what there is

    def choices(self, listed: Iterable[SessionInfo], lang: str) -> list[tuple[str, str]]:
        """(label, source) of all that can be shown, for a visitor who is shown the sessions `listed`."""
        say = Say(lang)
        found: list[tuple[str, str]] = []
        if result_files(self._bundled):
            found.append((say("source_bundled"), "bundled"))
        found += [(say("source_file", name=stem), f"file:{stem}") for stem in result_files(self._folder)]
        found.append((say("source_recorded"), "recorded"))
        for info in listed:
            if info.num_events or info.state in ("running", "done"):
                name = info.title or text(lang, "replays.untitled")
                found.append((say("source_session", name=name), f"session:{info.id}"))
        return [*found, (say("source_article"), ARTICLE)]

    def default(self) -> str:
        """What is shown first: bundled results, else those of the data folder, else the recorded run."""
        if result_files(self._bundled):
            return "bundled"
        return next((f"file:{stem}" for stem in result_files(self._folder)), "recorded")

    def notices(self, lang: str) -> list[str]:
        """What is missing, as sentences."""
        return [] if result_files(self._bundled) else [text(lang, "analysis.no_bundled")]

    def upload(self, path: Path, name: str, lang: str) -> str:
        """Takes a visitor's file and returns its source; the last few are kept, in memory alone.

        Raises:
            ResultsError: of another kind, too long, or without results; the text is in the visitor's language.
        """
        if not name.endswith(ENDINGS):
            raise ResultsError(text(lang, "analysis.upload_kind"))
        if path.stat().st_size > MOST_UPLOAD_BYTES:
            raise ResultsError(text(lang, "analysis.upload_size", limit=MOST_UPLOAD_BYTES // 1024))
        results = read_results([path])
        if results.empty:
            why = " ".join(results.problems) or name
            raise ResultsError(text(lang, "analysis.upload_refused", why=why))
        token = secrets.token_hex(12)
        with self._lock:
            self._uploads[token] = (name[:120], results)
            while len(self._uploads) > KEPT_UPLOADS:
                self._uploads.popitem(last=False)
        return f"upload:{token}"

    # what is drawn

    def payload(self, source: str, theme: Theme, lang: str) -> dict[str, Any]:
        """Title, facts, notes and cards of a source, as plain JSON values.

        Raises:
            ResultsError: there is no such source, or it can't be drawn. UnknownSessionError: no such session.
        """
        say = Say(lang)
        kind, _, name = source.partition(":")
        if kind == "session":
            return self._run(self._sessions.get(name), theme, say)
        if source == "recorded":
            return self._recorded(theme, say)
        if source == ARTICLE:
            from app.analysis_paper import paper_cards, paper_facts

            notes = [say("article_note")]
            return _whole(say("source_article"), paper_facts(), notes, paper_cards(say), theme, say)
        title, results = self._results(kind, name, say)
        return _drawn(title, results, theme, say)

    def _results(self, kind: str, name: str, say: Say) -> tuple[str, Results]:
        if kind == "bundled":
            # By name: the times of files that came with the program are those of its checkout, and say nothing.
            paths = sorted(path for files in result_files(self._bundled).values() for path in files)
            if paths:
                return say("source_bundled"), self._cache.read(paths)
        elif kind == "file":
            paths = result_files(self._folder).get(name, [])
            if paths:
                return say("source_file", name=name), self._cache.read(paths)
        elif kind == "upload":
            with self._lock:
                found = self._uploads.get(name)
            if found is not None:
                return say("source_upload", name=found[0]), found[1]
        elif kind == "diagnosis":
            diagnosis = self._diagnosis(name)
            if diagnosis is not None:
                return say("source_diagnosis"), of_diagnosis(diagnosis)
        raise ResultsError(say("no_source"))

    def _run(self, info: SessionInfo, theme: Theme, say: Say) -> dict[str, Any]:
        name = info.title or text(say.lang, "replays.untitled")
        rows = self._sessions.events(info.id, 0, ("meta", "tok", "key", "route", "late"))
        return self._trace(rows, say("source_session", name=name), theme, say)

    def _recorded(self, theme: Theme, say: Say) -> dict[str, Any]:
        from app.trace_files import first_trace

        lines = (first_trace() or b"").splitlines()
        if not lines:
            raise ResultsError(say("no_source"))
        return self._trace(iter(lines), say("source_recorded"), theme, say)

    def _trace(self, rows: Iterable[bytes], title: str, theme: Theme, say: Say) -> dict[str, Any]:
        from app.analysis_trace import RunTrace
        from engine.trace import decode

        events = []
        for row in rows:
            events.append(decode(row))
            if len(events) >= MOST_EVENTS:
                break
        trace = RunTrace(events)
        return _whole(title, trace.facts(), trace.notes(say), trace.cards(say), theme, say)


def of_diagnosis(diagnosis: dict[str, Any]) -> Results:
    """A diagnosis that was made here, as if it had been read from a file."""
    results = Results()
    setup = diagnosis["setup"]
    results.diagnoses.append(("diagnosis", diagnosis))
    for key in ("model", "weights", "kv_dtype"):
        results.add_fact(key, setup.get(key))
    results.add_fact("prompts", f"{setup['prompt_tokens']} + {setup['steps']}")
    return results


def _drawn(title: str, results: Results, theme: Theme, say: Say) -> dict[str, Any]:
    from app.analysis_cards import result_cards
    from app.analysis_diagnosis import diagnosis_cards

    notes = [*results.problems, *(say("left_out", what=line) for line in results.left_out)]
    try:
        cards = result_cards(results, say)
        for stem, diagnosis in results.diagnoses:
            cards += diagnosis_cards(stem, diagnosis, say)
            notes += [say("differs", what=str(line)) for line in diagnosis.get("differs") or []]
            if not (diagnosis.get("series") or {}).get("agreement"):
                notes.append(say("no_qsa"))
        return _whole(title, results.facts, notes, cards, theme, say)
    except EngineError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        why = f"{type(error).__name__}: {error}"[:160]
        raise ResultsError(say("not_drawable", why=why)) from error


def _whole(
    title: str,
    facts: Sequence[tuple[str, str]],
    notes: Sequence[str],
    cards: Sequence[Card],
    theme: Theme,
    say: Say,
) -> dict[str, Any]:
    order = ("run", "quality", "article", "ablations", "diagnostics")
    placed = sorted(cards, key=lambda card: order.index(card.group))
    gathered: dict[str, list[str]] = {}
    for key, value in facts:
        gathered.setdefault(key, []).append(value)
    return {
        "title": title,
        "facts": [[say(f"fact_{key}"), "; ".join(values)] for key, values in gathered.items()],
        "notes": list(dict.fromkeys(notes)),
        "groups": {group: say(f"group_{group}") for group in order},
        "cards": [card.payload(theme, say) for card in placed],
    }
