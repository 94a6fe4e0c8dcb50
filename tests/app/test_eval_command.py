"""`qevict diagnose`, `qevict eval` and `qevict report` in process, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import engine.models
from app.cli import main
from app.eval_command import systems_of
from engine.errors import ConfigError
from tests.tiny import tiny_loaded

STORY = " ".join(f"On day {day} the ferry crossed the sound with {day * 7 % 31} crates." for day in range(90))


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QEVICT_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setattr(engine.models, "load_model", lambda name, **_: tiny_loaded(positions=2048))
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "ferry.txt").write_text(STORY)
    return tmp_path


def test_diagnose_prints_tables_and_what_differs(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["diagnose", "--prompt-file", str(place / "texts" / "ferry.txt"), "--tokens", "400", "--steps", "40"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    for part in ("Table 14", "Table 16", "Table 18", "Figure 1", "needs --live", "46.38", "What differs"):
        assert part in shown
    assert main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["setup"]["prompt_tokens"] == 360
    assert main([*words[:-1], "400"]) == 2
    assert "fewer steps" in capsys.readouterr().err
    assert main(["diagnose", "--prompt-file", str(place / "none.txt")]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_one_task_is_measured_kept_and_reported(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", "task", "--task", "book", "--data", str(place), "--length", "200", "--count", "2", "--systems",
             "qevict@0.4,h2o", "--kv-budget", "0.4"]  # fmt: skip
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["ran_now"] == 6 and answer["missing"] == 0
    assert [line["label"] for line in answer["scores"]] == ["fullkv", "h2o 40%", "qevict 40%"]
    assert answer["rivals"][0]["rival"] == "h2o" and answer["pareto"][0]["share"] == 1.0
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "0 of them now" in shown and "qevict 40%" in shown
    page = place / "report.html"
    assert main(["report", "--output", str(page)]) == 0
    assert "qevict 40%" in page.read_text() and page.read_text().startswith("<!doctype html>")


def test_an_ablation_says_what_is_infeasible(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", "ablation", "--what", "window", "--data", str(place), "--length", "200", "--count", "1"]
    assert main([*words, "--json"]) == 0
    table = json.loads(capsys.readouterr().out)["ablation"]
    by_value = {line["value"]: line for line in table}
    assert by_value[8]["verdict"] == "article's choice" and by_value[8]["mean"] is not None
    assert "smallest feasible" in by_value[32]["infeasible"] and by_value[32]["mean"] is None
    assert main(words) == 0
    assert "infeasible" in capsys.readouterr().out


def test_directions_over_texts(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "directions", "--data", str(place), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert {line["kv_budget"] for line in answer["directions"]} == {0.2, 0.1, 0.05}
    assert {line["verdict"] for line in answer["directions"]} == {"too few items"}
    assert any("20 texts were wanted" in line for line in answer["left_out"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["eval", "task", "--systems", "nothing"], "unknown system"),
        (["eval", "task", "--systems", "qevict@much"], "--systems"),
        (["eval", "ablation", "--what", "colour"], "--what"),
        (["eval", "task", "--task", "colour"], "task must be"),
        (["eval", "task", "--length", "100000"], "no text is as long"),
        (["eval", "quick", "--data", "/nowhere/at/all"], "--data"),
        (["report"], "nothing"),
        (["report", "--store", "/nowhere.jsonl"], "no file"),
    ],
)
def test_wrong_input_is_one_sentence(
    words: list[str], said: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = [] if words[0] == "report" or "--data" in words else ["--data", str(place)]
    assert main([*words, *data]) == 2
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error


def test_systems_from_words() -> None:
    made: list[Any] = systems_of("qevict@0.1, snapkv ,kivi-2", 0.3)
    assert [(s.name, s.share) for s in made] == [("qevict", 0.1), ("snapkv", 0.3), ("kivi-2", None)]
    with pytest.raises(ConfigError):
        systems_of("qevict@x", 0.3)
