"""The settings of a comparison: document, systems, mode, budget in a row, model and storage folded under it.

Lays out fields and says their words; starts nothing.
"""

from __future__ import annotations

from typing import Any

import gradio as gr

from app.compare_form import UNITS
from app.compare_lines import system_label
from app.compare_request import DEFAULT_SYSTEMS, MOST
from app.documents import DEFAULT_DOCUMENT, load_documents
from app.engine_import import import_engine
from app.forms import OWN_TEXT
from app.labels import Labels
from app.settings import Settings
from app.tabs.run_panel import DEVICES
from app.texts import DEFAULT, text
from engine.config import KV_DTYPES
from presets.loader import load_models


class CompareFields:
    """Builds the settings.

    Args:
        settings: the server's limits.
        labels: gets every component that shows words.

    `fields` are the inputs by the names that `CompareForm` reads.
    """

    def __init__(self, settings: Settings, labels: Labels) -> None:
        self._settings = settings
        self._labels = labels
        self.fields: dict[str, Any] = {}

    def build_row(self) -> None:
        """What is always needed, inside the current row."""
        self._build_reading()
        self._build_systems()
        self._build_amounts()

    def build_more(self) -> None:
        """Own text, and the fold with model and storage."""
        self._build_more()

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
                system_choices(DEFAULT, DEFAULT_SYSTEMS),
                value=list(DEFAULT_SYSTEMS),
                multiselect=True,
                max_choices=MOST,
                label=text(DEFAULT, "compare.systems"),
                elem_id="qe-cmp-systems",
                min_width=400,
                scale=6,
            ),
            lambda lang: {"choices": system_choices(lang, known_systems()), "label": text(lang, "compare.systems")},
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
                max_length=self._settings.max_prompt_chars,
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
            allowed = self._settings.allowed_models
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


_imported: list[str] = []


def known_systems(*, imported: bool = False) -> list[str]:
    """Names of all systems once the engine was asked for them, until then the first choice."""
    if imported and not _imported:
        import_engine()
        from engine.baselines import registry

        _imported.extend(info.name for info in registry.systems() if info.unavailable is None)
    return _imported or list(DEFAULT_SYSTEMS)


def system_choices(lang: str, names: list[str] | tuple[str, ...]) -> list[tuple[str, str]]:
    return [(system_label(name, lang), name) for name in names]
