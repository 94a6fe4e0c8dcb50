"""How the page looks: Gradio theme, styles and head scripts, all from this server and with system fonts only.

Knows the palette and the asset files; knows no component.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from pathlib import Path
from typing import Any

import gradio as gr

from app.settings import ASSETS
from app.texts import LANGUAGES, text
from visuals.palette import css_variables
from visuals.replay import lean_script

SANS = (
    "system-ui",
    "-apple-system",
    "Segoe UI",
    "Roboto",
    "Noto Sans",
    "PingFang SC",
    "Microsoft YaHei",
    "Noto Sans CJK SC",
    "WenQuanYi Zen Hei",
    "sans-serif",
)
MONO = ("ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "DejaVu Sans Mono", "monospace")
HINTS = {
    "theme": "page.theme_hint",
    "projector": "page.projector_hint",
    "smaller": "page.smaller",
    "larger": "page.larger",
}
"""What the header's buttons say to a pointer that rests on them and to a screen reader, by button."""


def page_options() -> dict[str, Any]:
    """What `launch()` and `mount_gradio_app()` need for this page, besides where it is served."""
    return {"theme": theme(), "head": head(), "run_history": False, "footer_links": [], "ssr_mode": False}


def head() -> str:
    """Styles and the page's own script, inlined: nothing is fetched before the first paint."""
    colors = f":root {{\n{css_variables('light')}\n}}\nbody.dark {{\n{css_variables('dark')}\n}}\n"
    style = colors + "".join(
        _asset(f"css/{name}.css") for name in ("app", "compare", "lessons", "glossary", "analysis")
    )
    words = json.dumps({lang: {name: text(lang, key) for name, key in HINTS.items()} for lang in LANGUAGES})
    version = hashlib.sha256(_asset("js/glossary.js").encode()).hexdigest()[:12]
    script = f"window.qePageWords = {words};\nwindow.qeGlossarySource = 'qe/static/js/glossary.js?v={version}';\n"
    script += lean_script(_asset("js/page.js")) + lean_script(_asset("js/glossary_start.js"))
    return f"<style>\n{style}\n</style>\n<script>\n{script}\n</script>"


def theme() -> gr.themes.Base:
    """A plain, compact theme; its colours are the palette's variables, which change with `body.dark`."""
    colors = {
        "body_background_fill": "paper",
        "body_text_color": "ink",
        "body_text_color_subdued": "muted",
        "background_fill_primary": "paper",
        "background_fill_secondary": "panel",
        "border_color_primary": "line",
        "border_color_accent": "focus",
        "block_background_fill": "paper",
        "block_border_color": "line",
        "block_label_text_color": "ink",
        "block_title_text_color": "ink",
        "block_info_text_color": "muted",
        "input_background_fill": "paper",
        "input_border_color": "line",
        "input_placeholder_color": "muted",
        "color_accent": "focus",
        "color_accent_soft": "panel",
        "link_text_color": "focus",
        "slider_color": "focus",
        "checkbox_background_color_selected": "full",
        "checkbox_border_color_selected": "full",
        "checkbox_label_background_fill": "paper",
        "checkbox_label_background_fill_selected": "panel",
        "checkbox_label_text_color_selected": "ink",
        "checkbox_label_border_color": "line",
        "button_primary_background_fill": "focus",
        "button_primary_background_fill_hover": "full",
        "button_primary_text_color": "paper",
        "button_primary_border_color": "focus",
        "button_secondary_background_fill": "paper",
        "button_secondary_background_fill_hover": "panel",
        "button_secondary_text_color": "ink",
        "button_secondary_border_color": "line",
        "button_cancel_background_fill": "alarm",
        "button_cancel_text_color": "paper",
        "table_text_color": "ink",
    }
    values = {name: f"var(--qe-{color})" for name, color in colors.items()}
    known = inspect.signature(gr.themes.Base.set).parameters
    values |= {f"{name}_dark": value for name, value in values.items() if f"{name}_dark" in known}
    base = gr.themes.Base(
        primary_hue="blue",
        neutral_hue="slate",
        text_size="md",
        spacing_size="sm",
        radius_size="sm",
        font=list(SANS),
        font_mono=list(MONO),
    )
    return base.set(
        **values,
        block_label_text_weight="600",
        block_title_text_weight="600",
        block_shadow="none",
        button_primary_shadow="none",
        button_secondary_shadow="none",
        input_shadow="none",
        checkbox_label_shadow="none",
    )


def _asset(name: str) -> str:
    return (Path(ASSETS) / name).read_text(encoding="utf-8")
