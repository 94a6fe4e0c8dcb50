"""Every task that the engine knows has a name for readers in both languages, with the raw one beside it."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from app.analysis_card import Say
from app.analysis_results import read_results
from app.analysis_sources import BUNDLED, _drawn
from app.eval_lines import heading
from app.eval_page import page
from app.settings import ASSETS
from app.task_names import task_label, task_name
from app.texts import LANGUAGES, read_texts
from engine.evaluation.suites import PUBLISHED
from engine.evaluation.tasks import tasks

KNOWN = ("book", *(info.name for info in tasks()), *PUBLISHED)
FULL = BUNDLED / "full.json.gz"


@pytest.mark.parametrize("lang", LANGUAGES)
def test_every_task_of_the_engine_has_a_name_of_its_own(lang: str) -> None:
    named = read_texts(ASSETS / "texts" / f"{lang}.toml")
    keys = {f"tasks.{name.replace('-', '_')}" for name in KNOWN}
    assert len(keys) == len(KNOWN) == 7 + 13 + 12 + 1
    assert {key for key in named if key.startswith("tasks.")} == keys
    names = [task_name(name, lang) for name in KNOWN]
    assert len(set(names)) == len(names)
    assert not set(names) & set(KNOWN)
    assert all(f"{task_name(name, lang)}" in task_label(name, lang) for name in KNOWN)
    assert all(task_label(name, lang).rstrip(")）").endswith(name) for name in KNOWN)


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("name", ["", "own-task", "task_named", "<b>x</b>"])
def test_a_task_that_has_no_name_is_shown_as_it_is(lang: str, name: str) -> None:
    assert task_name(name, lang) == task_label(name, lang) == name


@pytest.mark.parametrize("lang", LANGUAGES)
def test_figures_name_their_task(lang: str) -> None:
    results = read_results([FULL, BUNDLED / "ablation-q.json"])
    cards = _drawn("", results, "light", Say(lang))["cards"]
    titles = [card["title"] for card in cards]
    for name in ("book", "niah1_raw", "kvline", "copy_passage"):
        assert any(task_label(name, lang) in title for title in titles), name
    ablations = [card["title"] for card in cards if card["group"] == "ablations"]
    assert ablations and all(task_label("book", lang) in title for title in ablations)


def test_a_report_names_its_tasks() -> None:
    answer: dict[str, Any] = json.loads(gzip.decompress(FULL.read_bytes()))
    answer = {"machine": {}, "left_out": [], "ablation": [], **answer}
    row = {"task": "vt", "length": 512, "label": "FullKV", "share": 1.0, "n": 2, "score": None}
    made = page({**answer, "answers": [row, {**row, "task": "new-task"}]}, None)
    for said in (heading("kvline", 1024, "after"), f"<td>{task_label('vt', 'en')}</td>", "<td>new-task</td>"):
        assert said in made
    assert heading("book", 1024, "after").startswith(task_label("book", "en"))
    assert heading("mine", 640, "inside").startswith("mine, 640")
