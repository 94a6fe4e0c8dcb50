"""`qevict compare` and `qevict systems`: figures, JSON, and one clear sentence for whatever can't be compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import engine.models
from app.cli import main
from app.compare_request import parameters_of, split_names
from engine.baselines import registry
from engine.compare import BudgetSpec, CompareOptions, SystemChoice, compare
from engine.errors import ConfigError
from tests.tiny import tiny_loaded

torch.set_num_threads(1)
PROMPT = "A tide table is a short story about the moon. " * 6
COMPARE = ["compare", "--prompt", PROMPT, "--no-chat", "--ignore-eos", "--kv-budget", "0.5", "--max-new-tokens", "12"]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Puts a tiny random model in the place of whatever is asked for; returns the names asked for."""
    asked: list[str] = []

    def load(name: str, **_: Any) -> Any:
        asked.append(name)
        return tiny_loaded(head_dim=32, positions=1024)

    monkeypatch.setattr(engine.models, "load_model", load)
    return asked


def found(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    out: dict[str, Any] = json.loads(capsys.readouterr().out)
    return out


def test_json_holds_the_engines_figures(tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMPARE, "--systems", "qevict,streamingllm,kivi-4", "--json", "--model", "owner/name"]) == 0
    assert tiny == ["owner/name"]
    report = found(capsys)
    options = CompareOptions(
        budget=BudgetSpec(share=0.5), max_new_tokens=12, kv_dtype="float16", chat=False, ignore_eos=True
    )
    choices = [SystemChoice("qevict"), SystemChoice("streamingllm"), SystemChoice("kivi-4")]
    expected = compare(tiny_loaded(head_dim=32, positions=1024), PROMPT, choices, options)
    assert report["token_ids"] == expected.token_ids
    assert [system["name"] for system in report["systems"]] == ["qevict", "streamingllm", "kivi-4"]
    for own, want in zip(report["systems"], expected.systems, strict=True):
        assert own["bytes"] == want.bytes == own["expected_bytes"]
        assert own["kl"] == pytest.approx(want.kl, abs=1e-6)
        assert own["fmm"] == want.fmm
        assert own["label"] and own["line"] and own["loss"]
        assert own["simulated"] is (want.storage != "real")
    assert report["budget"] == {"share": 0.5}
    assert set(report["measured"]) >= {"bytes", "share", "fmm", "churn", "kl", "agreement", "ms_per_token"}
    assert "float16" in report["measured"]["bytes"] and "11 tokens" in report["measured"]["kl"]


def test_the_table_says_how_every_figure_was_measured(tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMPARE, "--systems", "qevict,snapkv", "--set", "snapkv.window=8"]) == 0
    out = capsys.readouterr().out
    head = next(line for line in out.splitlines() if line.startswith("system"))
    for words in ("KV bytes", "Share", "FMM", "Churn", "KL", "Agreement", "ms per token"):
        assert words in head
        assert f"  {words}: measured" in out
    assert "QEvict" in out and "recoverable" in out and "lossy" in out


def test_free_running_marks_the_first_difference(tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMPARE, "--systems", "fullkv,streamingllm", "--free", "--json", "--kv-budget", "0.2"]) == 0
    report = found(capsys)
    full, streaming = report["systems"]
    assert report["mode"] == "free"
    assert full["first_difference"] is None or full["token_ids"] != report["token_ids"]
    own, want = streaming["token_ids"], report["token_ids"]
    differs = [at for at, (a, b) in enumerate(zip(own, want, strict=True)) if a != b]
    assert streaming["first_difference"] == (differs[0] if differs else None)


def test_qevict_gets_a_quantizers_bytes(tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMPARE, "--systems", "qevict,kivi-4", "--match-to", "kivi-4", "--json"]) == 0
    qevict, kivi = found(capsys)["systems"]
    assert qevict["budget"]["bytes"] >= qevict["bytes"]
    assert 0.8 * kivi["bytes"] <= qevict["bytes"] <= 1.05 * kivi["bytes"]


