"""The Replays tab: all stored sessions in a table, one of them open on the board, and what can be done with it.

The board is the one of the Live tab, told to read a stored trace. Titles and model names come from people and are
escaped. Knows sessions; starts no run.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from html import escape
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import gradio as gr

from app.compare_lines import system_label
from app.labels import Labels
from app.listeners import AT_ONCE
from app.messages import error_html, hint_html, notice_sentences, notices_html
from app.page_link import LinkTarget
from app.result_table import format_share, result_html
from app.texts import DEFAULT, text
from app.tier_view import TierView
from app.trace_import import import_trace
from app.visitors import current_visitor
from engine.errors import EngineError

if TYPE_CHECKING:
    from app.context import AppContext
    from app.sessions import SessionInfo

EXPORTS = ("html", "gif", "csv", "jsonl")
"""What a session can be downloaded as."""

COLUMNS = ("title", "model", "policy", "budget", "tokens", "state", "created", "actions")

GONE = ["qe-gone"]
"""The class that takes a part off the screen."""

PICK_JS = """
element.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-sid]");
  if (button) trigger("select", { sid: button.dataset.sid });
});
"""
"""Fires `select` with a session's id when its button is pressed. No subclass: Gradio would write a stub file for it."""


class ReplaysTab:
    """Builds the tab and wires it.

    Args:
        context: sessions, runs and bus of this server.
        labels: gets every component that shows words.
        lang: state that holds the page's language.
    """

    def __init__(self, context: AppContext, labels: Labels, lang: gr.State) -> None:
        self._context = context
        self._labels = labels
        self._lang = lang
        self.linked = LinkTarget()

    def build(self) -> None:
        """Lays the tab out inside the current Blocks context."""

        def button(key: str, **options: Any) -> gr.Button:
            return self._labels.bind(gr.Button(text(DEFAULT, key), size="sm", **options), value=key)

        self.session = gr.State("")
        self.message = gr.HTML("", elem_classes="qe-banner", elem_id="qe-replay-message", padding=False)
        with gr.Column(elem_id="qe-list") as self.list_part:
            with gr.Row(elem_classes="qe-page-bar"):
                self._labels.bind_with(
                    gr.HTML(hint_html(text(DEFAULT, "replays.intro")), padding=False, elem_classes="qe-grow"),
                    lambda lang: {"value": hint_html(text(lang, "replays.intro"))},
                )
                self.bring = self._labels.bind(
                    gr.UploadButton(
                        text(DEFAULT, "replays.bring"),
                        size="sm",
                        file_types=[".html", ".jsonl"],
                        type="binary",
                        elem_classes="qe-small",
                        elem_id="qe-bring",
                    ),
                    label="replays.bring",
                )
                self.refresh = button("replays.refresh", elem_classes="qe-small")
            self.table = gr.HTML("", js_on_load=PICK_JS, padding=False, elem_id="qe-sessions")
        with gr.Column(elem_id="qe-opened", elem_classes=GONE) as self.open_part:
            with gr.Row(elem_classes="qe-page-bar"):
                self.back = button("replays.back", elem_classes="qe-small")
                self.heading = gr.HTML("", padding=False, elem_classes="qe-grow")
            self.board = TierView(elem_id="qe-replay-board")
            with gr.Row(elem_classes="qe-page-bar qe-edit"):
                # Its label is not left to `labels`: opening a session sets label and value in one update.
                self.title = gr.Textbox(
                    label=text(DEFAULT, "replays.title_label"), max_lines=1, max_length=200, scale=3, elem_id="qe-title"
                )
                self.rename = button("replays.rename", elem_classes="qe-small")
                self.delete = button("replays.delete", elem_classes="qe-small")
            with gr.Row(visible=False, elem_classes="qe-page-bar qe-confirm") as self.confirm:
                self.question = gr.HTML("", padding=False, elem_classes="qe-grow")
                self.really = button("replays.delete_yes", variant="stop", elem_classes="qe-small")
                self.keep = button("replays.delete_no", elem_classes="qe-small")
            self.links = gr.HTML("", padding=False)
            self.result = gr.HTML("", padding=False)

    def wire(self) -> None:
        """Connects the tab; call once, inside the Blocks context, after `build`."""
        lang, session = self._lang, self.session
        self.linked.component.select(self._open_linked, [lang], self.opening, **AT_ONCE)
        self.table.select(self._pick, [lang], self.opening, **AT_ONCE)
        self.bring.upload(self._bring, [self.bring, lang], self.opening, **AT_ONCE)
        self.refresh.click(self.table_html, [lang], [self.table], **AT_ONCE)
        self.back.click(self._close, [lang], [*self.parts, self.table, session, self.board, self.message], **AT_ONCE)
        self.rename.click(self._rename, [session, self.title, lang], [self.message, self.heading], **AT_ONCE)
        self.title.submit(self._rename, [session, self.title, lang], [self.message, self.heading], **AT_ONCE)
        self.delete.click(self._ask, [session, lang], [self.confirm, self.question], **AT_ONCE)
        self.keep.click(lambda: gr.update(visible=False), None, [self.confirm], **AT_ONCE)
        self.really.click(
            self._delete,
            [session, lang],
            [*self.parts, self.table, session, self.board, self.message, self.confirm],
            **AT_ONCE,
        )

    @property
    def parts(self) -> list[Any]:
        """The two halves of which one is shown."""
        return [self.list_part, self.open_part]

    @property
    def opening(self) -> list[Any]:
        """The outputs of `open_session`, in order."""
        return [
            *self.parts,
            self.session,
            self.board,
            self.heading,
            self.title,
            self.links,
            self.result,
            self.message,
            self.confirm,
        ]

    @property
    def wordy(self) -> list[Any]:
        """The outputs of `words`, in order."""
        return [self.heading, self.title, self.links, self.result]

    def words(self, lang: str, session: str) -> list[Any]:
        """What is said about the open session, in another language."""
        if not session:
            return [gr.skip()] * 4
        try:
            info = self._context.sessions.get(session)
        except EngineError:
            return [gr.skip()] * 4
        label = gr.update(label=text(lang, "replays.title_label"))
        return [self._heading(info, lang), label, links_html(session, lang), result_html(info.summary, lang)]

    def open_session(self, session: str, lang: str, event: int | None = None, row: int | None = None) -> list[Any]:
        """Updates for `opening`: the session on the board, at routing event `event` and board row `row`."""
        try:
            info = self._context.sessions.get(session)
        except EngineError:
            sentence = text(lang, "error.no_session", sid=session[:40])
            return [
                *_show(opened=False),
                "",
                *[gr.skip()] * 5,
                error_html(sentence),
                gr.update(visible=False),
            ]
        live = self._context.runs.status(session).state != "ended"
        value: dict[str, Any] = {"mode": "live" if live else "replay", "sid": session, "base": "qe"}
        if not live:
            value["src"] = f"qe/s/{quote(session, safe='')}/trace"
        for name, place in (("r", event), ("l", row)):
            if place is not None:
                value[name] = place
        return [
            *_show(opened=True),
            session,
            value,
            self._heading(info, lang),
            gr.update(value=info.title, label=text(lang, "replays.title_label")),
            links_html(session, lang),
            result_html(info.summary, lang),
            notices_html([text(lang, "replays.following")]) if live else self._notes(info, lang),
            gr.update(visible=False),
        ]

    def table_html(self, lang: str) -> str:
        """The list of sessions, newest first, as HTML."""
        try:
            found = self._context.listed()
        except EngineError as error:
            return error_html(str(error))
        return sessions_html(found, lang)

    def _open_linked(self, lang: str, event: gr.EventData) -> list[Any]:
        return self.open_session(str(event.sid), lang, event.event, event.row)

    def _pick(self, lang: str, event: gr.EventData) -> list[Any]:
        return self.open_session(str(event.sid), lang)

    def _bring(self, data: bytes | None, lang: str) -> list[Any]:
        """Opens the run in an exported file, as a session of its own."""
        visitor = current_visitor()
        try:
            session = import_trace(self._context.sessions, data or b"", "" if visitor is None else visitor.user)
        except EngineError as error:
            return [*_show(opened=False), "", *[gr.skip()] * 5, error_html(str(error)), gr.update(visible=False)]
        return self.open_session(session, lang)

    def _close(self, lang: str) -> list[Any]:
        return [*_show(opened=False), self.table_html(lang), "", None, ""]

    def _rename(self, session: str, title: str, lang: str) -> tuple[Any, Any]:
        if not title.strip():
            return error_html(text(lang, "replays.title_empty")), gr.skip()
        try:
            self._context.sessions.rename(session, title)
            info = self._context.sessions.get(session)
        except EngineError as error:
            return error_html(str(error)), gr.skip()
        return notices_html([text(lang, "replays.renamed", title=info.title)]), self._heading(info, lang)

    def _ask(self, session: str, lang: str) -> tuple[Any, Any]:
        try:
            title = self._context.sessions.get(session).title or text(lang, "replays.untitled")
        except EngineError as error:
            return gr.update(visible=False), error_html(str(error))
        return gr.update(visible=True), notices_html([text(lang, "replays.delete_ask", title=title)])

    def _delete(self, session: str, lang: str) -> list[Any]:
        try:
            title = self._context.sessions.get(session).title or text(lang, "replays.untitled")
            self._context.runs.stop(session)
            self._context.runs.wait(session, 5.0)
            self._context.sessions.delete(session)
        except EngineError as error:
            return [*[gr.skip()] * 5, error_html(str(error)), gr.update(visible=False)]
        done = notices_html([text(lang, "replays.deleted", title=title)])
        return [
            *_show(opened=False),
            self.table_html(lang),
            "",
            None,
            done,
            gr.update(visible=False),
        ]

    def _notes(self, info: SessionInfo, lang: str) -> str:
        """What is to be known of a stored run. Its own error is in its trace, and the board says it."""
        metas = [json.loads(body) for body in self._context.sessions.events(info.id, 0, ("meta",))]
        notices = [notice for meta in metas for notice in meta.get("notices", [])]
        return notices_html(notice_sentences(notices, lang)) + (error_html(info.damage) if info.damage else "")

    def _heading(self, info: SessionInfo, lang: str) -> str:
        title = info.title or text(lang, "replays.untitled")
        facts = " · ".join(filter(None, [info.model, _budget(info), _state(info, lang), _date(info.created)]))
        return f'<div class="qe-opened"><strong>{escape(title)}</strong> <span>{escape(facts)}</span></div>'


