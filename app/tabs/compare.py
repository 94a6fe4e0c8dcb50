"""The Compare tab: two to four systems on the same tokens, one above the other, and a table of what each one cost.

`Compare` puts a comparison in the server's queue and returns at once; what is polled is where it stands. The board
fetches the frames by itself. What is stored opens again in the same way. Knows the comparisons of this server;
measures nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import gradio as gr

from app.compare_form import CompareForm
from app.compare_lines import system_label
from app.compare_list import PICK_JS, links_html, recent_html
from app.compare_request import CompareRequest
from app.compare_table import comparison_html
from app.compare_view import NOTHING, CompareView
from app.forms import OWN_TEXT
from app.labels import Labels
from app.listeners import AT_ONCE, QUIET
from app.messages import STAGES, error_html, status_html
from app.page_link import LinkTarget
from app.tabs.compare_fields import CompareFields, known_systems, system_choices
from app.texts import DEFAULT, text
from engine.errors import ConfigError, EngineError
from presets.loader import load_presets

if TYPE_CHECKING:
    from app.compare_record import Outcome
    from app.compare_runs import CompareStanding
    from app.context import AppContext

POLL_SECONDS = 0.4
LISTED = 30
"""Comparisons in the list."""
MOST_PAGES = 4096
"""Pages of which it is remembered what they follow."""


class CompareTab:
    """Builds the tab and wires it.

    Args:
        context: comparisons and settings of this server.
        labels: gets every component that shows words.
        lang: state that holds the page's language.
    """

    def __init__(self, context: AppContext, labels: Labels, lang: gr.State) -> None:
        self._context = context
        self._labels = labels
        self._lang = lang
        self._settings = CompareFields(context.settings, labels)
        self._stopping: set[str] = set()
        self._turns: dict[str, object] = {}
        self.linked = LinkTarget()
        self._before: dict[str, str] = {}
        """The comparison that a matched one came from, which is shown again should the match be infeasible."""

    def build(self) -> None:
        """Lays the tab out inside the current Blocks context."""
        self.session = gr.State("")
        self.following = gr.State("")
        with gr.Row(elem_classes="qe-cmp-bar", elem_id="qe-cmp-bar"):
            self._settings.build_row()
            self.run = self._labels.bind(
                gr.Button(text(DEFAULT, "compare.start"), variant="primary", elem_id="qe-cmp-run"),
                value="compare.start",
            )
            self.stop = self._labels.bind(
                gr.Button(text(DEFAULT, "form.stop"), interactive=False, elem_id="qe-cmp-stop"), value="form.stop"
            )
        self._settings.build_more()
        self.banner = gr.HTML("", elem_classes="qe-banner", elem_id="qe-cmp-banner", padding=False)
        self.status = gr.HTML(status_html(text(DEFAULT, "compare.idle")), elem_id="qe-cmp-status", padding=False)
        self.board = CompareView()
        self.result = gr.HTML("", js_on_load=PICK_JS, elem_id="qe-cmp-result", padding=False)
        self.recent = gr.HTML("", js_on_load=PICK_JS, elem_id="qe-cmp-recent", padding=False)

    @property
    def fields(self) -> dict[str, Any]:
        """The inputs by the names that `CompareForm` reads."""
        return self._settings.fields

    @property
    def wordy(self) -> list[Any]:
        """The outputs of `words`, in order."""
        return [self.status, self.result, self.recent]

    def words(self, lang: str, session: str) -> list[Any]:
        """Status line, table and list of the page's comparison in another language."""
        recent = self._recent(lang, session)
        if not session:
            return [status_html(text(lang, "compare.idle")), "", recent]
        outcome = self._context.compares.outcome(session)
        table = "" if outcome is None else self._table(session, outcome, lang)
        return [status_html(self._sentence(session, lang)), table, recent]

    @property
    def showing(self) -> list[Any]:
        """The outputs of `show`, in order."""
        return [self.fields["systems"], self.recent]

    def show(self, lang: str, session: str, linked: dict[str, Any], listed: str | None) -> list[Any]:
        """What is read when the tab is shown: all systems, for which the engine is imported, and the list.

        Where a comparison is being opened, from a link or from the list that stands there, the list is left alone:
        what opens it marks it there, and the import takes so long that this would come later and take the mark away.
        """
        systems = gr.update(choices=system_choices(lang, known_systems(imported=True)))
        opening = not session and (linked.get("sid") or listed)
        return [systems, gr.skip() if opening else self._recent(lang, session)]

    # wiring

    def wire(self) -> None:
        """Connects the tab; call once, inside the Blocks context, after `build`."""
        names, fields = list(self.fields), list(self.fields.values())
        words = [self.banner, self.status, self.board, self.result, self.run, self.stop]
        begun = [self.session, self.following, *words]
        followed = [self.session, *words, self.recent]
        self.fields["document"].input(
            lambda name: gr.update(visible=name == OWN_TEXT),
            self.fields["document"],
            [self.fields["own_text"]],
            **AT_ONCE,
        )
        started = self.run.click(self._start_with(names), [self._lang, *fields], begun, **AT_ONCE)
        matched = self.result.select(self._match, [self.session, self._lang], begun, **AT_ONCE)
        # "multiple": else a press that comes while the one before is being answered would be lost without a word.
        picked = self.recent.select(
            self._pick, [self.session, self._lang], [*begun, self.recent], trigger_mode="multiple", **AT_ONCE
        )
        linked = self.linked.component.select(self._open_linked, None, [self.session, self.following], **AT_ONCE)
        for event in (started, matched, picked, linked):
            event.success(self._follow, [self.following, self._lang], followed, **QUIET)
        self.stop.click(self._stop, [self.session, self._lang], [self.status], **AT_ONCE)

    # starting and opening

    def _start_with(self, names: list[str]) -> Callable[..., tuple[Any, ...]]:
        def start(lang: str, *values: Any) -> tuple[Any, ...]:
            form = CompareForm(
                dict(zip(names, values, strict=True)),
                lang=lang,
                presets=load_presets(),
                settings=self._context.settings,
            )
            return self._begin(lang, form.comparison)

        return start

    def _match(self, event: gr.EventData, session: str, lang: str) -> tuple[Any, ...]:
        """The shown comparison once more, with QEvict at a quantizer's bytes, or at the budget again."""

        def again() -> CompareRequest:
            outcome = self._context.compares.outcome(session)
            if outcome is None:
                raise ConfigError(text(lang, "compare.gone"))
            return replace(outcome.request, match_to=str(event.name), lang=lang)

        return self._begin(lang, again, before=session)

    def _begin(self, lang: str, make: Callable[[], CompareRequest], before: str = "") -> tuple[Any, ...]:
        try:
            session = self._context.compares.start(make())
        except EngineError as error:
            # What was compared before stays, and there is nothing to follow.
            return gr.skip(), "", error_html(str(error)), *[gr.skip()] * 5
        if before:
            self._before[session] = before
        return (
            session,
            session,
            "",
            status_html(text(lang, "status.starting")),
            dict(NOTHING),
            "",
            gr.update(interactive=False),
            gr.update(interactive=True),
        )

    def _open_linked(self, event: gr.EventData) -> tuple[str, str]:
        """A link's comparison; `_follow` shows it, whether it goes on or has ended."""
        return str(event.sid), str(event.sid)

    def _pick(self, event: gr.EventData, session: str, lang: str) -> tuple[Any, ...]:
        """What a button of the list says: open, ask before deleting, delete, keep."""
        picked = str(event.name)
        kept: list[Any] = [gr.skip()] * 6
        if event.act == "open":
            return picked, picked, *kept, gr.skip()
        if event.act != "delete":
            return gr.skip(), "", *kept, self._recent(lang, session, picked if event.act == "ask" else "")
        try:
            self._delete(picked)
        except EngineError as error:
            return gr.skip(), "", error_html(str(error)), *kept[1:], self._recent(lang, session)
        said = status_html(text(lang, "compare.deleted"))
        if picked != session:
            return gr.skip(), "", "", *kept[1:], self._recent(lang, session)
        ready = gr.update(interactive=True), gr.update(interactive=False)
        return "", "", "", said, dict(NOTHING), "", *ready, self._recent(lang, "")

    def _delete(self, comparison: str) -> None:
        if self._context.compares.stop(comparison):
            self._context.runs.wait(comparison, 5.0)
        self._context.comparisons.delete(comparison)

    # following

    async def _follow(self, session: str, lang: str, request: gr.Request) -> AsyncIterator[tuple[Any, ...]]:
        kept: tuple[Any, ...] = tuple([gr.skip()] * 8)
        if not session:
            # Ending without a word would clear every output.
            yield kept
            return
        # Whoever opens another one on the same page is shown that one: only the page's last follower speaks.
        turn, page = object(), str(request.session_hash)
        self._turns[page] = turn
        while len(self._turns) > MOST_PAGES:
            self._turns.pop(next(iter(self._turns)))
        compares = self._context.compares
        said = ""
        while True:
            now = await asyncio.to_thread(compares.standing, session)
            if self._turns.get(page) is not turn:
                yield kept
                return
            if now.state == "ended":
                break
            sentence = self._standing_sentence(now, session, lang)
            if sentence != said:
                said = sentence
                going = gr.update(interactive=False), gr.update(interactive=True)
                yield gr.skip(), "", status_html(sentence), gr.skip(), gr.skip(), *going, gr.skip()
            await asyncio.sleep(POLL_SECONDS)
        self._turns.pop(page, None)
        self._stopping.discard(session)
        yield await asyncio.to_thread(self._ended, session, now, lang)

    def _ended(self, session: str, now: CompareStanding, lang: str) -> tuple[Any, ...]:
        """Updates for a comparison that has ended: its own board and table, or why there are none."""
        compares = self._context.compares
        outcome = compares.outcome(session)
        banner = error_html(now.error) if now.error else ""
        before = self._before.pop(session, "")
        if outcome is None and before:
            outcome, session = compares.outcome(before), before
        ready = gr.update(interactive=True), gr.update(interactive=False), self._recent(lang, session)
        if outcome is None:
            sentence = "" if now.error else self._missing(session, lang)
            return session, banner, status_html(sentence), dict(NOTHING), "", *ready
        table = self._table(session, outcome, lang)
        return session, banner, status_html(self._sentence(session, lang)), {"sid": session}, table, *ready

    def _table(self, session: str, outcome: Outcome, lang: str) -> str:
        return comparison_html(outcome, lang) + links_html(session, lang, kept=outcome.kept)

    def _recent(self, lang: str, session: str, asked: str = "") -> str:
        """The list; a store that can't be read says so."""
        try:
            found = self._context.listed_comparisons(LISTED)
        except EngineError as error:
            return error_html(str(error))
        return recent_html(found, lang, shown=session, asked=asked)

    def _missing(self, session: str, lang: str) -> str:
        """Why there is nothing to show of a comparison that has ended without an error."""
        try:
            state = self._context.comparisons.get(session).state
        except EngineError:
            return text(lang, "compare.gone")
        return text(lang, "compare.cut_off" if state == "interrupted" else "status.early_stop")

    def _sentence(self, session: str, lang: str) -> str:
        """Where a comparison stands, in one sentence."""
        outcome = self._context.compares.outcome(session)
        if outcome is None:
            now = self._context.compares.standing(session)
            if now.state == "ended":
                return now.error or self._missing(session, lang)
            return self._standing_sentence(now, session, lang)
        title = outcome.request.title
        said = [text(lang, "compare.about", title=title)] if title else []
        said.append(text(lang, f"compare.banner_{outcome.result.mode}"))
        if outcome.request.match_to:
            said.append(text(lang, "compare.matched", name=system_label(outcome.request.match_to, lang)))
        if outcome.result.stopped:
            said.append(text(lang, "compare.ended_stop", tokens=len(outcome.result.token_ids)))
        else:
            said.append(text(lang, "compare.ended", seconds=f"{outcome.result.seconds:.1f}"))
        if not outcome.kept:
            said.append(text(lang, "compare.not_kept"))
        return " ".join(said)

    def _standing_sentence(self, now: CompareStanding, session: str, lang: str) -> str:
        if session in self._stopping:
            return text(lang, "compare.stopping")
        if now.state == "queued":
            return text(lang, "compare.queued", position=now.ahead) if now.ahead else text(lang, "status.starting")
        if now.stage == "prefill":
            if not now.done:
                return text(lang, "compare.reading")
            return text(lang, "compare.reading_part", done=f"{now.done:,}", total=f"{now.total:,}")
        if now.stage in ("decode", "free"):
            key = "compare.running" if now.stage == "decode" else "compare.running_free"
            return text(lang, key, done=now.done, total=now.total)
        if now.stage in STAGES and now.total:
            return text(lang, "status.progress", stage=text(lang, STAGES[now.stage]), done=now.done, total=now.total)
        return text(lang, "status.stage_load" if now.state == "loading" else "compare.reading")

    def _stop(self, session: str, lang: str) -> str:
        try:
            stopped = bool(session) and self._context.compares.stop(session)
        except EngineError as error:
            return error_html(str(error))
        if stopped:
            self._stopping.add(session)
        return status_html(text(lang, "compare.stopping" if stopped else "compare.nothing_to_stop"))
