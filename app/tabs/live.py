"""The Live tab: the side panel that asks for a run, and the board that shows it.

`Run` puts a run in the queue and returns at once; the board follows it by its own stream. What is polled here
is words only: status, notices, the result table. State belongs to one page: two pages never share a run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import gradio as gr

from app.forms import RunForm
from app.labels import Labels
from app.listeners import AT_ONCE, QUIET
from app.messages import error_html, hint_html, notice_sentences, notices_html, standing_sentence, status_html
from app.model_loading import load_sentences
from app.result_table import result_html
from app.run_watch import RunWatch
from app.tabs.run_panel import RunPanel
from app.texts import DEFAULT, text
from app.tier_view import TierView
from app.trace_files import first_trace
from engine.errors import EngineError
from engine.trace import RunMeta, decode
from presets.loader import load_presets

if TYPE_CHECKING:
    from app.context import AppContext

POLL_SECONDS = 0.5


class LiveTab:
    """Builds the tab and wires it.

    Args:
        context: sessions, runs and bus of this server.
        labels: gets every component that shows words.
        lang: state that holds the page's language.
    """

    def __init__(self, context: AppContext, labels: Labels, lang: gr.State) -> None:
        self._context = context
        self._lang = lang
        self._panel = RunPanel(context.settings, labels, keeps=context.runs.keeps_documents)
        self._stopping: set[str] = set()
        self.session = gr.State("")

    def build_panel(self) -> None:
        """The side panel."""
        self._panel.build()

    def build_main(self) -> None:
        """The board with its messages above and the result below."""
        self.banner = gr.HTML("", elem_classes="qe-banner", elem_id="qe-banner", padding=False)
        self.status = gr.HTML(status_html(self._idle(DEFAULT)), elem_id="qe-live-status", padding=False)
        self.board = TierView(elem_id="qe-live-board")
        self.result = gr.HTML("", elem_id="qe-result", padding=False)

    @property
    def wordy(self) -> list[Any]:
        """The outputs of `words`, in order."""
        return [self.status, self.result]

    @property
    def form(self) -> tuple[dict[str, Any], list[Any]]:
        """The run form's fields by name, and what shows a chosen document."""
        panel = self._panel
        return panel.fields, [panel.fields["own_text"], panel.fields["file"], panel.reader, panel.document_text]

    def words(self, lang: str, session: str) -> list[Any]:
        """Status line and result of the page's run in another language; without a run, what to do first."""
        if not session:
            return [status_html(self._idle(lang)), ""]
        context = self._context
        now = RunWatch(session, context.runs, context.bus, context.sessions).poll()
        result = result_html(now.summary, lang) if now.state == "ended" else ""
        return [status_html(standing_sentence(now, lang)), result]

    def first_board(self) -> dict[str, Any]:
        """What makes the board show the recorded run that comes with the product, or nothing where it is missing."""
        if recorded_model() is None:
            return {"mode": "idle", "sid": "", "base": "qe"}
        return {"mode": "replay", "sid": "", "base": "qe", "src": "qe/first"}

    def _idle(self, lang: str) -> str:
        model = recorded_model()
        return text(lang, "status.idle_plain") if model is None else text(lang, "status.idle", model=model)

    # wiring

    def wire(self) -> None:
        """Connects the panel; call once, inside the Blocks context, after both halves are built."""
        panel, fields = self._panel, self._panel.fields
        names = list(fields)
        words = [self.banner, self.status, self.result, panel.run, panel.stop]
        started = panel.run.click(
            self._start_with(names),
            [self._lang, *fields.values()],
            [self.board, self.session, *words],
            **AT_ONCE,
        )
        started.success(self._follow, [self.session, self._lang], words, **QUIET)
        panel.stop.click(self._stop, [self.session, self._lang], [self.status], **AT_ONCE)
        panel.wire(**AT_ONCE)
        panel.load.click(
            self._load, [fields["model"], fields["device"], self._lang], [panel.model_status, panel.load], **QUIET
        )

    def _start_with(self, names: list[str]) -> Callable[..., tuple[Any, ...]]:
        def start(lang: str, *values: Any) -> tuple[Any, ...]:
            form = RunForm(
                dict(zip(names, values, strict=True)),
                lang=lang,
                presets=load_presets(),
                settings=self._context.settings,
            )
            try:
                session = self._context.runs.start(form.request())
            except EngineError as error:
                # The board keeps what it shows; an empty session tells `_follow` that there is nothing to follow.
                return gr.skip(), "", error_html(str(error)), gr.skip(), gr.skip(), gr.skip(), gr.skip()
            return (
                self.board_value(session),
                session,
                "",
                status_html(text(lang, "status.starting")),
                "",
                gr.update(interactive=False),
                gr.update(interactive=True),
            )

        return start

    def board_value(self, session: str) -> dict[str, Any]:
        """What makes the board follow a session."""
        return {"mode": "live", "sid": session, "base": "qe"}

    async def _follow(self, session: str, lang: str) -> AsyncIterator[tuple[Any, ...]]:
        if not session:
            # Ending without a word would clear every output.
            yield tuple([gr.skip()] * 5)
            return
        context = self._context
        watch = RunWatch(session, context.runs, context.bus, context.sessions)
        said: tuple[str, str] | None = None
        while True:
            now = await asyncio.to_thread(watch.poll)
            banner = notices_html(notice_sentences(now.notices, lang))
            banner += error_html(now.trouble) if now.trouble else ""
            sentence = standing_sentence(now, lang, stopping=session in self._stopping)
            if now.state == "ended":
                self._stopping.discard(session)
                yield (
                    banner,
                    status_html(sentence),
                    result_html(now.summary, lang),
                    gr.update(interactive=True),
                    gr.update(interactive=False),
                )
                return
            if (banner, sentence) != said:
                said = (banner, sentence)
                yield banner, status_html(sentence), gr.skip(), gr.skip(), gr.skip()
            await asyncio.sleep(POLL_SECONDS)

    def _stop(self, session: str, lang: str) -> str:
        if session and self._context.runs.stop(session):
            self._stopping.add(session)
            return status_html(text(lang, "status.stopping"))
        return status_html(text(lang, "status.nothing_to_stop"))

    def _load(self, model: str | None, device: str, lang: str) -> Iterator[tuple[Any, Any]]:
        for sentence, bad, done in load_sentences(self._context.runs.models, str(model or ""), device, lang):
            html = error_html(sentence) if bad else hint_html(sentence)
            yield html, gr.update(interactive=done)


@cache
def recorded_model() -> str | None:
    """The model of the bundled recorded run; None where there is no such run."""
    data = first_trace()
    for line in (data or b"").splitlines()[:64]:
        event = decode(line)
        if isinstance(event, RunMeta):
            return event.model
    return None
