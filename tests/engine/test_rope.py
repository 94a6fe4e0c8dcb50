"""RoPE tables against the model's own rotation, and the refusals."""

from __future__ import annotations

import sys

import pytest
import torch

from engine.cache import QEvictCache
from engine.errors import UnsupportedModelError
from engine.rope import RopeTable, find_rotary, probe_layout, rotate
from tests.tiny import COMBINATIONS, tiny_model

torch.set_num_threads(1)


def own_rotation(model: torch.nn.Module, key: torch.Tensor, positions: torch.Tensor, kind: str | None) -> torch.Tensor:
    """What the model file itself does to keys [1, H, T, d]."""
    rotary = find_rotary(model)
    cos, sin = rotary(key, positions[None], kind) if kind else rotary(key, positions[None])
    attention = next(m for m in model.modules() if type(m).__name__.endswith("Attention"))
    return sys.modules[type(attention).__module__].apply_rotary_pos_emb(key, key, cos, sin)[1]


@pytest.mark.parametrize("architecture, rope", COMBINATIONS)
def test_undo_is_the_inverse_of_the_models_own_rotation(architecture: str, rope: str) -> None:
    model = tiny_model(architecture, rope=rope, positions=2048)
    kind = "full_attention" if architecture == "gemma3" else None
    table = RopeTable(find_rotary(model), kind, torch.device("cpu"))
    positions = torch.tensor([0, 1, 2, 77, 300, 511])
    torch.manual_seed(0)
    plain = torch.randn(1, 2, len(positions), 16)
    turned = own_rotation(model, plain, positions, kind)
    table.ensure(512)
    at = positions.expand(1, 2, -1)
    torch.testing.assert_close(table.undo(turned, at), plain, atol=2e-5, rtol=0)
    torch.testing.assert_close(table.apply(plain.clone(), at), turned, atol=2e-5, rtol=0)
    if rope in ("yarn", "longrope"):
        assert table.scale > 1.01, "the attention scaling is what makes this case hard"
    unit = table.cos**2 + table.sin**2
    torch.testing.assert_close(unit, torch.ones_like(unit))


def test_tables_are_append_only() -> None:
    table = RopeTable(find_rotary(tiny_model()), None, torch.device("cpu"))
    table.ensure(10)
    before = table.cos.clone()
    table.ensure(5000)
    assert table.cos.shape[0] >= 5000
    assert torch.equal(table.cos[: len(before)], before)
    table.restart()
    assert table.cos.shape[0] == 0
    table.ensure(3)
    assert torch.equal(table.cos[:3], before[:3])


def test_rotating_forth_and_back_with_one_row_loses_nothing() -> None:
    torch.manual_seed(0)
    key = torch.randn(100, 16)
    angle = torch.rand(100, 6) * 50
    back = rotate(rotate(key, angle.cos(), angle.sin()), angle.cos(), -angle.sin())
    torch.testing.assert_close(back, key, atol=2e-6, rtol=0)
    assert torch.equal(back[:, 12:], key[:, 12:])


def test_partial_rotation_is_known() -> None:
    half = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    model = tiny_model("phi3", rope_parameters=half)
    cache = QEvictCache(model)
    assert cache.parts[0].rope.half == 4


def test_an_unknown_rope_type_is_refused_by_name() -> None:
    model = tiny_model()
    find_rotary(model).rope_type = "spiral"
    with pytest.raises(UnsupportedModelError, match="spiral"):
        QEvictCache(model)


def test_interleaved_pairs_are_refused() -> None:
    model = tiny_model()
    attention = next(m for m in model.modules() if type(m).__name__ == "LlamaAttention")
    table = RopeTable(find_rotary(model), None, torch.device("cpu"))

    class Interleaved(torch.nn.Module):
        pass

    Interleaved.__module__ = "transformers.models.cohere2.modeling_cohere2"
    __import__(Interleaved.__module__)
    with pytest.raises(UnsupportedModelError, match="half"):
        probe_layout(Interleaved(), table, 16)
    probe_layout(attention, table, 16)


def test_a_model_without_rotary_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="rotary"):
        find_rotary(torch.nn.Linear(2, 2))


def test_longrope_must_not_change_regime_under_stored_keys() -> None:
    model = tiny_model("llama", rope="longrope", positions=256)
    rotary = find_rotary(model)
    rotary(torch.zeros(1, 1, 16), torch.arange(20)[None])
    table = RopeTable(rotary, None, torch.device("cpu"))
    table.ensure(20)
    rotary(torch.zeros(1, 1, 16), torch.arange(80)[None])
    with pytest.raises(UnsupportedModelError, match="longrope"):
        table.ensure(80)
    table.restart()
    table.ensure(80)
