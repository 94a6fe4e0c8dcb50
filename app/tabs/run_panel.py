"""The side panel of the Live tab: every setting of a run, the essentials in sight, the rest folded.

Lays out fields and fills them from documents and presets; starts nothing.
"""

from __future__ import annotations

from html import escape
from typing import Any

import gradio as gr

from app.documents import DEFAULT_DOCUMENT, load_documents
from app.forms import FILE_LIMIT_KB, OWN_FILE, OWN_TEXT, WINDOW_SIZES
from app.labels import Labels
from app.messages import hint_html
from app.settings import Settings
from app.texts import DEFAULT, text
from engine.config import BACKENDS
from presets.loader import DEFAULT as DEFAULT_PRESET
from presets.loader import load_models, load_presets

DEVICES = ("auto", "cpu", "cuda", "mps")
PRESET_FIELDS = (
    "kv_budget",
    "quant_share",
    "bits",
    "window_size",
    "sink_tokens",
    "local_tokens",
    "promotion",
    "backend",
)
"""The fields that choosing a preset fills in, by their names in `QEvictConfig`."""
QUESTION_CHARS = 500
SWITCH_REFERENCE = """(question, on) => {
  const asks = !!question.trim();
  const page = window.qePage;
  if (asks === !!page.asks) return on;
  page.asks = asks;
  if (!asks) return on || page.measured;
  page.measured = on;
  return false;
}"""
"""A question's first letter switches the reference off, since it would read a kept document again; without a
question it is as it was before. Whoever switches it on in between keeps it."""
PRESS_RUN = "() => document.getElementById('qe-run').click()"
"""Return in the question does what the button does, which may be switched off."""


