"""The Compare tab: two to four systems on the same tokens, one above the other, and a table of what each one cost.

`Compare` puts a comparison in the server's queue and returns at once; what is polled is where it stands. The board
fetches the frames by itself. Knows the comparisons of this server; measures nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Any

import gradio as gr

from app.compare_form import UNITS, CompareForm
from app.compare_lines import system_label
from app.compare_request import DEFAULT_SYSTEMS, MOST
from app.compare_table import comparison_html
from app.compare_view import NOTHING, CompareView
from app.documents import DEFAULT_DOCUMENT, load_documents
from app.forms import OWN_TEXT
from app.labels import Labels
from app.messages import STAGES, error_html, status_html
from app.tabs.run_panel import DEVICES
from app.texts import DEFAULT, text
from engine.config import KV_DTYPES
from engine.errors import EngineError
from presets.loader import load_models, load_presets

if TYPE_CHECKING:
    from app.compare_runs import CompareStanding
    from app.context import AppContext

POLL_SECONDS = 0.4
QUIET: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden", "concurrency_limit": None}
MATCH_JS = """
element.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-match]");
  if (button) trigger("select", { name: button.dataset.match });
});
"""
"""Fires `select` with a quantizer's name when its button is pressed; an empty name goes back to the budget."""


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
        self._stopping: set[str] = set()
        self.fields: dict[str, Any] = {}

    def build(self) -> None:
        """Lays the tab out inside the current Blocks context."""
        self.session = gr.State("")
        with gr.Row(elem_classes="qe-cmp-bar", elem_id="qe-cmp-bar"):
            self._build_reading()
            self._build_systems()
            self._build_amounts()
            self.run = self._labels.bind(
                gr.Button(text(DEFAULT, "compare.start"), variant="primary", elem_id="qe-cmp-run"),
                value="compare.start",
            )
            self.stop = self._labels.bind(
                gr.Button(text(DEFAULT, "form.stop"), interactive=False, elem_id="qe-cmp-stop"), value="form.stop"
            )
        self._build_more()
        self.banner = gr.HTML("", elem_classes="qe-banner", elem_id="qe-cmp-banner", padding=False)
        self.status = gr.HTML(status_html(text(DEFAULT, "compare.idle")), elem_id="qe-cmp-status", padding=False)
        self.board = CompareView()
        self.result = gr.HTML("", js_on_load=MATCH_JS, elem_id="qe-cmp-result", padding=False)

    @property
    def wordy(self) -> list[Any]:
        """The outputs of `words`, in order."""
        return [self.status, self.result]

    def words(self, lang: str, session: str) -> list[Any]:
        """Status line and table of the page's comparison in another language."""
        if not session:
            return [status_html(text(lang, "compare.idle")), ""]
        outcome = self._context.compares.outcome(session)
        table = "" if outcome is None else comparison_html(outcome, lang)
        return [status_html(self._sentence(session, lang)), table]

    # layout

    def _field(self, name: str, component: Any, key: str, **more: str) -> None:
        self.fields[name] = self._labels.bind(component, label=key, **more)

    def _build_reading(self) -> None:
        def choices(lang: str) -> list[tuple[str, str]]:
            listed = [(f"{doc.title(lang)} · {doc.tokens}", name) for name, doc in load_documents().items()]
            return [*listed, (text(lang, "form.own_text"), OWN_TEXT)]

        self.fields["document"] = self._labels.bind_with(
            gr.Dropdown(
                choices(DEFAULT),
                value=DEFAULT_DOCUMENT,
                label=text(DEFAULT, "form.document"),
                elem_id="qe-cmp-document",
                elem_classes="qe-cmp-document",
                min_width=130,
                scale=2,
            ),
            lambda lang: {"choices": choices(lang), "label": text(lang, "form.document")},
        )

    def _build_systems(self) -> None:
        self.fields["systems"] = self._labels.bind_with(
            gr.Dropdown(
                _system_choices(DEFAULT, DEFAULT_SYSTEMS),
                value=list(DEFAULT_SYSTEMS),
                multiselect=True,
                max_choices=MOST,
                label=text(DEFAULT, "compare.systems"),
                elem_id="qe-cmp-systems",
                min_width=400,
                scale=6,
            ),
            lambda lang: {"choices": _system_choices(lang, _known()), "label": text(lang, "compare.systems")},
        )

    def _build_amounts(self) -> None:
        def modes(lang: str) -> list[tuple[str, str]]:
            return [(text(lang, "compare.mode_teacher"), "teacher"), (text(lang, "compare.mode_free"), "free")]

        def units(lang: str) -> list[tuple[str, str]]:
            return [(text(lang, f"compare.unit_{unit}"), unit) for unit in UNITS]

        self.fields["mode"] = self._labels.bind_with(
            gr.Dropdown(
                modes(DEFAULT),
                value="teacher",
                label=text(DEFAULT, "compare.mode"),
                elem_id="qe-cmp-mode",
                min_width=130,
                scale=2,
            ),
            lambda lang: {"choices": modes(lang), "label": text(lang, "compare.mode")},
        )
        budget = gr.Number(20, label=text(DEFAULT, "compare.budget"), elem_id="qe-cmp-budget", min_width=64, scale=0)
        self._field("budget", budget, "compare.budget")
        self.fields["unit"] = self._labels.bind_with(
            gr.Dropdown(
                units(DEFAULT),
                value="share",
                label=text(DEFAULT, "compare.budget_unit"),
                elem_id="qe-cmp-unit",
                min_width=126,
                scale=0,
            ),
            lambda lang: {"choices": units(lang), "label": text(lang, "compare.budget_unit")},
        )
        tokens = gr.Number(
            64, precision=0, label=text(DEFAULT, "compare.new_tokens"), elem_id="qe-cmp-tokens", min_width=92, scale=0
        )
        self._field("new_tokens", tokens, "compare.new_tokens")

    def _build_more(self) -> None:
        self.fields["own_text"] = self._labels.bind(
            gr.Textbox(
                label=text(DEFAULT, "form.own_text_label"),
                placeholder=text(DEFAULT, "form.own_text_placeholder"),
                lines=4,
                max_lines=8,
                max_length=self._context.settings.max_prompt_chars,
                visible=False,
                elem_id="qe-cmp-own-text",
            ),
            label="form.own_text_label",
            placeholder="form.own_text_placeholder",
        )
        with (
            self._labels.bind(
                gr.Accordion(text(DEFAULT, "compare.more"), open=False, elem_classes="qe-fold", elem_id="qe-cmp-more"),
                label="compare.more",
            ),
            gr.Row(elem_classes="qe-cmp-bar"),
        ):
            allowed = self._context.settings.allowed_models
            names = [note.name for note in load_models() if allowed is None or note.name in allowed] or ["embedded"]
            model = gr.Dropdown(
                names,
                value=names[0],
                allow_custom_value=allowed is None,
                label=text(DEFAULT, "form.model"),
                elem_id="qe-cmp-model",
                min_width=240,
            )
            self._field("model", model, "form.model")
            device = gr.Dropdown(list(DEVICES), value="auto", label=text(DEFAULT, "form.device"), min_width=120)
            self._field("device", device, "form.device")
            kv_dtype = gr.Dropdown(
                list(KV_DTYPES),
                value="float16",
                label=text(DEFAULT, "compare.kv_dtype"),
                info=text(DEFAULT, "compare.kv_dtype_info"),
                min_width=220,
            )
            self._field("kv_dtype", kv_dtype, "compare.kv_dtype", info="compare.kv_dtype_info")
            ignore = gr.Checkbox(value=True, label=text(DEFAULT, "form.ignore_eos"), min_width=160)
            self._field("ignore_eos", ignore, "form.ignore_eos")

    # wiring

    def wire(self) -> None:
        """Connects the tab; call once, inside the Blocks context, after `build`."""
        names, fields = list(self.fields), list(self.fields.values())
        words = [self.banner, self.status, self.board, self.result, self.run, self.stop]
        given = [self._lang, *fields]
        self.fields["document"].input(
            lambda name: gr.update(visible=name == OWN_TEXT),
            self.fields["document"],
            [self.fields["own_text"]],
            **QUIET,
        )
        started = self.run.click(self._start_with(names), given, [self.session, *words], **QUIET)
        started.success(self._follow, [self.session, self._lang], words, **QUIET)
        again = self.result.select(self._match_with(names), given, [self.session, *words], **QUIET)
        again.success(self._follow, [self.session, self._lang], words, **QUIET)
        self.stop.click(self._stop, [self.session, self._lang], [self.status], **QUIET)

    def list_systems(self, lang: str) -> Any:
        """All systems as choices. The engine is imported for them, so they are asked for when the tab is shown."""
        return gr.update(choices=_system_choices(lang, _known(imported=True)))

    def _start_with(self, names: list[str]) -> Callable[..., tuple[Any, ...]]:
        def start(lang: str, *values: Any) -> tuple[Any, ...]:
            return self._begin(lang, dict(zip(names, values, strict=True)), "")

        return start

    def _match_with(self, names: list[str]) -> Callable[..., tuple[Any, ...]]:
        def match(event: gr.EventData, lang: str, *values: Any) -> tuple[Any, ...]:
            return self._begin(lang, dict(zip(names, values, strict=True)), str(event.name))

        return match

    def _begin(self, lang: str, values: Mapping[str, Any], match_to: str) -> tuple[Any, ...]:
        form = CompareForm(values, lang=lang, presets=load_presets(), settings=self._context.settings)
        try:
            session = self._context.compares.start(form.comparison(match_to))
        except EngineError as error:
            # What was compared before stays; an empty session tells `_follow` that there is nothing to follow.
            return "", error_html(str(error)), *[gr.skip()] * 5
        return (
            session,
            "",
            status_html(text(lang, "status.starting")),
            dict(NOTHING),
            "",
            gr.update(interactive=False),
            gr.update(interactive=True),
        )

    async def _follow(self, session: str, lang: str) -> AsyncIterator[tuple[Any, ...]]:
        if not session:
            # Ending without a word would clear every output.
            yield tuple([gr.skip()] * 6)
            return
        compares = self._context.compares
        said = ""
        while True:
            now = await asyncio.to_thread(compares.standing, session)
            if now.state == "ended":
                break
            sentence = self._standing_sentence(now, session, lang)
            if sentence != said:
                said = sentence
                yield gr.skip(), status_html(sentence), *[gr.skip()] * 4
            await asyncio.sleep(POLL_SECONDS)
        self._stopping.discard(session)
        outcome = compares.outcome(session)
        ready = gr.update(interactive=True), gr.update(interactive=False)
        if outcome is None:
            banner = error_html(now.error) if now.error else ""
            sentence = "" if now.error else text(lang, "status.early_stop")
            yield banner, status_html(sentence), dict(NOTHING), "", *ready
            return
        board = {"sid": session} if outcome.result.mode == "teacher" else dict(NOTHING)
        yield (
            "",
            status_html(self._sentence(session, lang)),
            board,
            comparison_html(outcome, lang),
            *ready,
        )

    def _sentence(self, session: str, lang: str) -> str:
        """Where a comparison stands, in one sentence."""
        outcome = self._context.compares.outcome(session)
        if outcome is None:
            now = self._context.compares.standing(session)
            if now.state == "ended":
                return now.error or text(lang, "compare.gone")
            return self._standing_sentence(now, session, lang)
        said = [text(lang, f"compare.banner_{outcome.result.mode}")]
        if outcome.request.match_to:
            said.append(text(lang, "compare.matched", name=system_label(outcome.request.match_to, lang)))
        if outcome.result.stopped:
            said.append(text(lang, "compare.ended_stop", tokens=len(outcome.result.token_ids)))
        else:
            said.append(text(lang, "compare.ended", seconds=f"{outcome.result.seconds:.1f}"))
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


_imported: list[str] = []


def _known(*, imported: bool = False) -> list[str]:
    """Names of all systems once the engine was asked for them, until then the first choice."""
    if imported and not _imported:
        from engine.baselines import registry

        _imported.extend(info.name for info in registry.systems() if info.unavailable is None)
    return _imported or list(DEFAULT_SYSTEMS)


def _system_choices(lang: str, names: list[str] | tuple[str, ...]) -> list[tuple[str, str]]:
    return [(system_label(name, lang), name) for name in names]