def test_oracles_and_the_full_tier_alone(tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    names = ["qevict-r3-fp-only", "oracle-past", "oracle-future", "qevict"]
    assert main([*COMPARE, "--systems", ",".join(names), "--json"]) == 0
    alone, past, future, qevict = found(capsys)["systems"]
    assert past["bytes"] == future["bytes"] == past["expected_bytes"]
    assert alone["fmm"] == pytest.approx(qevict["fmm_fp_only"], abs=1e-6)
    assert "no real system can do this" in past["notices"][0] and "QEvict's own run" in alone["notices"][0]


def test_a_running_budget(tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMPARE, "--systems", "streamingllm,h2o,kivi-2", "--matched-at", "running", "--json"]) == 0
    report = found(capsys)
    assert report["matched_at"] == "running"
    for system in report["systems"][:2]:
        assert system["bytes"] == system["expected_bytes"] <= 0.5 * report["full_kv_bytes"]
    assert report["systems"][2]["budget"] is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--systems", "qevict,nobody"], "unknown system 'nobody'"),
        (["--systems", "qevict"], "2 to 4 systems, got 1"),
        (["--systems", "qevict,snapkv,h2o,random,kivi-2"], "2 to 4 systems, got 5"),
        (["--systems", "qevict,qevict"], "got qevict twice"),
        (["--systems", "snapkv,kivi-2", "--match-to", "kivi-2"], "only QEvict"),
        (["--systems", "qevict,snapkv", "--set", "snapkv.nothing=1"], "no parameter 'nothing'"),
        (["--systems", "qevict,snapkv", "--set", "window"], "must look like"),
        (["--systems", "qevict,snapkv", "--kv-budget", "1.5"], "(0, 1]"),
        (["--systems", "qevict,snapkv", "--kv-budget-tokens", "10"], "at most one"),
        (["--systems", "qevict,snapkv", "--prompt-file", "/no/such/file"], "exactly one"),
        (["--systems", "qevict,snapkv", "--prompt", "  "], "the prompt is empty"),
        (["--systems", "qevict,snapkv", "--max-new-tokens", "0"], "max_new_tokens"),
        (["--systems", "qevict,oracle-future", "--free"], "only a teacher-forced comparison has"),
        (["--systems", "qevict,snapkv", "--matched-at", "running"], "snapkv can't follow a running budget"),
        (["--systems", "qevict,h2o", "--matched-at", "later"], "reference must be one of"),
    ],
)
def test_wrong_input_is_one_sentence_before_any_model(
    tiny: list[str], capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main([*COMPARE, *words]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert len(err.splitlines()) == 1
    assert tiny == []


def test_an_infeasible_budget_names_who_and_the_smallest(tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMPARE, "--systems", "qevict,snapkv,kivi-4", "--kv-budget", "0.02"]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert "qevict and snapkv" in err and "kivi-4" not in err
    share = float(err.split("the smallest feasible for all is ")[1].split("%")[0]) / 100
    enough = ["--systems", "qevict,snapkv,kivi-4", "--kv-budget", f"{share + 0.0001:.4f}", "--json"]
    assert main([*COMPARE, *enough]) == 0


def test_a_prompt_from_a_file(tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text(PROMPT, encoding="utf-8")
    words = ["compare", "--prompt-file", str(tmp_path / "text"), *COMPARE[3:], "--systems", "qevict,snapkv", "--json"]
    assert main(words) == 0
    report = found(capsys)
    (tmp_path / "text").write_bytes(b"\xff\xfe\xff")
    assert main(words) == 2
    assert "UTF-8" in capsys.readouterr().err
    assert report["prompt_tokens"] == len(tiny_loaded().tokenizer(PROMPT)["input_ids"])


def test_the_list_is_the_registry(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["systems", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == list(registry.names())
    for row in rows:
        assert row["label"] != row["name"] and row["line"] and row["loss"], row["name"]
    assert main(["systems"]) == 0
    out = capsys.readouterr().out
    assert "positions=cache of cache|original" in out
    listed = {line.split()[0]: line for line in out.splitlines() if line[:1].strip()}
    assert "in teacher-forced comparisons only" in listed["oracle-past"]
    assert "can follow a running budget" in listed["h2o"] and "running" not in listed["snapkv"]
    assert all(f"\n{name} " in f"\n{out}" for name in registry.names())


def test_parameters_are_read() -> None:
    read = parameters_of(["snapkv.window=16", "streamingllm.positions=original", "kivi-2.sinks=4"])
    assert read == {"snapkv": {"window": 16}, "streamingllm": {"positions": "original"}, "kivi-2": {"sinks": 4}}
    assert split_names(" a, b,,c ") == ("a", "b", "c")
    with pytest.raises(ConfigError, match="must look like"):
        parameters_of(["=1"])