class RunPanel:
    """Builds the panel.

    Args:
        settings: the server's limits.
        labels: gets every component that shows words.
        keeps: whether documents are kept here for the next question.

    `fields` are the inputs by the names that `RunForm` reads.
    """

    def __init__(self, settings: Settings, labels: Labels, *, keeps: bool) -> None:
        self._settings = settings
        self._keeps = keeps
        self._labels = labels
        self.fields: dict[str, Any] = {}

    def build(self) -> None:
        """The side panel: what is always needed first, the rest folded."""
        with gr.Sidebar(width=300, elem_id="qe-panel"):
            self._labels.bind_with(
                gr.HTML(_panel_heading(DEFAULT), padding=False), lambda lang: {"value": _panel_heading(lang)}
            )
            self._build_document()
            self._build_question()
            self._build_essentials()
            with gr.Row(elem_classes="qe-actions"):
                self.run = self._labels.bind(
                    gr.Button(text(DEFAULT, "form.run"), variant="primary", elem_classes="qe-run", elem_id="qe-run"),
                    value="form.run",
                )
                self.stop = self._labels.bind(
                    gr.Button(text(DEFAULT, "form.stop"), interactive=False, elem_classes="qe-stop", elem_id="qe-stop"),
                    value="form.stop",
                )
            self._build_cache()
            self._build_generation()
            self._build_model()

    def wire(self, **quiet: Any) -> None:
        """Connects document and preset with the fields that follow them; `quiet` goes to every listener."""
        fields = self.fields
        fields["document"].input(
            show_document,
            fields["document"],
            [fields["own_text"], fields["file"], self.reader, self.document_text],
            **quiet,
        )
        if self._keeps:
            asking = [fields["question"], fields["reference"]]
            fields["question"].change(None, asking, fields["reference"], js=SWITCH_REFERENCE, **quiet)
        fields["question"].submit(None, None, None, js=PRESS_RUN, **quiet)
        fields["preset"].input(fill_preset, fields["preset"], [fields[name] for name in PRESET_FIELDS], **quiet)

    def _field(self, name: str, component: Any, *, info: bool = False) -> Any:
        keys = {"label": f"form.{name}"} | ({"info": f"form.{name}_info"} if info else {})
        self.fields[name] = self._labels.bind(component, **keys)
        return component

    def _build_document(self) -> None:
        def choices(lang: str) -> list[tuple[str, str]]:
            listed = [
                (f"{document.title(lang)} · {document.tokens}", name) for name, document in load_documents().items()
            ]
            own = [(text(lang, "form.own_text"), OWN_TEXT), (text(lang, "form.own_file"), OWN_FILE)]
            return [*listed, *own]

        self.fields["document"] = self._labels.bind_with(
            gr.Dropdown(
                choices(DEFAULT),
                value=DEFAULT_DOCUMENT,
                label=text(DEFAULT, "form.document"),
                elem_classes="qe-field",
                elem_id="qe-document",
            ),
            lambda lang: {"choices": choices(lang), "label": text(lang, "form.document")},
        )
        self.fields["own_text"] = self._labels.bind(
            gr.Textbox(
                label=text(DEFAULT, "form.own_text_label"),
                placeholder=text(DEFAULT, "form.own_text_live_placeholder"),
                lines=6,
                max_lines=10,
                max_length=self._settings.max_prompt_chars,
                visible=False,
                elem_classes="qe-field",
                elem_id="qe-own-text",
            ),
            label="form.own_text_label",
            placeholder="form.own_text_live_placeholder",
        )
        self.fields["file"] = self._labels.bind_with(
            gr.File(
                label=text(DEFAULT, "form.file_label", limit=FILE_LIMIT_KB),
                file_types=["text", ".md", ".txt", ".log", ".csv"],
                type="filepath",
                height=110,
                visible=False,
                elem_classes="qe-field",
                elem_id="qe-own-file",
            ),
            lambda lang: {"label": text(lang, "form.file_label", limit=FILE_LIMIT_KB)},
        )
        with self._labels.bind(
            gr.Accordion(text(DEFAULT, "form.view_text"), open=False, elem_classes="qe-fold", elem_id="qe-read"),
            label="form.view_text",
        ) as self.reader:
            self.document_text = gr.HTML(_document_html(DEFAULT_DOCUMENT), padding=False)

    def _build_question(self) -> None:
        """The question is a field of its own, so that the document before it is the same in the next run."""
        self.fields["question"] = self._labels.bind(
            gr.Textbox(
                label=text(DEFAULT, "form.question"),
                placeholder=text(DEFAULT, "form.question_placeholder"),
                lines=1,
                max_lines=1,
                max_length=min(QUESTION_CHARS, self._settings.max_prompt_chars),
                elem_classes="qe-field",
                elem_id="qe-question",
            ),
            label="form.question",
            placeholder="form.question_placeholder",
        )
        key = "form.question_kept" if self._keeps else "form.question_not_kept"
        self._labels.bind_with(
            gr.HTML(hint_html(text(DEFAULT, key)), padding=False, elem_id="qe-question-hint"),
            lambda lang: {"value": hint_html(text(lang, key))},
        )

    def _build_essentials(self) -> None:
        presets = load_presets()

        def choices(lang: str) -> list[tuple[str, str]]:
            return [(getattr(preset, f"title_{lang}"), name) for name, preset in presets.items()]

        self.fields["preset"] = self._labels.bind_with(
            gr.Dropdown(
                choices(DEFAULT),
                value=DEFAULT_PRESET,
                label=text(DEFAULT, "form.preset"),
                elem_classes="qe-field",
                elem_id="qe-preset",
            ),
            lambda lang: {"choices": choices(lang), "label": text(lang, "form.preset")},
        )
        config = presets[DEFAULT_PRESET].config
        for name, low, value in (("kv_budget", 0.02, config.kv_budget), ("quant_share", 0.0, config.quant_share)):
            slider = gr.Slider(
                low,
                1.0,
                value=value,
                step=0.01,
                label=text(DEFAULT, f"form.{name}"),
                info=text(DEFAULT, f"form.{name}_info"),
                elem_classes="qe-field",
                elem_id=f"qe-{name}",
            )
            self._field(name, slider, info=True)

    def _build_cache(self) -> None:
        config = load_presets()[DEFAULT_PRESET].config
        with self._fold("form.group_cache"):
            self._field(
                "bits",
                gr.Radio([("INT2", 2), ("INT4", 4)], value=config.bits, label=text(DEFAULT, "form.bits")),
            )
            with gr.Row():
                self._field(
                    "window_size",
                    gr.Dropdown(
                        list(WINDOW_SIZES),
                        value=config.window_size,
                        label=text(DEFAULT, "form.window_size"),
                        min_width=80,
                    ),
                )
                self._field(
                    "sink_tokens",
                    gr.Number(
                        config.sink_tokens,
                        precision=None,
                        label=text(DEFAULT, "form.sink_tokens"),
                        min_width=80,
                    ),
                )
            self._field(
                "local_tokens",
                gr.Textbox(
                    "",
                    label=text(DEFAULT, "form.local_tokens"),
                    info=text(DEFAULT, "form.local_tokens_info"),
                    max_lines=1,
                ),
                info=True,
            )
            self._field("promotion", gr.Checkbox(config.promotion, label=text(DEFAULT, "form.promotion")))
            self._field(
                "backend",
                gr.Dropdown(list(BACKENDS), value=config.backend, label=text(DEFAULT, "form.backend")),
            )

    def _build_generation(self) -> None:
        with self._fold("form.group_generation"):
            with gr.Row():
                most = self._settings.max_new_tokens
                self._field(
                    "new_tokens",
                    gr.Number(
                        min(200, most), label=text(DEFAULT, "form.new_tokens"), min_width=80, elem_id="qe-new-tokens"
                    ),
                )
                self._field("seed", gr.Number(0, label=text(DEFAULT, "form.seed"), min_width=80))
            self._field(
                "temperature",
                gr.Slider(
                    0.0,
                    2.0,
                    value=0.0,
                    step=0.05,
                    label=text(DEFAULT, "form.temperature"),
                    info=text(DEFAULT, "form.temperature_info"),
                ),
                info=True,
            )
            self._field("reference", gr.Checkbox(True, label=text(DEFAULT, "form.reference")))
            self._field("ignore_eos", gr.Checkbox(False, label=text(DEFAULT, "form.ignore_eos")))

    def _build_model(self) -> None:
        allowed = self._settings.allowed_models
        names = [note.name for note in load_models() if allowed is None or note.name in allowed] or ["embedded"]
        with self._fold("form.group_model"):
            self._field(
                "model",
                gr.Dropdown(
                    names,
                    value=names[0],
                    allow_custom_value=allowed is None,
                    label=text(DEFAULT, "form.model"),
                    info=text(DEFAULT, "form.model_info"),
                    elem_id="qe-model",
                ),
                info=True,
            )

            def devices(lang: str) -> list[tuple[str, str]]:
                return [(text(lang, "form.device_auto") if name == "auto" else name, name) for name in DEVICES]

            self.fields["device"] = self._labels.bind_with(
                gr.Dropdown(devices(DEFAULT), value="auto", label=text(DEFAULT, "form.device")),
                lambda lang: {"choices": devices(lang), "label": text(lang, "form.device")},
            )
            self.load = self._labels.bind(
                gr.Button(text(DEFAULT, "form.load"), size="sm", elem_classes="qe-small", elem_id="qe-load"),
                value="form.load",
            )
            self.model_status = self._labels.bind_with(
                gr.HTML(hint_html(text(DEFAULT, "model.embedded")), padding=False, elem_id="qe-model-status"),
                lambda lang: {"value": hint_html(text(lang, "model.embedded"))},
            )

    def _fold(self, key: str) -> gr.Accordion:
        return self._labels.bind(gr.Accordion(text(DEFAULT, key), open=False, elem_classes="qe-fold"), label=key)


def _panel_heading(lang: str) -> str:
    return f'<h2 class="qe-panel-heading">{escape(text(lang, "page.settings"))}</h2>'


def _document_html(name: str) -> str:
    return f'<div class="qe-document" tabindex="0">{escape(load_documents()[name].text)}</div>'


def show_document(name: str) -> tuple[Any, ...]:
    """Updates for own text, file, reader and its text, when document `name` was chosen."""
    listed = name in load_documents()
    return (
        gr.update(visible=name == OWN_TEXT),
        gr.update(visible=name == OWN_FILE),
        gr.update(visible=listed),
        _document_html(name) if listed else gr.skip(),
    )


def fill_preset(name: str) -> list[Any]:
    """Values for `PRESET_FIELDS` as preset `name` has them; an automatic value is an empty field."""
    config = load_presets()[name].config
    values = [getattr(config, field) for field in PRESET_FIELDS]
    return ["" if value is None else value for value in values]
