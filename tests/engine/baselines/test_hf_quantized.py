"""transformers' QuantizedCache where an extra package is there: what it holds, and that a prompt stays in one piece."""

from __future__ import annotations

import pytest
import torch
from transformers import QuantizedCache

from engine.baselines import registry
from engine.baselines.base import RunPlan
from engine.baselines.hf_quantized import BACKENDS, unavailable
from engine.compare import CompareOptions, SystemChoice, compare
from engine.errors import CacheUseError, ConfigError
from engine.trace import Tier
from tests.engine.baselines.matrix import PROMPT, feed, follow, loaded, prompt

SETTINGS = {"group_size": 32, "residual": 16}
HERE = [backend for backend in BACKENDS if unavailable(backend) is None]
pytestmark = pytest.mark.skipif(not HERE, reason="neither optimum-quanto nor hqq is installed")


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("backend", HERE)
def test_it_answers_as_the_stock_cache_does(backend: str, bits: int) -> None:
    model = loaded()
    stock = QuantizedCache(backend, model.model.config, nbits=bits, q_group_size=32, residual_length=16)
    parameters = SETTINGS | {"backend": backend, "bits": bits}
    own = registry.make("hf-quantized", model, parameters=parameters)
    ids, later = prompt(), prompt(1, 40, 1)
    want = follow(model, stock, ids, later)
    torch.testing.assert_close(follow(model, own, ids, later), want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kv_dtype", ["model", "float16"])
@pytest.mark.parametrize("backend", HERE)
def test_accountant_between_and_at_flushes(backend: str, kv_dtype: str) -> None:
    model = loaded()
    parameters = SETTINGS | {"backend": backend}
    cache = registry.make("hf-quantized", model, kv_dtype=kv_dtype, parameters=parameters)
    rival = registry.rival("hf-quantized", parameters)
    feed(model, cache, prompt())
    assert cache.persistent_bytes == 0 and bool((cache.residency() == Tier.FULL).all())
    for step in range(34):
        feed(model, cache, prompt(1, 1, step), start=PROMPT + step)
        run = RunPlan(kv_dtype=kv_dtype)
        assert cache.persistent_bytes == rival.account(cache.kv_shape, PROMPT, step + 1, run)
        table = cache.residency()
        assert int((table[0, 0] == Tier.FULL).sum()) == (step + 1) % 16
    assert cache.allocated_bytes >= cache.persistent_bytes


def test_later_turns_and_rows_are_the_stock_ones() -> None:
    model = loaded()
    cache = registry.make("hf-quantized", model, parameters=SETTINGS | {"backend": HERE[0]})
    stock = QuantizedCache(HERE[0], model.model.config, nbits=4, q_group_size=32, residual_length=16)
    for own in (cache, stock):
        follow(model, own, prompt(2), prompt(2, 3, 1))
        own.reorder_cache(torch.tensor([1, 0]))
    turn = prompt(2, 9, 2)
    want = feed(model, stock, turn, start=PROMPT + 3)
    torch.testing.assert_close(feed(model, cache, turn, start=PROMPT + 3), want, atol=1e-4, rtol=1e-4)
    with pytest.raises(CacheUseError, match="cropped"):
        cache.crop(PROMPT)


def test_a_group_must_divide_a_token() -> None:
    with pytest.raises(ConfigError, match="group_size must divide the 64 channels"):
        registry.make("hf-quantized", loaded(), parameters={"group_size": 48, "backend": HERE[0]})


def test_in_a_comparison_a_long_prompt_is_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts come in chunks there; what is compared is still what `generate` would have."""
    model = loaded()
    text = "A tide table is a short story about the moon. " * 4
    choice = SystemChoice("hf-quantized", SETTINGS | {"backend": HERE[0]})
    options = CompareOptions(max_new_tokens=12, chat=False)
    whole = compare(model, text, [choice], options).systems[0]
    monkeypatch.setattr("engine.compare.PREFILL_CHUNK", 50)
    chunked = compare(model, text, [choice], options).systems[0]
    assert chunked.kl_steps == pytest.approx(whole.kl_steps, abs=1e-5)
    assert chunked.bytes == chunked.expected_bytes == whole.bytes
