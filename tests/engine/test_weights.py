"""Forms of a model's weights: 4-bit codes kept as they are, float16 and bfloat16, and the choice among them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from engine import weights, weights_probe
from engine.cache import QEvictCache
from engine.config import QEvictConfig
from engine.embedded import CODES, _halves_from_pairs
from engine.errors import ConfigError
from engine.gguf_codes import codes_of, unpack
from engine.models import load_model
from engine.weight_forms import FORMS, CodedRows, LowBitLinear, PlainRows, runs
from tests.tiny import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
needs_int4 = pytest.mark.skipif(not runs("int4"), reason="torch has no int4 kernel for this CPU")
needs_half = pytest.mark.skipif(not runs("float16"), reason="torch is built without FBGEMM")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QEVICT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def quantized(rows: int, columns: int, kind: str, seed: int = 0) -> tuple[np.ndarray, Any]:
    """(blocks as a GGUF file holds them, the type)."""
    values = np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32) * 0.05
    chosen = GGMLQuantizationType[kind]
    return quantize(values, chosen), chosen


@given(st.integers(1, 5), st.integers(1, 4), st.sampled_from(["Q4_0", "Q4_1"]), st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_codes_give_the_very_weights_of_the_file(rows: int, blocks: int, kind: str, seed: int) -> None:
    data, chosen = quantized(rows, 32 * blocks, kind, seed)
    parts = codes_of("layer", kind, data, lambda array: array)
    codes = unpack(parts["layer.codes"]).float().unflatten(1, (blocks, 32))
    restored = codes * parts["layer.scale"].float()[..., None] + parts["layer.minimum"].float()[..., None]
    expected = torch.from_numpy(dequantize(data, chosen))
    if kind == "Q4_1":
        assert torch.equal(restored.flatten(1), expected)
    torch.testing.assert_close(restored.flatten(1), expected, rtol=1e-6, atol=1e-7)


def test_rows_of_codes_move_as_rows_of_weights_do() -> None:
    data, chosen = quantized(32, 64, "Q4_1")
    parts = codes_of("layer", "Q4_1", data, lambda array: _halves_from_pairs(array, 2))
    codes = unpack(parts["layer.codes"]).float().unflatten(1, (2, 32))
    restored = codes * parts["layer.scale"].float()[..., None] + parts["layer.minimum"].float()[..., None]
    expected = torch.from_numpy(_halves_from_pairs(dequantize(data, chosen), 2).copy())
    assert torch.equal(restored.flatten(1), expected)


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q6_K"])
def test_a_type_without_4_bit_codes_gives_none(kind: str) -> None:
    assert codes_of("layer", kind, np.zeros((4, 34), np.uint8), lambda array: array) == {}


@needs_int4
@pytest.mark.parametrize("rows", [1, 3, 9])
def test_the_int4_kernel_computes_with_the_codes(rows: int) -> None:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (48, 96), generator=generator, dtype=torch.uint8)
    # Powers of two and small whole numbers: bfloat16 holds every factor and the sum exactly.
    scale = 2.0 ** torch.randint(-2, 2, (48, 3), generator=generator)
    minimum = -4 * scale
    x = torch.randint(-1, 2, (rows, 96), generator=generator).float()
    weight = (codes.float().unflatten(1, (3, 32)) * scale[..., None] + minimum[..., None]).flatten(1)
    out = CodedRows(codes, scale, minimum)(x)
    torch.testing.assert_close(out, (x @ weight.T).to(torch.bfloat16).float(), rtol=0, atol=0)
    assert out.dtype == torch.float32


@pytest.mark.parametrize(
    ("form", "least", "most"), [("float32", 0.0, 1e-6), ("float16", 1e-5, 4e-4), ("bfloat16", 5e-4, 6e-3)]
)
@pytest.mark.parametrize("rows", [1, 7])
def test_every_form_is_as_exact_as_it_says(form: str, least: float, most: float, rows: int) -> None:
    if not runs(form):
        pytest.skip(f"{form} does not run here")
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(40, 64, generator=generator)
    x = torch.randn(rows, 64, generator=generator)
    exact = (x.double() @ weight.double().T).float()
    error = (FORMS[form](weight)(x) - exact).norm() / exact.norm()
    assert least <= error < most


def test_a_layer_picks_its_form_by_rows_and_adds_its_bias() -> None:
    few, many = PlainRows(torch.ones(2, 3)), PlainRows(2 * torch.ones(2, 3))
    layer = LowBitLinear(few, many, 4, 3, 2, torch.tensor([0.0, 10.0]))
    assert layer(torch.ones(1, 4, 3)).tolist() == [[[3.0, 13.0]] * 4]
    assert layer(torch.ones(5, 3)).tolist() == [[6.0, 16.0]] * 5
    assert next(layer.parameters()).device.type == "cpu"


def write_codes(model: Any, path: Path) -> None:
    """Quantizes the linear layers of `model` to Q4_1, in place, and writes their codes."""
    parts: dict[str, torch.Tensor] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name != "lm_head":
            data = quantize(layer.weight.detach().numpy(), GGMLQuantizationType.Q4_1)
            parts |= codes_of(name, "Q4_1", data, lambda array: array)
            layer.weight.data = torch.from_numpy(dequantize(data, GGMLQuantizationType.Q4_1))
    save_file(parts, path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint whose linear layers are 4-bit already, with the codes beside it."""
    place = tmp_path / "checkpoint"
    model = tiny_model(groups=2, num_kv_heads=2, head_dim=16, hidden_size=64, intermediate_size=128)
    place.mkdir()
    write_codes(model, place / CODES)
    model.save_pretrained(place)
    tiny_tokenizer().save_pretrained(place)
    return place


