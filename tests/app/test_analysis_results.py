"""Files of results: what is read, refused and read again."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from app.analysis_results import MOST_BYTES, ResultCache, ResultsError, ablations_in, parse, read_results, result_files
from tests.app.analysis_samples import ANSWER, DIAGNOSIS, write


def test_an_answer_and_a_diagnosis_are_read_with_where_they_come_from(tmp_path: Path) -> None:
    paths = [
        write(tmp_path, "quick.json", ANSWER),
        write(tmp_path, "text.json.gz", gzip.compress(json.dumps(DIAGNOSIS).encode())),
    ]
    results = read_results(paths)
    assert results.problems == [] and not results.empty
    assert ("machine", "abacus, 2 cores") in results.facts and ("model", "tiny <b>model</b>") in results.facts
    assert {row["file"] for row in results.tables["scores"]} == {"quick"}
    assert results.left_out == ["speed"] and [stem for stem, _ in results.diagnoses] == ["text"]
    assert list(result_files(tmp_path)) == ["text", "quick"] or set(result_files(tmp_path)) == {"text", "quick"}
    assert result_files(tmp_path / "nowhere") == {}


def test_a_store_that_is_being_written_is_read_and_left_alone(tmp_path: Path) -> None:
    policy = dict.fromkeys(("fmm_history", "churn_per_event", "churn_per_step", "lir"), 0.1)
    policy |= {"promotions": 1, "mass_share_history": None}
    row = {
        "key": "a",
        "kind": "policies",
        "kv_budget": 0.2,
        "model": "m",
        "prompt_tokens": 64,
        "versions": {"torch": "0"},
        "promotion": None,
        "policies": {"R1": {**policy, "fmm": 0.3}, "R3": {**policy, "fmm": 0.2}},
    }
    data = json.dumps(row).encode() + b"\n" + b'{"key": "b", "ki'
    path = write(tmp_path, "directions.jsonl", data)
    results = read_results([path])
    assert results.problems == []
    assert results.tables["directions"][0]["claim"] == "R3 misses less than R1"
    assert ("cells", "directions: 1") in results.facts
    assert path.read_bytes() == data


@pytest.mark.parametrize(
    ("name", "data", "why"),
    [
        ("a.json", b"[1, 2]", "neither"),
        ("a.json", b'{"suite": 1, "scores": [NaN]}', "NaN is no number"),
        ("a.json", b"[" * 100_000, "not valid JSON"),
        ("a.json", b"\xff\xfe", "not valid JSON"),
        ("a.jsonl", b'{"key": "a"}\n', "line 1, is no row"),
        ("a.jsonl", b"nonsense\n", "line 1, is not valid JSON"),
        ("a.jsonl", b'{"key": "a", "kind": "item"}', "no finished row"),
        ("a.json.gz", b"\x1f\x8bnot really", "can't be unpacked"),
    ],
)  # fmt: skip
def test_what_is_no_result_file_is_refused_with_one_sentence(name: str, data: bytes, why: str) -> None:
    with pytest.raises(ResultsError, match=why):
        parse(name, data)


def test_a_file_that_unpacks_without_end_is_stopped() -> None:
    bomb = gzip.compress(b" " * (MOST_BYTES + 10))
    assert len(bomb) < 100_000
    with pytest.raises(ResultsError, match="too long"):
        parse("bomb.json.gz", bomb)


def test_texts_from_a_file_are_cut() -> None:
    _, answer = parse("a.json", json.dumps({**ANSWER, "model": "x" * 10_000}).encode())
    assert len(answer["model"]) == 400


def test_an_ablation_is_known_by_what_varies() -> None:
    def row(value: float) -> dict[str, Any]:
        return {"kind": "item", "system": "qevict", "parameters": {"quant_share": value}}

    assert ablations_in("anything", [row(0.5), row(0.7)]) == ["q"]
    assert ablations_in("anything", [row(0.7)]) == []
    assert ablations_in("ablation-budget", [row(0.7)]) == ["budget"]


def test_files_are_read_again_only_when_they_change(tmp_path: Path) -> None:
    cache, path = ResultCache(), write(tmp_path, "quick.json", ANSWER)
    first = cache.read([path])
    assert cache.read([path]) is first
    write(tmp_path, "quick.json", {**ANSWER, "model": "another model"})
    assert ("model", "another model") in cache.read([path]).facts
