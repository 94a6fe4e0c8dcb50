"""Presets: what comes with the product, and what every wrong file is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.config import QEvictConfig
from presets import loader
from presets.loader import DEFAULT, GROUPS, PresetError, load_file, load_models, load_preset, load_presets


def write(folder: Path, text: str) -> Path:
    path = folder / "own.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_presets_of_the_paper_and_its_variants_are_there() -> None:
    names = list(load_presets())
    assert names[0] == DEFAULT == "paper-20"
    variants = {"paper-05", "paper-10", "paper-20", "paper-long", "r1", "r2", "r3", "r4", "int4", "promotion-off"}
    variants |= {"decayed-20", "decayed-10", "recent-20", "recent-10"}
    assert set(names) == variants | {f"q-{n}0" for n in range(1, 10)} | {"w-4", "w-8", "w-16", "w-32"}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("paper-20", {}),
        ("paper-10", {"kv_budget": 0.1}),
        ("paper-05", {"kv_budget": 0.05}),
        ("paper-long", {"local_tokens": 128}),
        ("r1", {"window_size": 1, "quant_share": 0.0}),
        ("r2", {"quant_share": 0.0}),
        ("r3", {}),
        ("r4", {"window_size": 32}),
        ("int4", {"bits": 4}),
        ("promotion-off", {"promotion": False}),
        ("decayed-20", {"ranker": "decayed"}),
        ("recent-20", {"local_share": 0.5, "quant_share": 0.9}),
        ("recent-10", {"local_share": 0.5, "quant_share": 0.9, "kv_budget": 0.1}),
        ("decayed-10", {"ranker": "decayed", "kv_budget": 0.1}),
        ("q-30", {"quant_share": 0.3}),
        ("w-16", {"window_size": 16}),
    ],
)
def test_a_preset_differs_from_the_default_in_what_its_name_says(name: str, changes: dict[str, object]) -> None:
    default = QEvictConfig(kv_budget=0.2, quant_share=0.7, bits=2, window_size=8, sink_tokens=5, kv_dtype="float16")
    assert load_preset(name).config == default.replace(**changes)


def test_every_preset_has_words_in_both_languages() -> None:
    for preset in load_presets().values():
        assert preset.group in GROUPS
        for words in (preset.title_en, preset.title_zh, preset.note_en, preset.note_zh):
            assert words.strip()
            assert "{value}" not in words
        assert preset.note_en.endswith(".")
        assert preset.note_zh.endswith("。")


def test_a_sweeps_titles_name_their_value() -> None:
    assert "0.3" in load_preset("q-30").title_en
    assert "16" in load_preset("w-16").title_zh


def test_known_models() -> None:
    notes = load_models()
    assert notes[0].name == "embedded"
    assert len({note.name for note in notes}) == len(notes)
    for note in notes:
        assert note.parameters_millions > 0
        assert note.positions > 0
        assert note.note_en
        assert note.note_zh


def test_an_own_file_is_a_preset(tmp_path: Path) -> None:
    path = write(tmp_path, "[settings]\nkv_budget = 0.5\n")
    preset = load_preset(str(path))
    assert preset.name == preset.title_en == "own"
    assert preset.group == "own"
    assert preset.config == QEvictConfig(kv_budget=0.5)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("titel_en = 'x'\n", r"own\.toml: titel_en is an unknown key; did you mean title_en\?"),
        ("title_en = 3\n", r"own\.toml: title_en must be text, got 3"),
        ("order = 'first'\n", r"own\.toml: order must be a whole number, got 'first'"),
        ("order = true\n", r"own\.toml: order must be a whole number, got True"),
        ("group = 'best'\n", r"own\.toml: group must be one of"),
        ("settings = 3\n", r"own\.toml: settings must be a table, got 3"),
        ("[settings]\nbudget = 0.2\n", r"own\.toml: settings: unknown setting 'budget'; known are"),
        ("[settings]\nkv_budget = 'much'\n", r"own\.toml: settings: kv_budget must be of type float, got 'much'"),
        ("[settings]\nkv_budget = 0.0\n", r"own\.toml: settings: kv_budget must be in \(0, 1\], got 0"),
        ("[settings]\nquant_share = 1.4\n", r"own\.toml: settings: quant_share must be in \[0, 1\], got 1\.4"),
        ("[settings]\nbits = true\n", r"own\.toml: settings: bits must be of type int, got True"),
        ("[settings]\nwindow_size = 7\n", r"own\.toml: settings: window_size must be one of"),
        ("[settings]\nwindow_size = 1\n", r"own\.toml: settings: window_size 1 with bits 2"),
        ("[settings]\nlocal_tokens = 12\n", r"own\.toml: settings: local_tokens must be a positive multiple"),
        ("[settings]\nkv_budget = nan\n", r"own\.toml: settings: kv_budget must be"),
        ("[settings]\nbackend = 2024-01-01\n", r"own\.toml: settings: backend must be of type str"),
        (
            "[sweep]\nsetting = 'bits'\nnames = ['a']\nvalues = [2, 4]\n",
            r"own\.toml: sweep\.names must be texts, as many",
        ),
        ("[sweep]\nsetting = 'bits'\nnames = []\nvalues = []\n", r"own\.toml: sweep\.names must be texts, as many"),
        ("[sweep]\nsetting = 'bits'\nname = 'a'\n", r"own\.toml: sweep\.name is an unknown key; did you mean names\?"),
        ("[sweep]\nsetting = 'bit'\nnames = ['a']\nvalues = [2]\n", r"own\.toml: settings: unknown setting 'bit'"),
        (
            "[settings]\nbits = 4\n[sweep]\nsetting = 'bits'\nnames = ['a']\nvalues = [2]\n",
            r"own\.toml: settings\.bits must be left out",
        ),
        ("[settings\n", r"own\.toml: the file must be TOML"),
    ],
)
def test_a_wrong_file_is_told_file_key_and_rule(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(PresetError, match=words):
        load_file(write(tmp_path, text))


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(PresetError, match=r"gone\.toml: the file must be readable"):
        load_preset(str(tmp_path / "gone.toml"))
    with pytest.raises(PresetError, match="must be readable"):
        load_file(tmp_path)
    path = tmp_path / "bytes.toml"
    path.write_bytes(b"title_en = '\xff'\n")
    with pytest.raises(PresetError, match=r"must be UTF-8 text"):
        load_file(path)


def test_a_sweep_is_not_one_preset(tmp_path: Path) -> None:
    path = write(tmp_path, "[sweep]\nsetting = 'bits'\nnames = ['a', 'b']\nvalues = [2, 4]\n")
    assert [preset.config.bits for preset in load_file(path)] == [2, 4]
    with pytest.raises(PresetError, match="sweep must be left out"):
        load_preset(str(path))


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(PresetError, match=r"did you mean paper-20\?"):
        load_preset("papr-20")


def test_two_files_with_one_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "a.toml").write_text("[settings]\n")
    (tmp_path / "runs" / "b.toml").write_text("[sweep]\nsetting = 'bits'\nnames = ['a']\nvalues = [2]\n")
    monkeypatch.setattr(loader, "FOLDER", tmp_path)
    loader._built_in.cache_clear()
    try:
        with pytest.raises(PresetError, match=r"name 'a' must be unique"):
            load_presets()
    finally:
        monkeypatch.undo()
        loader._built_in.cache_clear()


VALUES = st.one_of(
    st.none().map(lambda _: "[]"),
    st.booleans().map(lambda value: str(value).lower()),
    st.integers(-(2**40), 2**40).map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.sampled_from(["'fused'", "'layer'", "'x'", "inf", "nan", "{a = 1}", "[1, 2]"]),
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(table=st.dictionaries(st.sampled_from([*QEvictConfig().to_dict(), "other"]), VALUES, max_size=4))
def test_whatever_stands_in_a_file_it_is_a_config_or_one_named_error(table: dict[str, str], tmp_path: Path) -> None:
    lines = [f"{key} = {value}" for key, value in table.items()]
    path = write(tmp_path, "\n".join(["[settings]", *lines]))
    try:
        (preset,) = load_file(path)
    except PresetError as error:
        assert str(error).startswith(f"{path}: settings: ")
        assert any(key in str(error) for key in table)
    else:
        assert preset.config.to_dict().keys() == QEvictConfig().to_dict().keys()
        assert "other" not in table
