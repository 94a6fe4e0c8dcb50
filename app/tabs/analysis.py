"""The Analysis tab: a source of figures, the figures, and a diagnosis of a text for those that need one.

Nothing of it is fetched or made before the tab is shown. Knows the sources and the server's diagnoses; measures
nothing and draws nothing itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gradio as gr

from app.analysis_runs import STAGES, DiagnosisRequest, DiagnosisStanding
from app.analysis_view import AnalysisView
from app.documents import DEFAULT_DOCUMENT, get_document, load_documents
from app.labels import Labels
from app.listeners import AT_ONCE, QUIET
from app.messages import error_html, hint_html, notices_html, status_html
from app.texts import DEFAULT, text
from engine.errors import EngineError
from presets.loader import load_preset

if TYPE_CHECKING:
    from app.context import AppContext

POLL_SECONDS = 0.5
TOKENS = (160, 2048)
"""Fewest and most tokens of a text that is diagnosed from the page."""
STEPS = 96
"""Tokens fed one by one: twelve windows of the default size."""


class AnalysisTab:
    """Builds the tab and wires it.

    Args:
        context: sources, diagnoses and sessions of this server.
        labels: gets every component that shows words.
        lang: state that holds the page's language.
    """

    def __init__(self, context: AppContext, labels: Labels, lang: gr.State) -> None:
        self._context = context
        self._labels = labels
        self._lang = lang
        self._stopping: set[str] = set()

    def build(self) -> None:
        """Lays the tab out inside the current Blocks context."""

        def button(key: str, **options: Any) -> Any:
            return self._labels.bind(gr.Button(text(DEFAULT, key), size="sm", **options), value=key)

        self.session = gr.State("")
        self.turn = gr.State(0)
        self.extra = gr.State(())
        self._labels.bind_with(
            gr.HTML(hint_html(text(DEFAULT, "analysis.intro")), padding=False),
            lambda lang: {"value": hint_html(text(lang, "analysis.intro"))},
        )
        with gr.Row(elem_classes="qe-ana-bar"):
            self.source = self._labels.bind(
                gr.Dropdown([], label=text(DEFAULT, "analysis.source"), elem_id="qe-ana-source", scale=4),
                label="analysis.source",
            )
            self.refresh = button("analysis.refresh", elem_id="qe-ana-refresh")
            self.file = self._labels.bind(
                gr.UploadButton(
                    text(DEFAULT, "analysis.upload"),
                    file_types=[".json", ".jsonl", ".gz"],
                    size="sm",
                    elem_id="qe-ana-file",
                ),
                label="analysis.upload",
            )
        self.banner = gr.HTML("", elem_classes="qe-banner", elem_id="qe-ana-banner", padding=False)
        self._build_diagnosis(button)
        self.board = AnalysisView()

    def _build_diagnosis(self, button: Any) -> None:
        def choices(lang: str) -> list[tuple[str, str]]:
            return [(f"{doc.title(lang)} · {doc.tokens}", name) for name, doc in load_documents().items()]

        with self._labels.bind(
            gr.Accordion(text(DEFAULT, "analysis.diagnose"), open=False, elem_id="qe-ana-diagnose"),
            label="analysis.diagnose",
        ):
            self._labels.bind_with(
                gr.HTML(hint_html(text(DEFAULT, "analysis.diagnose_info")), padding=False),
                lambda lang: {"value": hint_html(text(lang, "analysis.diagnose_info"))},
            )
            with gr.Row(elem_classes="qe-ana-bar"):
                self.document = self._labels.bind_with(
                    gr.Dropdown(
                        choices(DEFAULT),
                        value=DEFAULT_DOCUMENT,
                        label=text(DEFAULT, "form.document"),
                        elem_id="qe-ana-document",
                        min_width=260,
                    ),
                    lambda lang: {"choices": choices(lang), "label": text(lang, "form.document")},
                )
                self.tokens = self._labels.bind(
                    gr.Number(
                        512,
                        precision=0,
                        label=text(DEFAULT, "analysis.diagnose_tokens"),
                        elem_id="qe-ana-tokens",
                        min_width=130,
                        scale=0,
                    ),
                    label="analysis.diagnose_tokens",
                )
                self.budget = self._labels.bind(
                    gr.Number(
                        20,
                        label=text(DEFAULT, "analysis.diagnose_budget"),
                        elem_id="qe-ana-budget",
                        min_width=130,
                        scale=0,
                    ),
                    label="analysis.diagnose_budget",
                )
                self.run = button("analysis.diagnose_start", variant="primary", elem_id="qe-ana-run")
                self.stop = button("form.stop", interactive=False, elem_id="qe-ana-stop")
            self.status = self._labels.bind_with(
                gr.HTML(status_html(text(DEFAULT, "analysis.diagnose_idle")), elem_id="qe-ana-status", padding=False),
                lambda lang: {"value": status_html(text(lang, "analysis.diagnose_idle"))},
            )

    def wire(self, tab: gr.Tab) -> None:
        """Connects the tab; call once, inside the Blocks context, after `build`."""
        lang, extra = self._lang, self.extra
        showing = [self.source, self.board, self.banner]
        tab.select(self._arrive, [self.source, extra, lang], showing, **AT_ONCE)
        self.source.input(
            lambda source: ({"source": source or ""}, ""), [self.source], [self.board, self.banner], **AT_ONCE
        )
        self.refresh.click(
            self._again, [self.source, extra, self.turn, lang], [self.source, self.board, self.turn], **AT_ONCE
        )
        self.file.upload(
            self._upload, [self.file, extra, lang], [self.source, self.board, self.banner, extra], **AT_ONCE
        )
        started = self.run.click(
            self._begin,
            [self.document, self.tokens, self.budget, lang],
            [self.session, self.banner, self.status, self.run, self.stop],
            **AT_ONCE,
        )
        started.success(
            self._follow,
            [self.session, extra, lang],
            [self.banner, self.status, self.source, self.board, extra, self.run, self.stop],
            **QUIET,
        )
        self.stop.click(self._stop, [self.session, lang], [self.status], **AT_ONCE)

    def wire_language(self, switched: Any) -> None:
        """Tells sources and notices again after `switched`, the event that changes the page's language."""
        switched.then(self._retell, [self.source, self.extra, self._lang], [self.source, self.banner], **AT_ONCE)

    def _retell(self, source: str | None, extra: Any, lang: str) -> list[Any]:
        """Sources and notices in another language; the figures follow the page's language by themselves."""
        if not source:
            return [gr.skip(), gr.skip()]
        update = gr.update(choices=self._choices(extra, lang), value=source)
        return [update, notices_html(self._context.analysis.notices(lang))]

    # what there is

    def _choices(self, extra: Any, lang: str) -> list[tuple[str, str]]:
        try:
            listed = self._context.listed()
        except EngineError:
            listed = []
        return [*map(tuple, extra or ()), *self._context.analysis.choices(listed, lang)]

    def _arrive(self, source: str | None, extra: Any, lang: str) -> list[Any]:
        choices = self._choices(extra, lang)
        known = {value for _, value in choices}
        chosen = source if source in known else self._context.analysis.default()
        notices = notices_html(self._context.analysis.notices(lang))
        return [gr.update(choices=choices, value=chosen), {"source": chosen}, notices]

    def _again(self, source: str | None, extra: Any, turn: int, lang: str) -> list[Any]:
        update = gr.update(choices=self._choices(extra, lang), value=source)
        return [update, {"source": source or "", "turn": turn + 1}, turn + 1]

    def _upload(self, path: str | None, extra: Any, lang: str) -> list[Any]:
        if not path:
            return [gr.skip()] * 4
        file = Path(str(path))
        try:
            source = self._context.analysis.upload(file, file.name, lang)
        except EngineError as error:
            return [gr.skip(), gr.skip(), error_html(str(error)), gr.skip()]
        except OSError as error:
            return [gr.skip(), gr.skip(), error_html(str(error.strerror or error)), gr.skip()]
        return [*self._added((text(lang, "analysis.source_upload", name=file.name[:120]), source), extra, lang)]

    def _added(self, choice: tuple[str, str], extra: Any, lang: str) -> list[Any]:
        """Updates for source, board, banner and extra that show a source which is this visitor's alone."""
        more = ((choice), *(tuple(entry) for entry in extra or ()))[:8]
        return [gr.update(choices=self._choices(more, lang), value=choice[1]), {"source": choice[1]}, "", more]

    # diagnosing

    def _begin(self, document: str, tokens: Any, budget: Any, lang: str) -> list[Any]:
        try:
            session = self._context.diagnoses.start(self._request(document, tokens, budget, lang))
        except EngineError as error:
            return ["", error_html(str(error)), gr.skip(), gr.skip(), gr.skip()]
        sentence = status_html(text(lang, "status.starting"))
        return [session, "", sentence, gr.update(interactive=False), gr.update(interactive=True)]

    def _request(self, document: str, tokens: Any, budget: Any, lang: str) -> DiagnosisRequest:
        """What the form asks for.

        Raises:
            FormError: a number is missing or out of range. DocumentError: no such document.
        """
        from app.forms import FormError

        low, high = TOKENS
        if not isinstance(tokens, (int, float)) or tokens != int(tokens) or not low <= tokens <= high:
            raise FormError(text(lang, "analysis.diagnose_tokens_range", low=low, high=high))
        if not isinstance(budget, (int, float)) or not 1 <= budget <= 100:
            raise FormError(text(lang, "analysis.diagnose_budget_range"))
        chosen = get_document(document)
        config = load_preset("paper-20").config.replace(kv_budget=budget / 100, kv_budget_bytes=None)
        allowed = self._context.settings.allowed_models
        model = "embedded" if allowed is None or "embedded" in allowed or not allowed else allowed[0]
        return DiagnosisRequest(chosen.text, chosen.title(lang), config, int(tokens), STEPS, model, lang)

    async def _follow(self, session: str, extra: Any, lang: str) -> AsyncIterator[list[Any]]:
        if not session:
            yield [gr.skip()] * 7
            return
        diagnoses = self._context.diagnoses
        said = ""
        while True:
            now = await asyncio.to_thread(diagnoses.standing, session)
            if now.state == "ended":
                break
            sentence = self._sentence(now, session, lang)
            if sentence != said:
                said = sentence
                yield [gr.skip(), status_html(sentence), *[gr.skip()] * 5]
            await asyncio.sleep(POLL_SECONDS)
        self._stopping.discard(session)
        ready = [gr.update(interactive=True), gr.update(interactive=False)]
        if diagnoses.found(session) is None:
            banner = error_html(now.error) if now.error else gr.skip()
            sentence = "" if now.error else text(lang, "analysis.diagnose_stopped")
            yield [banner, status_html(sentence), gr.skip(), gr.skip(), gr.skip(), *ready]
            return
        choice = (text(lang, "analysis.source_diagnosis"), f"diagnosis:{session}")
        source, board, banner, more = self._added(choice, extra, lang)
        yield [banner, status_html(text(lang, "analysis.diagnose_done")), source, board, more, *ready]

    def _sentence(self, now: DiagnosisStanding, session: str, lang: str) -> str:
        if session in self._stopping:
            return text(lang, "analysis.diagnose_stopping")
        if now.state == "queued":
            if now.ahead:
                return text(lang, "analysis.diagnose_queued", position=now.ahead)
            return text(lang, "status.starting")
        if now.stage in STAGES:
            return text(lang, f"analysis.diagnose_{now.stage}", done=now.done, total=now.total)
        return text(lang, "status.stage_load")

    def _stop(self, session: str, lang: str) -> str:
        try:
            stopped = bool(session) and self._context.diagnoses.stop(session)
        except EngineError as error:
            return error_html(str(error))
        if stopped:
            self._stopping.add(session)
        return status_html(text(lang, "analysis.diagnose_stopping" if stopped else "analysis.diagnose_idle"))
