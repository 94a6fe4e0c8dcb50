"""A model that is divided among devices when it is loaded: what is refused, and that the answer stays the same."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine import models
from engine.config import QEvictConfig
from engine.errors import ConfigError
from engine.generate import generate
from engine.models import load_model
from engine.run_options import RunOptions
from engine.trace import StepEvent
from tests.tiny import tiny_model, tiny_tokenizer


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    tiny_model(num_layers=4).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize("found", [0, 1])
def test_one_gpu_is_too_few(found: int, checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_count_gpus", lambda: found)
    with pytest.raises(ConfigError, match=f"needs two of them; this machine has {found}"):
        load_model(checkpoint, device="spread")


def test_accelerate_is_asked_for(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_count_gpus", lambda: 2)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="pip install accelerate"):
        load_model(checkpoint, device="spread")


def test_a_model_too_large_for_all_gpus_together_is_refused(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_spread_ready", lambda: models.SPREAD)
    monkeypatch.setattr(models, "_count_gpus", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 2000))
    with pytest.raises(models.ModelTooLargeError, match=r"all GPUs together have 0\.0 GB"):
        load_model(checkpoint, device="spread")


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
def test_what_is_loaded_spread_answers_as_what_is_not(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without GPUs accelerate lays every layer on the CPU: the loading itself is what is tried here."""
    monkeypatch.setattr(models, "_count_gpus", lambda: 2)
    monkeypatch.setattr(models, "free_bytes", lambda _: None)
    read, asked = AutoModelForCausalLM.from_pretrained, []

    def reading(*args: Any, **options: Any) -> Any:
        asked.append(options.get("device_map"))
        return read(*args, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", reading)
    spread, plain = load_model(checkpoint, device="spread"), load_model(checkpoint, device="cpu")
    assert asked == ["auto", None]  # accelerate decided about the first
    assert plain.devices == ("cpu",) and spread.devices[0] == spread.device
    assert spread.fingerprint == plain.fingerprint

    def answer(loaded: Any) -> list[int]:
        options = RunOptions(max_new_tokens=24, temperature=0.0, ignore_eos=True, chat=False)
        found = generate(loaded, "word " * 90, QEvictConfig(kv_budget=0.3), options)
        return [token for event in found if isinstance(event, StepEvent) for token in event.ids]

    assert answer(spread) == answer(plain) != []
