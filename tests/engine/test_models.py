"""Loading: folders, wrong names, broken checkpoints, and the words that each failure gets."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, BertConfig, MambaConfig, T5Config

from engine import embedded, host, models
from engine.errors import (
    ConfigError,
    ModelError,
    ModelNotFoundError,
    ModelTooLargeError,
    UnsupportedModelError,
)
from engine.models import fingerprint, load_model, max_positions
from engine.trace import Progress
from tests.tiny import ARCHITECTURES, tiny_model, tiny_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "checkpoint"
    tiny_model().save_pretrained(place)
    tiny_tokenizer().save_pretrained(place)
    return place


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_saved_model_comes_back_with_the_same_logits(architecture: str, tmp_path: Path) -> None:
    model = tiny_model(architecture)
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path))
    ids = torch.arange(40)[None]
    for each in (model, loaded.model):
        each.set_attn_implementation("eager")  # stock sdpa ignores gemma2's softcap, and releases differ in the default
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    assert (loaded.device, loaded.dtype, loaded.max_positions) == ("cpu", "float32", 4096)
    assert not loaded.model.training


def test_dtype_is_what_was_asked_for(folder: Path) -> None:
    assert load_model(str(folder)).dtype == "float32"
    loaded = load_model(str(folder), dtype="bfloat16")
    assert loaded.dtype == "bfloat16"
    assert {weight.dtype for weight in loaded.model.parameters()} == {torch.bfloat16}


def test_progress_ends_at_its_total(folder: Path) -> None:
    told: list[Progress] = []
    load_model(str(folder), progress=told.append)
    assert [p.stage for p in told] == ["load"] * len(told)
    assert [p.done for p in told] == sorted(p.done for p in told)
    assert told[0].done == 0
    assert told[-1].done == told[-1].total


def test_a_tokenizer_without_pad_token_gets_one(folder: Path) -> None:
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["pad_token"] = None
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_model(str(folder)).tokenizer.pad_token == "</s>"


def test_fingerprint_is_stable_and_sees_one_changed_weight() -> None:
    assert fingerprint(tiny_model()) == fingerprint(tiny_model())
    assert fingerprint(tiny_model()) != fingerprint(tiny_model(seed=1))
    assert fingerprint(tiny_model()) != fingerprint(tiny_model(rope="yarn"))
    changed = tiny_model()
    with torch.no_grad():
        next(changed.parameters()).view(-1)[0] += 1
    assert fingerprint(changed) != fingerprint(tiny_model())


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("", ModelNotFoundError, "empty"),
        ("  ", ModelNotFoundError, "empty"),
        ("/no/such/folder", ModelNotFoundError, "no folder"),
        ("./nothing", ModelNotFoundError, "no folder"),
        ("a/b/c", ModelNotFoundError, "no folder"),
        ("what is this?", ModelNotFoundError, "neither a folder"),
    ],
)
def test_names_that_cannot_be(name: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        load_model(name)


def test_a_folder_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"config\.json"):
        load_model(str(tmp_path))


def test_a_single_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(UnsupportedModelError, match="folder"):
        load_model(str(tmp_path / "model.gguf"))


def test_without_a_network_the_answer_is_quick_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(*_: object, **__: object) -> object:
        raise OSError("Name or service not known")

    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", nowhere)
    with pytest.raises(ModelNotFoundError, match="cannot be reached"):
        load_model("nobody-at-all/no-such-model")


class GatedRepoError(Exception):
    """Stands for the hub client's class of that name."""


class RepositoryNotFoundError(Exception):
    """Stands for the hub client's class of that name."""


@pytest.mark.parametrize(
    ("cause", "words"), [(GatedRepoError("403"), "gated"), (RepositoryNotFoundError("404"), "has no model")]
)
def test_what_the_hub_refuses(cause: Exception, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> object:
        raise OSError("You are trying to access a repo.") from cause

    monkeypatch.setattr(AutoConfig, "from_pretrained", refuse)
    monkeypatch.setattr(models, "_hub_answers", lambda: True)
    with pytest.raises(ModelNotFoundError, match=words):
        load_model("owner/model")


def test_foreign_code_is_never_run(tmp_path: Path) -> None:
    config = {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text("raise SystemExit('foreign code was run')\n")
    with pytest.raises(UnsupportedModelError, match="code of its own"):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    "config",
    [
        T5Config(architectures=["T5ForConditionalGeneration"], d_model=8, num_layers=1),
        BertConfig(architectures=["BertForMaskedLM"], hidden_size=12, num_hidden_layers=1),
    ],
)
def test_another_kind_of_model_is_refused_by_name(config: Any, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=config.architectures[0]):
        load_model(str(tmp_path))


def test_too_large_is_said_before_a_weight_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "free_memory_bytes", lambda: 1000)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelTooLargeError, match=r"need .* GB as float32, but cpu has"):
        load_model(str(folder), device="cpu")


def test_a_cut_checkpoint(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(str(folder))


def test_a_missing_weight_is_not_made_up(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 weights, model\.layers\.1\.self_attn\.k_proj"):
        load_model(str(folder))


def test_device_and_dtype_are_checked(folder: Path) -> None:
    for device in ("gpu", "cuda:x", "cpu:1", "cuda:99"):
        with pytest.raises(ConfigError, match="device"):
            load_model(str(folder), device=device)
    with pytest.raises(ConfigError, match="dtype"):
        load_model(str(folder), dtype="int8")


def test_max_positions_needs_the_configuration_to_say_so() -> None:
    assert max_positions(tiny_model(positions=640).config) == 640
    with pytest.raises(UnsupportedModelError, match="of mamba does not say how many positions"):
        max_positions(MambaConfig(num_hidden_layers=1, hidden_size=8))


@pytest.mark.skipif(embedded.packaged_file() is None, reason="the package with the embedded model is not installed")
def test_the_embedded_model_answers() -> None:
    loaded = load_model()
    again = load_model()
    assert loaded.name == "embedded"
    assert loaded.fingerprint == again.fingerprint
    assert loaded.max_positions == 8192
    assert loaded.model.get_input_embeddings().weight is loaded.model.get_output_embeddings().weight
    ids = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    answer = loaded.model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)
    assert "Paris" in loaded.tokenizer.decode(answer[0, len(ids) :])