def _show(*, opened: bool) -> list[Any]:
    """Updates for `ReplaysTab.parts`. A class hides, since an unmounted board would lose what it is made of."""
    return [gr.update(elem_classes=GONE if hidden else []) for hidden in (opened, not opened)]


def sessions_html(found: list[SessionInfo], lang: str) -> str:
    """The table of sessions; a title is a button, and its link opens the same session elsewhere."""
    if not found:
        return notices_html([text(lang, "replays.none")])
    head = "".join(f'<th scope="col">{escape(text(lang, f"replays.column_{name}"))}</th>' for name in COLUMNS)
    body = "".join(_row(info, lang) for info in found)
    return (
        f'<div class="qe-scroll"><table class="qe-table qe-sessions"><caption>{escape(text(lang, "replays.table"))}'
        f"</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _row(info: SessionInfo, lang: str) -> str:
    title = escape(info.title or text(lang, "replays.untitled"))
    tokens = info.summary.get("num_tokens")
    cells = (info.model, system_label(info.policy, lang), _budget(info), "" if tokens is None else str(tokens))
    opens = escape(text(lang, "replays.open_named", title=info.title or text(lang, "replays.untitled")))
    return (
        f'<tr><th scope="row">{title}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        + f'<td><span class="qe-state qe-state-{escape(info.state)}">{escape(_state(info, lang))}</span></td>'
        + f"<td>{escape(_date(info.created))}</td>"
        + f'<td><button type="button" class="qe-open" data-sid="{escape(info.id)}" aria-label="{opens}">'
        + f"{escape(text(lang, 'replays.open_session'))}</button></td></tr>"
    )


def links_html(session: str, lang: str) -> str:
    """Links to the session's exports and to the session itself."""
    sid = quote(session, safe="")
    links = "".join(
        f'<a href="qe/s/{sid}/export.{kind}?lang={lang}" download>{escape(text(lang, f"replays.download_{kind}"))}</a>'
        for kind in EXPORTS
    )
    share = f'<a href="?s={sid}">{escape(text(lang, "replays.link"))}</a>'
    return f'<div class="qe-links"><strong>{escape(text(lang, "replays.download"))}</strong>{links}{share}</div>'


def _state(info: SessionInfo, lang: str) -> str:
    return text(lang, f"replays.state_{info.state}")


def _budget(info: SessionInfo) -> str:
    config = info.settings.get("config")
    share = config.get("kv_budget") if isinstance(config, dict) else None
    return format_share(share) if isinstance(share, (int, float)) else ""


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, tz=UTC).astimezone().strftime("%Y-%m-%d %H:%M")
