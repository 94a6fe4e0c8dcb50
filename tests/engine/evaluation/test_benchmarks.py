"""RULER's generators, LongBench and GSM8K from files, and free answers of a tiny model."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from engine.errors import ConfigError, PromptError
from engine.evaluation.benchmarks import cut_middle, gsm8k_samples, longbench_samples
from engine.evaluation.forcing import System
from engine.evaluation.ruler import NOISE, OTHERS, RULER, ruler_samples
from engine.evaluation.sample import Sample
from engine.evaluation.store import Store
from engine.evaluation.suites import benchmark
from engine.evaluation.sweep import run_sweep
from engine.evaluation.tables import answer_table
from tests.engine.evaluation.test_tasks import TEXTS
from tests.tiny import tiny_loaded, tiny_tokenizer

torch.set_num_threads(1)
TOKENIZER = tiny_tokenizer()
LENGTH = 3000
MADE = [name for name in RULER if not name.startswith("qa")]


def context_of(sample: Sample) -> str:
    return bytes(token for token in sample.context if token < 256).decode()


def make(name: str, **more: object) -> Sample:
    given: dict[str, object] = {"length": LENGTH, "count": 1} | more
    return ruler_samples(name, TOKENIZER, TEXTS[:1], **given)[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("name", MADE)
def test_a_sample_fits_its_length_and_is_seeded(name: str) -> None:
    sample = make(name)
    used = len(sample.context) + len(sample.asked) + sample.new_tokens
    assert 0.8 * LENGTH < used <= LENGTH or (name == "cwe" and used <= LENGTH)
    assert sample == make(name) and sample.prompt_hash != make(name, seed=7).prompt_hash
    if name not in OTHERS:
        for reference in sample.references:
            assert context_of(sample).count(reference) == 1


def test_needle_counts_follow_the_configuration() -> None:
    expected = {"niah_multikey_1-alt": (4, 1), "niah_multivalue-alt": (4, 4), "niah_multiquery-alt": (4, 4)}
    for name, (needles, answers) in expected.items():
        sample = make(name)
        assert context_of(sample).count("One of the special magic numbers for") == needles
        assert len(sample.references) == answers
    assert context_of(make("niah_multikey_2")).count("One of the special magic numbers for") > 10
    assert NOISE in context_of(make("niah_single_1"))


def test_a_variable_chain_has_five_names_and_four_hops() -> None:
    sample = make("vt")
    asked = context_of(sample).rpartition("Memorize and track")[2]
    chain = [line for line in asked.splitlines() if line.startswith("VAR ")]
    names = list(sample.references)
    assert [line.split()[1] for line in chain] == names and len(names) == 5
    assert [line.split()[-1] for line in chain[1:]] == names[:-1]


def test_common_words_are_six_times_as_common() -> None:
    sample = make("cwe")
    words = context_of(sample).rpartition("Memorize the ones")[2].split()[5::2]
    listed = Counter(word for word in words)
    assert {listed[word] for word in sample.references} == {6} and len(sample.references) == 10
    assert max(count for word, count in listed.items() if word not in sample.references) == 1


def test_frequent_words_are_ranks_one_to_three() -> None:
    sample = make("fwe")
    counts = Counter(context_of(sample).partition("coded words.\n")[2].split())
    assert counts.most_common(1)[0][0] == "...."
    assert set(sample.references) == {word for word, _ in counts.most_common(4)[1:]}


def test_questions_come_from_a_file_of_the_users(tmp_path: Path) -> None:
    squad = tmp_path / "squad.json"
    paragraphs = [
        {"context": f"The ferry {n} is blue.", "qas": [{"question": f"Colour of {n}?", "answers": [{"text": "blue"}]}]}
        for n in range(4)
    ]
    squad.write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    (sample,) = ruler_samples("qa_1", TOKENIZER, [], length=400, count=1, data=squad)
    assert sample.metric == "part" and sample.references == ("blue",) and "The ferry 0 is" in context_of(sample)
    hotpot = tmp_path / "hotpot.jsonl"
    entry = {"question": "Q?", "answer": "A", "supporting_facts": [["T", 0]], "context": [["T", ["One."]], ["U", []]]}
    hotpot.write_text(json.dumps(entry) + "\n")
    (sample,) = ruler_samples("qa_2", TOKENIZER, [], length=400, count=1, data=hotpot)
    assert "T\nOne." in context_of(sample) and "U" not in context_of(sample).partition("Document")[2]
    with pytest.raises(ConfigError, match="SQuAD"):
        ruler_samples("qa_1", TOKENIZER, [], length=400, count=1)
    with pytest.raises(PromptError, match="HotpotQA"):
        ruler_samples("qa_2", TOKENIZER, [], length=400, count=1, data=squad)
    with pytest.raises(ConfigError, match="too small"):
        make("vt", length=200)
    with pytest.raises(ConfigError, match="RULER task"):
        make("niah_single_9")


def test_inputs_that_are_too_long_lose_their_middle() -> None:
    assert cut_middle([1, 2, 3, 4, 5, 6, 7], 4) == [1, 2, 6, 7]
    assert cut_middle([1, 2, 3, 4, 5], 3) == [1, 4, 5]
    assert cut_middle([1, 2], 4) == [1, 2]


def test_longbench_uses_the_users_templates(tmp_path: Path) -> None:
    (tmp_path / "dataset2prompt.json").write_text(json.dumps({"trec": "Sort: {context}\n{input}", "qasper": "{gone}"}))
    row = {"context": "many examples " * 20, "input": "Type:", "answers": ["City"], "all_classes": ["City", "Food"]}
    for name in ("trec", "qasper"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    (sample,) = longbench_samples("trec", TOKENIZER, tmp_path, length=120, count=3)
    assert len(sample.context) + len(sample.asked) == 120 and sample.first_line
    assert sample.score("\nCity\nFood") == {"score": 1.0}
    assert bytes(sample.asked).decode().endswith("\nType:")
    with pytest.raises(PromptError, match="does not fit its template"):
        longbench_samples("qasper", TOKENIZER, tmp_path, length=120, count=1)
    with pytest.raises(ConfigError, match="LongBench task"):
        longbench_samples("nothing", TOKENIZER, tmp_path, length=120, count=1)
    with pytest.raises(PromptError, match=r"dataset2prompt\.json"):
        longbench_samples("trec", TOKENIZER, tmp_path / "none", length=120, count=1)


def test_gsm8k_shows_five_and_asks_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "test.jsonl"
    rows = [{"question": f"{n} and 1?", "answer": f"Add.\n#### {n + 1}"} for n in range(7)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    first, second = gsm8k_samples(TOKENIZER, path, count=9)
    assert context_of(first).count("Question:") == 5 and first.references == ("Add.\n#### 6",)
    assert second.score(" Add. #### 7")["strict"] == 1.0
    path.write_text('{"question": "only"}\n')
    with pytest.raises(PromptError, match="question and answer"):
        gsm8k_samples(TOKENIZER, path, count=1, shots=path)


def test_free_answers_are_scored_flagged_and_kept() -> None:
    loaded = tiny_loaded(positions=2048)
    suite = benchmark(loaded, TEXTS, "niah_single_1", [System("qevict", 0.3)], length=900, count=2)
    result = run_sweep(loaded, suite, Store(None))
    assert [row["kind"] for row in result.rows] == ["answer"] * 4
    assert result.rows[0]["full"] and result.rows[0]["tokens"] == 128 and result.rows[0]["truncated"]
    table = answer_table(result.rows)
    assert [line["label"] for line in table] == ["fullkv", "qevict 30%"]
    assert table[0]["share"] == 1.0 and table[1]["share"] < 0.33 and table[1]["n"] == 2
    assert table[0]["score_minus_full"]["mean"] == 0.0
    with pytest.raises(ConfigError, match="needs its data"):
        benchmark(loaded, TEXTS, "gsm8k", [], length=900, count=1)
