"""What a cache refuses, each with a sentence."""

from __future__ import annotations

import pytest
import torch

from engine.adapter import cache_keyword
from engine.cache import QEvictCache
from engine.config import QEvictConfig
from engine.errors import CacheUseError, ConfigError, UnsupportedModelError
from tests.engine.tiny_steps import TIGHT, WHOLE, model_of, prompt_of, step_logits
from tests.tiny import tiny_model

torch.set_num_threads(1)


def test_an_all_sliding_model_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="full-attention"):
        QEvictCache(tiny_model("mistral", sliding_window=32))


def test_a_model_that_shares_keys_and_values_is_refused() -> None:
    model = tiny_model()
    model.config.num_kv_shared_layers = 1
    with pytest.raises(UnsupportedModelError, match="share keys and values"):
        QEvictCache(model)


def test_a_value_group_must_divide_the_head() -> None:
    with pytest.raises(ConfigError, match="head_dim 16"):
        QEvictCache(model_of("llama"), QEvictConfig(value_group_size=5))


@pytest.mark.parametrize("holes", [[[1] * 20 + [0] * 4], [[1] * 3 + [0] + [1] * 20]])
def test_padding_elsewhere_than_on_the_left_is_refused(holes: list[list[int]]) -> None:
    model = model_of("llama")
    cache = QEvictCache(model, TIGHT)
    with pytest.raises(CacheUseError, match="left"), torch.no_grad():
        model(input_ids=prompt_of(24), attention_mask=torch.tensor(holes), **{cache_keyword(model): cache})


def test_padding_in_a_later_turn_is_refused() -> None:
    model = model_of("llama")
    cache = QEvictCache(model, WHOLE)
    name = cache_keyword(model)
    with torch.no_grad():
        model(input_ids=prompt_of(24), **{name: cache})
        mask = torch.ones(1, 34, dtype=torch.long)
        mask[0, 24:27] = 0
        with pytest.raises(CacheUseError, match="left"):
            model(input_ids=prompt_of(10), attention_mask=mask, **{name: cache})


@pytest.mark.parametrize("later", [False, True])
def test_a_prepared_4d_mask_is_refused(later: bool) -> None:
    model = model_of("llama")
    cache = QEvictCache(model, WHOLE)
    name = cache_keyword(model)
    with torch.no_grad():
        if later:
            model(input_ids=prompt_of(8), **{name: cache})
        length = 16 if later else 8
        mask = torch.zeros(1, 1, 8, length)
        with pytest.raises(CacheUseError, match="4D"):
            model(input_ids=prompt_of(8), attention_mask=mask, **{name: cache})


def test_a_row_of_padding_only_is_refused() -> None:
    model = model_of("llama")
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1] = 0
    with pytest.raises(CacheUseError, match="needs a token"), torch.no_grad():
        model(input_ids=prompt_of(12, 2), attention_mask=mask, **{cache_keyword(model): QEvictCache(model, WHOLE)})


def test_going_back_is_refused() -> None:
    model = model_of("llama")
    cache = QEvictCache(model, TIGHT)
    step_logits(model, prompt_of(95), 90, cache)
    with pytest.raises(CacheUseError, match="cropped"):
        cache.crop(50)
    with pytest.raises(CacheUseError, match="cropped"):
        cache.crop(-3)


def test_assisted_and_lookup_decoding_are_refused() -> None:
    model = model_of("llama")
    with pytest.raises((ValueError, CacheUseError)), torch.no_grad():
        model.generate(input_ids=prompt_of(60), **{cache_keyword(model): QEvictCache(model, TIGHT)}, max_new_tokens=20,
                       prompt_lookup_num_tokens=3, do_sample=False, eos_token_id=1, pad_token_id=0)  # fmt: skip


def test_a_cache_without_its_attention_is_refused() -> None:
    model = tiny_model()
    cache = QEvictCache(model, WHOLE)
    model.set_attn_implementation("sdpa")
    name = cache_keyword(model)
    with pytest.raises(CacheUseError, match="its own attention"), torch.no_grad():
        for _ in range(2):
            model(input_ids=prompt_of(8), **{name: cache})


def test_training_with_dropout_is_refused() -> None:
    model = tiny_model(attention_dropout=0.5)
    model.train()
    with pytest.raises(CacheUseError, match="eval"):
        model(input_ids=prompt_of(8), **{cache_keyword(model): QEvictCache(model, WHOLE)})


def test_another_batch_size_is_refused() -> None:
    model = model_of("llama")
    cache = QEvictCache(model, WHOLE)
    name = cache_keyword(model)
    with torch.no_grad():
        model(input_ids=prompt_of(8, 2), **{name: cache})
        with pytest.raises(CacheUseError, match="2 batch rows"):
            model(input_ids=prompt_of(1, 3), **{name: cache})
