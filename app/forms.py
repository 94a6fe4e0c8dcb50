"""The run form: what the side panel holds, checked, and made into what a run needs.

Every refusal is one sentence in the reader's language; rules that the engine knows are left to the engine.
Knows no components: values come as a plain mapping.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.documents import get_document, load_documents
from app.run_request import RunRequest
from app.settings import Settings
from app.texts import text
from engine.config import QEvictConfig
from engine.errors import EngineError
from presets.loader import Preset

OWN_TEXT = "own:text"
OWN_FILE = "own:file"
FILE_LIMIT_KB = 256
WINDOW_SIZES = (1, 2, 4, 8, 16, 32, 64)
MAX_SEED = 2**31 - 1
TITLE_CHARS = 80
"""Of a question, in a run's title."""


class FormError(EngineError, ValueError):
    """A field can't be used; the text is in the reader's language."""


class RunForm:
    """The side panel's values, by field name, read in one language.

    Args:
        values: field name to what the component gave; text, numbers and None all occur.
        lang: language of the sentences in errors.
        presets: all presets by name.
        settings: what the server allows.
    """

    def __init__(
        self, values: Mapping[str, Any], *, lang: str, presets: Mapping[str, Preset], settings: Settings
    ) -> None:
        self._values = values
        self._lang = lang
        self._presets = presets
        self._settings = settings

    def request(self) -> RunRequest:
        """The run that the form asks for.

        Raises:
            FormError: a field is empty, not a number, or out of range.
            ConfigError: the engine refuses the settings together.
        """
        prompt, title = self.prompt()
        question, document = self.question(), ""
        if question:
            prompt, document, title = question, self._document(prompt), _asked(question, title)
            if len(prompt) + len(document) > self._settings.max_prompt_chars:
                raise self._error("question_too_long", limit=self._settings.max_prompt_chars)
        return RunRequest(
            prompt=prompt,
            document=document,
            config=self.config(),
            options=self.options(),
            model=self.model(),
            device=str(self._values.get("device") or "auto"),
            title=title,
            preset=str(self._values.get("preset") or ""),
            raise_budget=True,
            lang=self._lang,
        )

    def prompt(self) -> tuple[str, str]:
        """(prompt, title) from the chosen document, the own text or the uploaded file."""
        source = str(self._values.get("document") or OWN_TEXT)
        if source == OWN_FILE:
            prompt, title = self._file()
        elif source == OWN_TEXT:
            prompt = str(self._values.get("own_text") or "")
            title = " ".join(prompt.split())[:60]
        else:
            document = get_document(source)
            prompt, title = document.text, document.title(self._lang)
        if not prompt.strip():
            raise self._error("prompt_empty")
        if len(prompt) > self._settings.max_prompt_chars:
            raise self._error("prompt_too_long", limit=self._settings.max_prompt_chars)
        return prompt, title

    def question(self) -> str:
        """What is asked about the text, in one line; empty where the text is the whole prompt."""
        return " ".join(str(self._values.get("question") or "").split())

    def config(self) -> QEvictConfig:
        """The preset's settings with the form's own laid over them."""
        name = str(self._values.get("preset") or "")
        if name not in self._presets:
            raise self._error("unknown_preset", name=name[:60])
        window = self._choice("window_size", WINDOW_SIZES)
        return self._presets[name].config.replace(
            kv_budget=self._number("kv_budget", 0.001, 1.0),
            quant_share=self._number("quant_share", 0.0, 1.0),
            bits=self._choice("bits", (2, 4)),
            window_size=window,
            routing_interval=None,
            sink_tokens=self._whole("sink_tokens", 0, 1024),
            local_tokens=self._local(window),
            promotion=bool(self._values.get("promotion")),
            backend=str(self._values.get("backend") or "auto"),
            planned_new_tokens=self._whole("new_tokens", 1, self._settings.max_new_tokens),
        )

    def options(self) -> dict[str, Any]:
        """How the run generates, by the names that `RunRequest.options` takes."""
        return {
            "max_new_tokens": self._whole("new_tokens", 1, self._settings.max_new_tokens),
            "temperature": self._number("temperature", 0.0, 2.0),
            "seed": self._whole("seed", 0, MAX_SEED),
            "reference": bool(self._values.get("reference")),
            "ignore_eos": bool(self._values.get("ignore_eos")),
        }

    def model(self) -> str:
        """The model's name as the user gave it."""
        name = str(self._values.get("model") or "").strip()
        if not name:
            raise FormError(text(self._lang, "model.empty"))
        return name

    def _document(self, prompt: str) -> str:
        """The text that a question of the reader's is about: a sample's own question is not in it."""
        sample = load_documents().get(str(self._values.get("document") or ""))
        return prompt.strip() if sample is None else sample.body

    def _file(self) -> tuple[str, str]:
        given = self._values.get("file")
        if not given:
            raise self._error("file_missing")
        path = Path(str(given))
        size = path.stat().st_size
        if size > FILE_LIMIT_KB * 1024:
            raise self._error("file_too_large", size=math.ceil(size / 1024), limit=FILE_LIMIT_KB)
        try:
            return path.read_bytes().decode("utf-8-sig"), path.name
        except UnicodeDecodeError:
            raise self._error("file_not_text") from None

    def _local(self, window: int) -> int | None:
        given = self._values.get("local_tokens")
        if given is None or str(given).strip() == "":
            return None
        tokens = self._whole("local_tokens", 1, 65536)
        if tokens % window:
            raise self._error("not_multiple", field=self._name("local_tokens"), window=window, value=tokens)
        return tokens

    def _number(self, name: str, low: float, high: float) -> float:
        given = self._values.get(name)
        try:
            value = float(given)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            shown = "" if given is None else str(given)[:40]
            raise self._error("not_a_number", field=self._name(name), value=shown) from None
        if not math.isfinite(value):
            raise self._error("not_a_number", field=self._name(name), value=value)
        if not low <= value <= high:
            raise self._error("out_of_range", field=self._name(name), low=low, high=high, value=f"{value:g}")
        return value

    def _whole(self, name: str, low: int, high: int) -> int:
        value = self._number(name, low, high)
        if value != int(value):
            raise self._error("not_whole", field=self._name(name), value=f"{value:g}")
        return int(value)

    def _choice(self, name: str, allowed: tuple[int, ...]) -> int:
        value = self._number(name, -math.inf, math.inf)
        if value not in allowed:
            raise self._error("not_a_choice", field=self._name(name), value=f"{value:g}")
        return int(value)

    def _name(self, field: str) -> str:
        return text(self._lang, f"form.{field}")

    def _error(self, key: str, **values: object) -> FormError:
        return FormError(text(self._lang, f"error.{key}", **values))


def _asked(question: str, title: str) -> str:
    """A run's title: what was asked, and of which text."""
    shown = question if len(question) <= TITLE_CHARS else f"{question[: TITLE_CHARS - 1].rstrip()}…"
    return f"{shown} · {title}"
