"""`qevict bench`: wrong input is one sentence, a small run gives rows."""

from __future__ import annotations

import json

import pytest

from app.cli import main


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["attention", "--budget", "0"], "--budget must be in (0, 1]"),
        (["attention", "--budget", "much"], "--budget takes shares"),
        (["attention", "--context", "0"], "numbers of 1 or more"),
        (["attention", "--shape", "gpt9"], "--shape must be one of smollm2"),
        (["attention", "--kv-dtype", "int8"], "a dtype must be float16"),
        (["table4", "--shape", "gpt9"], "--shape must be one of llama8b"),
    ],
)
def test_wrong_input_is_one_sentence(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_a_small_table4_prints_rows_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["table4", "--prompt-tokens", "200", "--new-tokens", "4", "--backend", "sdpa", "--threads", "1", "--json"]
    assert main(["bench", *words]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["system"] for row in report["rows"]] == ["full", "sdpa"]
    assert report["machine"]["threads"] == 1
    paper = report["rows"][0]["paper"]["flash2"]
    assert paper["qevict"]["tpot_ms"] / paper["full"]["tpot_ms"] == pytest.approx(2.45, abs=0.01)


def test_a_figure_has_one_bar_for_each_system() -> None:
    from visuals.figures.ratios import ratio_figure

    rows = [{"shape": "smollm2", "context": 512, "batch": 1, "kv_budget": 0.2, "ratio_to_stock_sdpa": {"fused": 5.0}}]
    figure = ratio_figure("attention", rows)
    assert list(figure.data[0].y) == [5.0] and figure.data[0].name == "fused"
