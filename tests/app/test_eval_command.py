"""`qevict diagnose`, `qevict eval` and `qevict report` in process, on a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import engine.models
from app.cli import main
from app.eval_command import systems_of
from engine.errors import ConfigError
from tests.tiny import tiny_loaded

ROOT = Path(__file__).parents[2]
KILLED = """
import sys, time
from pathlib import Path
import engine.models
from app.cli import main
from tests.tiny import tiny_loaded

loaded, marker, forwards = tiny_loaded(positions=2048), Path(sys.argv[1]), [0]

def wait(*_):
    forwards[0] += 1
    if forwards[0] == 100:
        marker.touch()
        time.sleep(120)

loaded.model.register_forward_pre_hook(wait)
engine.models.load_model = lambda name, **_: loaded
sys.exit(main(sys.argv[2:]))
"""
"""An evaluation that waits in its 100th forward, in the middle of its second item, to be killed."""
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
    assert answer["variants"] == [] and answer["rivals"][0]["rival"] == "h2o" and answer["pareto"][0]["share"] == 1.0
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


def test_large_windows_at_small_budgets_name_the_smallest_that_works(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eval", "ablation", "--what", "window", "--data", str(place), "--length", "400", "--count", "1"]
    assert main([*words, "--kv-budget", "0.1", "--json"]) == 0
    by_value = {line["value"]: line for line in json.loads(capsys.readouterr().out)["ablation"]}
    least = by_value[32]["smallest_share"]
    assert by_value[32]["mean"] is None and least > 0.1 and f"{least:.4f}" in by_value[32]["infeasible"]
    # What it names works, and a little less does not.
    for share, feasible in ((least, True), (least - 0.002, False)):
        assert main([*words, "--kv-budget", str(share), "--json"]) == 0
        lines = json.loads(capsys.readouterr().out)["ablation"]
        assert (next(line for line in lines if line["value"] == 32)["mean"] is not None) is feasible


def test_an_ablation_killed_in_the_middle_of_a_cell_goes_on(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, marker = place / "cells.jsonl", place / "in-the-middle"
    words = ["eval", "ablation", "--what", "q", "--data", str(place), "--length", "200", "--count", "3", "--kv-budget",
             "0.4", "--json", "--store"]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(marker), *words, str(store)], cwd=ROOT, env=environment)
    try:
        end = time.monotonic() + 200
        while not marker.exists() and child.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
    finally:
        child.kill()
        assert child.wait() == -9
    kept = store.read_text()
    assert marker.exists() and len(kept.splitlines()) == 6
    store.write_text(kept + '{"key": "cut off in')
    assert main([*words, str(store)]) == 0
    resumed = json.loads(capsys.readouterr().out)
    assert (resumed["ran_now"], resumed["cells"], resumed["missing"]) == (12, 18, 0)
    assert store.read_text().startswith(kept)
    keys = [json.loads(line)["key"] for line in store.read_text().splitlines()]
    assert len(keys) == len(set(keys)) == 18
    assert main([*words, str(place / "whole.jsonl")]) == 0
    whole = json.loads(capsys.readouterr().out)
    # Another process may sum in another order.
    for ours, theirs in zip(resumed["ablation"], whole["ablation"], strict=True):
        assert ours["verdict"] == theirs["verdict"]
        assert ours["mean"]["mean"] == pytest.approx(theirs["mean"]["mean"], rel=1e-4)


def test_a_plan_runs_nothing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = place / "plan.jsonl"
    words = ["eval", "task", "--task", "book", "--data", str(place), "--length", "200", "--count", "2", "--systems",
             "h2o", "--store", str(store)]  # fmt: skip
    assert main([*words, "--plan"]) == 0
    shown = capsys.readouterr().out
    assert "4 cells, 0 of them finished" in shown and "fullkv, h2o 20%" in shown and not store.exists()
    assert main(words) == 0
    capsys.readouterr()
    assert main([*words, "--plan", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["cells"], found["finished"], found["steps_left"], found["minutes_left"]) == (4, 4, 0, 0.0)


def test_ray_that_is_not_installed_is_one_sentence(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    words = ["eval", "task", "--data", str(place), "--length", "200", "--count", "1", "--ray", "auto"]
    assert main(words) == 2
    error = capsys.readouterr().err.strip()
    assert "qevict-lab[cluster]" in error and "\n" not in error


def test_a_report_takes_stores_by_name_and_never_mixes(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", "ablation", "--what", "bits", "--data", str(place), "--length", "200", "--count", "1",
             "--kv-budget", "0.4", "--store"]  # fmt: skip
    store, page = place / "any-name.jsonl", place / "out.html"
    assert main([*words, str(store)]) == 0
    assert main(["report", str(store), "-o", str(page)]) == 0
    text = page.read_text()
    assert "Ablation: bits" in text and "output error" in text
    # A cell that an earlier release has measured too is not counted twice.
    rows = [json.loads(line) for line in store.read_text().splitlines()]
    old = [row | {"key": f"old{n}", "versions": {"qevict": "0"}} for n, row in enumerate(rows)]
    store.write_text("".join(json.dumps(row) + "\n" for row in [*old, *rows]))
    assert main(["report", str(store), "-o", str(page)]) == 0
    assert page.read_text() == text
    other = place / "other.jsonl"
    assert main([*words, str(other), "--kv-dtype", "float32"]) == 0
    capsys.readouterr()
    assert main(["report", str(store), str(other), "-o", str(page)]) == 2
    assert "several set-ups" in capsys.readouterr().err


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