def low_bit(model: Any) -> list[LowBitLinear]:
    return [module for module in model.modules() if isinstance(module, LowBitLinear)]


@needs_int4
def test_codes_run_a_model_close_to_its_float32_weights(folder: Path) -> None:
    exact, loaded = load_model(str(folder), weights="float32"), load_model(str(folder), weights="int4")
    assert (exact.weights, exact.weights_error, low_bit(exact.model)) == ("float32", None, [])
    assert loaded.weights == "int4"
    assert loaded.fingerprint == exact.fingerprint
    ids = torch.arange(40)[None]
    with torch.no_grad():
        want, got = exact.model(ids).logits, loaded.model(ids).logits
    assert got.dtype == torch.float32
    error = float((got - want).norm() / want.norm())
    assert 0 < error < 0.03
    assert loaded.weights_error is not None
    assert 0 < loaded.weights_error < 0.03


@needs_int4
def test_auto_takes_what_was_measured_to_be_the_fastest(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spent(layers: dict[str, Any], *_: object) -> dict[str, dict[int, float]]:
        few = {"int4": 1.0, "float16": 2.0, "float32": 3.0, "bfloat16": 9.0}
        many = {"bfloat16": 10.0, "float16": 20.0, "float32": 30.0}
        rows = weights_probe.FEW_ROWS
        table = {form: {r: few[form] * (r if form == "int4" else 1) for r in rows} for form in layers}
        for form in set(layers) & set(many):
            table[form][weights_probe.PROMPT_ROWS] = many[form]
        return table

    monkeypatch.setattr(weights_probe, "time_forms", spent)
    loaded = load_model(str(folder))
    assert loaded.weights == "int4"
    layers = [layer for layer in low_bit(loaded.model) if layer.out_features != loaded.model.config.vocab_size]
    assert {type(layer.few).__name__ for layer in layers} == {"CodedRows"}
    assert {type(layer.many).__name__ for layer in layers} == {"BrainRows"}
    assert {layer.few_rows for layer in layers} == {8}

    def slow(layers: dict[str, Any], *_: object) -> dict[str, dict[int, float]]:
        rows = (*weights_probe.FEW_ROWS, weights_probe.PROMPT_ROWS)
        return {form: dict.fromkeys(rows, 1.0 if form == "float32" else 9.0) for form in layers}

    monkeypatch.setattr(weights_probe, "time_forms", slow)
    weights_probe.records_file().unlink()
    again = load_model(str(folder))
    assert (again.weights, again.weights_error, low_bit(again.model)) == ("float32", None, [])


@needs_int4
def test_a_measurement_is_kept_and_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_model(str(folder), weights="int4")
    report = weights.weights_report()
    [record] = report["measured"]
    assert record["fingerprint"] == first.fingerprint
    assert record["plan"]["few"] == "int4"
    assert set(record["error"]) == {"decode", "prompt"}
    assert record["tokens"] > 16
    assert report["torch"] == torch.__version__

    def forbidden(*_: object) -> None:
        raise RuntimeError("measured twice")

    monkeypatch.setattr(weights_probe, "time_forms", forbidden)
    assert load_model(str(folder), weights="int4").weights_error == first.weights_error


@needs_int4
@pytest.mark.parametrize("damage", ["", "[1, 2", "{}", '[{"plan": 3}]', "null"])
def test_a_damaged_record_is_measured_anew(damage: str, folder: Path) -> None:
    load_model(str(folder), weights="int4")
    weights_probe.records_file().write_text(damage)
    assert load_model(str(folder), weights="int4").weights == "int4"
    assert len(json.loads(weights_probe.records_file().read_text())) >= 1


@needs_int4
@pytest.mark.parametrize("plan", [{"few": "int9"}, {"few_rows": "8"}, {"more": 1}])
def test_a_record_with_a_wrong_plan_is_measured_anew(plan: dict[str, Any], folder: Path) -> None:
    load_model(str(folder), weights="int4")
    [record] = weights_probe.records()
    record["plan"] |= plan
    weights_probe.records_file().write_text(json.dumps([record]))
    assert load_model(str(folder), weights="int4").weights == "int4"
    [mended] = weights_probe.records()
    assert mended["plan"]["few"] == "int4"


def test_a_cache_folder_that_cannot_be_written_costs_only_the_record(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("QEVICT_CACHE_DIR", str(tmp_path / "file"))
    assert load_model(str(folder), weights="bfloat16").weights == "bfloat16"
    assert weights.weights_report()["measured"] == []


@pytest.mark.parametrize("form", ["float16", "bfloat16"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma2", "phi3"])
def test_any_model_can_run_in_fewer_bits(form: str, architecture: str, tmp_path: Path) -> None:
    if not runs(form):
        pytest.skip(f"{form} does not run here")
    tiny_model(architecture).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    exact = load_model(str(tmp_path))
    assert exact.weights == "float32"
    loaded = load_model(str(tmp_path), weights=form)
    assert (loaded.weights, loaded.dtype) == (form, "float32")
    ids = torch.arange(30)[None]
    with torch.no_grad():
        want, got = exact.model(ids).logits, loaded.model(ids).logits
    error = float((got - want).norm() / want.norm())
    assert 0 < error < (0.002 if form == "float16" else 0.05)
    # Names of weights, ties and the first parameter's device are what other code asks for.
    assert loaded.model.device.type == "cpu"
    assert all(next(module.parameters()).device.type == "cpu" for module in low_bit(loaded.model))


@needs_half
def test_the_tied_weight_of_the_output_stays_tied(folder: Path) -> None:
    model = load_model(str(folder), weights="float16").model
    assert model.config.tie_word_embeddings == (
        getattr(model.get_output_embeddings(), "weight", None) is model.get_input_embeddings().weight
    )


@needs_int4
def test_every_cache_meets_the_same_weights(folder: Path) -> None:
    loaded = load_model(str(folder), weights="int4")
    ids = torch.arange(60)[None]
    cache = QEvictCache(loaded.model, QEvictConfig(kv_budget=1.0, quant_share=0.0, backend="sdpa"))
    ours = loaded.model.generate(ids, past_key_values=cache, max_new_tokens=8, do_sample=False)
    stock = loaded.model.generate(ids, max_new_tokens=8, do_sample=False)
    assert torch.equal(ours, stock)


def test_what_cannot_be_had_is_said(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="weights must be one of"):
        load_model(str(folder), weights="int3")
    with pytest.raises(ConfigError, match="float32 activations"):
        load_model(str(folder), weights="int4", dtype="bfloat16")
    with pytest.raises(ConfigError, match="leave one of them on auto"):
        load_model(str(folder), weights="float32", dtype="bfloat16")
    (folder / CODES).unlink()
    with pytest.raises(ConfigError, match="4-bit codes"):
        load_model(str(folder), weights="int4")


def test_a_dtype_that_was_asked_for_is_left_alone(folder: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        loaded = load_model(str(folder), dtype=dtype)
        assert (loaded.weights, loaded.weights_error) == (dtype, None)
        assert low_bit(loaded.model) == []


def test_logits_compare_as_figures_say() -> None:
    exact = torch.tensor([[4.0, 0.0, 0.0], [0.0, 3.0, 0.0]])
    same = weights_probe.compare(exact, exact)
    assert same == {"relative": 0.0, "top1": 1.0, "kl": 0.0}
    other = weights_probe.compare(torch.tensor([[0.0, 4.0, 0.0], [0.0, 3.0, 0.0]]), exact)
    assert other["relative"] == pytest.approx(32**0.5 / 5)
    assert other["top1"] == 0.5
    assert other["kl"] > 0


def test_our_text_fits_large_models_too() -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer()
    ids = weights_probe.text_ids(model, tokenizer)
    assert ids.shape == (1, weights_probe._TEXT_TOKENS)
    assert ids.dtype == torch.int64
