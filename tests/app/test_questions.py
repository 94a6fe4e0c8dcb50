"""A question of the reader's own about a document: the form, the words that say what came of it, and the lessons."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.context import create_context
from app.documents import load_documents
from app.forms import OWN_FILE, OWN_TEXT, FormError, RunForm
from app.messages import document_sentence, standing_sentence
from app.result_table import rows
from app.run_watch import RunWatch, Standing
from app.settings import Settings
from app.tabs.lessons import RUN_FIELDS, start_live
from app.tabs.run_panel import PRESET_FIELDS, fill_preset
from app.texts import LANGUAGES, text
from app.ui import build_ui
from presets.loader import load_presets
from tests.app.fake_engine import FakeEngine, FakeLoader
from tests.app.filled_form import form_values
from tests.app.test_api import Server
from tests.app.tiny_loader import load_tiny

OWN = "The old map showed a river where there was none, and a road that went to the sea. " * 3


def form(lang: str = "en", limit: int = 100_000, **changes: Any) -> RunForm:
    settings = Settings(max_new_tokens=512, max_prompt_chars=limit)
    return RunForm(form_values(**changes), lang=lang, presets=load_presets(), settings=settings)


# the form


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("name", load_documents())
def test_a_question_takes_the_place_of_the_samples_own(name: str, lang: str) -> None:
    sample = load_documents()[name]
    plain = form(lang, document=name).request()
    asked = form(lang, document=name, question="  Who\nwrote it? ").request()
    assert (plain.prompt, plain.document, plain.title) == (sample.text, "", sample.title(lang))
    assert (asked.prompt, asked.document) == ("Who wrote it?", sample.body)
    assert asked.title == f"Who wrote it? · {sample.title(lang)}"
    own = sample.text.splitlines()[-1]
    assert sample.text.startswith(sample.body) and own not in sample.body and len(sample.body) > len(own)
    assert plain.config == asked.config


def test_own_text_and_files_are_asked_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "map.txt"
    file.write_text(OWN, "utf-8")
    typed = form(document=OWN_TEXT, own_text=OWN, question="Where?").request()
    read = form(document=OWN_FILE, file=str(file), question="Where?").request()
    assert typed.document == read.document == OWN.strip()
    assert typed.title.startswith("Where? · The old map") and read.title == "Where? · map.txt"
    for name in load_presets():
        filled = dict(zip(PRESET_FIELDS, fill_preset(name), strict=True))
        assert form(document=OWN_TEXT, own_text=OWN, question="Where?", preset=name, **filled).request().document


def test_a_question_without_a_text_is_refused() -> None:
    with pytest.raises(FormError, match="empty"):
        form(document=OWN_TEXT, own_text=" ", question="Where?").request()


@pytest.mark.parametrize("lang", LANGUAGES)
def test_the_limit_counts_text_and_question(lang: str) -> None:
    whole = len(OWN.strip()) + len("Where?")
    values: dict[str, Any] = {"document": OWN_TEXT, "own_text": OWN.strip(), "question": "Where?"}
    assert form(lang, whole, **values).request().document
    with pytest.raises(FormError) as caught:
        form(lang, whole - 1, **values).request()
    assert str(caught.value) == text(lang, "error.question_too_long", limit=whole - 1)


def test_a_long_question_is_shortened_in_the_title_alone() -> None:
    question = "Why is it so " * 30 + "?"
    asked = form(question=question).request()
    assert asked.prompt == question and "… · " in asked.title and len(asked.title) < 140


# what is said of it


def summary(*, used: bool, reference: bool = False, document: int = 1066) -> dict[str, Any]:
    timing = {"prompt_tokens": 1079, "document_tokens": document, "prefix_used": used, "ttft_ms": 274.0}
    return {"timing": timing, "kv": {"prefix_bytes": 5_770_000}, "settings": {"run_reference": reference}}


@pytest.mark.parametrize("lang", LANGUAGES)
def test_the_end_says_whether_the_document_was_read(lang: str) -> None:
    said = [
        document_sentence(summary(used=used, reference=reference), lang)
        for used, reference in ((True, False), (False, False), (False, True))
    ]
    assert len(set(said)) == 3
    for sentence in said:
        assert "1\u2009066" in sentence and "274" in sentence and "{" not in sentence
        now = Standing("ended", tokens=3, why="length", summary=summary(used=True))
        assert standing_sentence(now, lang).startswith(text(lang, "status.ended_length"))
    assert standing_sentence(now, lang).endswith(said[0])
    assert "\u3002 " not in standing_sentence(now, lang)


@pytest.mark.parametrize(
    "odd",
    [
        {},
        {"timing": None},
        {"timing": {"ttft_ms": 3.0}},
        {"timing": {"document_tokens": 9, "ttft_ms": 0.0}},
        summary(used=False, document=0),
    ],
)
def test_nothing_is_said_of_a_run_without_a_document(odd: dict[str, Any]) -> None:
    assert document_sentence(odd, "en") == ""


@pytest.mark.parametrize("lang", LANGUAGES)
def test_the_time_to_the_first_token_says_what_was_not_read(lang: str) -> None:
    name = text(lang, "result.ttft")
    hows = [how for used in (True, False) for label, _, how in rows(summary(used=used), lang) if label == name]
    assert "1079" in hows[0] and "1066" in hows[0] and "1066" not in hows[1]


# the whole way


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    built = Server(tmp_path, FakeEngine(), parts={"loader": load_tiny})
    yield built
    built.close()


def test_a_second_question_from_the_form_reads_the_document_no_more(server: Server) -> None:
    said = []
    for question, measured in (("Where does it go?", False), ("And why?", False), ("And then?", True)):
        asked = form(
            document=OWN_TEXT, own_text=OWN, question=question, new_tokens=10, reference=measured, kv_budget=0.5
        )
        session = server.context.runs.start(asked.request())
        assert server.context.runs.wait(session, 60)
        context = server.context
        now = RunWatch(session, context.runs, context.bus, context.sessions).poll()
        said.append(document_sentence(now.summary, "en"))
        stored = context.sessions.get(session)
        assert (stored.settings["prompt"], stored.settings["document"]) == (question, OWN.strip())
        assert stored.title.startswith(f"{question} · The old map")
    assert [sentence.split(":")[0] for sentence in said] == [
        text("en", f"status.document_{how}").split(":")[0] for how in ("read", "used", "reference")
    ]


def test_a_lesson_clears_the_question() -> None:
    values = start_live(SimpleNamespace(lesson=""))  # type: ignore[arg-type]
    filled = dict(zip(("tab", "document", "preset", *PRESET_FIELDS, *RUN_FIELDS), values, strict=False))
    assert filled["question"] == "" and filled["reference"] is True


@pytest.mark.parametrize(("kept", "key"), [(64, "form.question_kept"), (0, "form.question_not_kept")])
def test_the_panel_says_whether_documents_are_kept(tmp_path: Path, kept: int, key: str) -> None:
    context = create_context(Settings(data_dir=tmp_path, prefix_mb=kept), loader=FakeLoader())

    async def build() -> Any:
        return build_ui(context).get_config_file()

    try:
        config = asyncio.run(build())
    finally:
        context.close()
    shown = {part["props"].get("elem_id"): part for part in config["components"]}
    assert text("en", key).replace("'", "&#x27;") in shown["qe-question-hint"]["props"]["value"]
    field = shown["qe-question"]["id"]
    switches = [one for one in config["dependencies"] if (field, "change") in map(tuple, one["targets"])]
    assert len(switches) == (1 if kept else 0)
