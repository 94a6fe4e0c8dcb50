"""Codes, grids and outliers of the quantizing rivals: cases computed by hand, and what can't be wrong."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.baselines import nuq
from engine.baselines.base import Context, RunPlan, Staged
from engine.baselines.kivi import Kivi, KiviLayer
from engine.baselines.kvquant import KVQuant, NuqLayer
from engine.baselines.nuq import fit, kmeans, nearest, split_counts, value_outliers
from engine.baselines.observation import output_weight
from engine.baselines.packing import minmax, pack, planes, unpack, without_padding
from engine.baselines.zipcache import Block, ZipCache, channel_scale, saliency
from engine.budget import KVShape
from engine.errors import ConfigError, UnsupportedModelError
from engine.rope import RopeTable, find_rotary
from tests.engine.baselines.matrix import build, feed, follow, loaded, prompt
from tests.tiny import tiny_loaded


def context(columns: int, pads: list[int] | None = None, **run: object) -> Context:
    """A context for layers made by hand."""
    pads = pads or [0]
    return Context(
        run=RunPlan(**run),  # type: ignore[arg-type]
        shape=KVShape(1, 2, 32, 4),
        num_heads=6,
        columns=columns,
        pads=pads,
        shift=torch.zeros(len(pads), dtype=torch.int64),
        dtype=torch.float32,
        device=torch.device("cpu"),
        scale=0.2,
        softcap=None,
        rope=_table,
        model=None,
    )


def _table() -> RopeTable:
    table = RopeTable(find_rotary(loaded().model), None, torch.device("cpu"))
    table.ensure(512)
    return table


def staged(tokens: int, seed: int = 0, scale: float = 1.0) -> Staged:
    generator = torch.Generator().manual_seed(seed)
    key, value = (torch.randn(1, 2, tokens, 32, generator=generator) * scale for _ in range(2))
    return Staged(key, value, torch.randn(1, 6, tokens, 32, generator=generator), None, torch.nn.Identity())


# ---- packing ------------------------------------------------------------------------------------------------


@given(st.sampled_from([1, 2, 3, 4, 5, 8]), st.integers(1, 5), st.integers(0, 10_000))
def test_packing_goes_there_and_back(bits: int, units: int, seed: int) -> None:
    count = planes(bits)[0] * units
    codes = torch.randint(0, 2**bits, (2, count, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    packed = pack(codes, bits, 1)
    assert packed.shape == (2, count * bits // 8, 3)
    assert torch.equal(unpack(packed, bits, 1, torch.uint8), codes)


def test_padding_repeats_the_first_real_token() -> None:
    states = torch.arange(12.0).view(2, 1, 6, 1)
    assert without_padding(states, [2, 0]).flatten().tolist() == [2, 2, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]


# ---- KIVI -----------------------------------------------------------------------------------------------------


def test_kivi_example() -> None:
    codes, scale, zero = minmax(torch.tensor([0.0, 1.0, 2.0, 10.0]), 2, 0)
    assert codes.tolist() == [0, 0, 1, 3]
    assert float(scale) == pytest.approx(3.3333, abs=2e-3)
    assert float(zero) == 0.0
    torch.testing.assert_close(
        codes * scale.float() + zero.float(), torch.tensor([0.0, 0.0, 3.333, 10.0]), atol=5e-3, rtol=0
    )


def test_a_constant_group_is_exact() -> None:
    codes, scale, zero = minmax(torch.full((8,), 1.5), 2, 0)
    assert (codes * scale.float() + zero.float()).tolist() == [1.5] * 8


@given(st.integers(0, 10_000), st.sampled_from([2, 4]), st.floats(1e-3, 1e3))
def test_error_is_at_most_half_a_step(seed: int, bits: int, size: float) -> None:
    values = torch.randn(4, 32, generator=torch.Generator().manual_seed(seed)) * size
    codes, scale, zero = minmax(values, bits, 1)
    back = codes * scale.float()[:, None] + zero.float()[:, None]
    assert bool(((back - values).abs() <= scale.float()[:, None] * 0.5001).all())


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.sampled_from([0, 3]))
def test_kivi_streaming_equals_one_shot(splits: list[int], sinks: int) -> None:
    total = sum(splits)
    part = staged(total)
    kivi = Kivi(group_size=8, residual=16, sinks=sinks)
    whole = KiviLayer(kivi, part, context(total))
    first = splits[0]
    head = Staged(part.key[:, :, :first], part.value[:, :, :first], part.query, None, part.module)
    grown = KiviLayer(kivi, head, context(first))
    at = first
    for count in splits[1:]:
        grown.append(part.key[:, :, at : at + count], part.value[:, :, at : at + count])
        at += count
    for name, tensor in whole.tensors().items():
        assert torch.equal(grown.tensors()[name], tensor), name


def test_kivi_residuals() -> None:
    layer = KiviLayer(Kivi(group_size=32, residual=32), staged(100), context(100))
    tensors = layer.tensors()
    assert tensors["key_residual"].shape[2] == 4
    assert tensors["value_residual"].shape[2] == 32


def test_kivi_groups_are_always_whole() -> None:
    """168 decode steps: five blocks of 32, and aged keys are really rounded."""
    layer = KiviLayer(Kivi(group_size=32, residual=32), staged(1), context(1))
    keys = [staged(1, seed).key for seed in range(1, 168)]
    for key in keys:
        layer.append(key, key)
    assert layer.counters == {"key_flushes": 168 // 32}
    stored = layer.dense(0)[0][0]
    exact = torch.cat([staged(1).key, *keys], 2)[0, 0]
    error = (stored - exact).abs().amax(-1)
    assert bool((error[:160] > 0).all()) and bool((error[160:] == 0).all())


def test_kivi_keeps_sinks_only_when_asked() -> None:
    part = staged(64)
    for sinks, exact in ((0, False), (4, True)):
        layer = KiviLayer(Kivi(group_size=8, residual=16, sinks=sinks), part, context(64))
        assert torch.equal(layer.dense(0)[0][0][:4], part.key[0, 0, :4]) is exact


def test_kivi_refuses_channels_that_do_not_divide() -> None:
    with pytest.raises(ConfigError, match="group_size"):
        Kivi(group_size=32).check(KVShape(1, 2, 48, 2), 48)
    with pytest.raises(ConfigError, match="multiple of group_size"):
        Kivi(group_size=32, residual=48)


@pytest.mark.parametrize(
    ("tokens", "rival", "share"),
    [
        (1024, Kivi(), 0.238),
        (4096, Kivi(), 0.200),
        (1024, Kivi(residual=32), 0.200),
        (4096, Kivi(bits=4), 0.323),
        (1024, ZipCache(), 0.208),
        (4096, ZipCache(ratio=0.9), 0.144),
        (1024, KVQuant(bits=3), 0.225),
        (4096, KVQuant(bits=2), 0.161),
        (4096, KVQuant(bits=4), 0.286),
    ],
)
def test_operating_points_of_the_embedded_model(tokens: int, rival: Kivi, share: float) -> None:
    shape = KVShape(30, 3, 64, 2)
    total = rival.account(shape, tokens, 0, RunPlan())
    assert total / shape.full_kv_bytes(tokens) == pytest.approx(share, abs=0.003)


def test_kivi_on_eight_heads() -> None:
    shape = KVShape(32, 8, 128, 2)
    assert Kivi().account(shape, 32768, 0, RunPlan()) / shape.full_kv_bytes(32768) == pytest.approx(0.189, abs=0.002)


# ---- ZipCache -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["paper", "repo"])
def test_zipcache_saliency_example(mode: str) -> None:
    rows = torch.tensor([[1, 0, 0, 0], [0.6, 0.4, 0, 0], [0.5, 0.3, 0.2, 0], [0.4, 0.1, 0.2, 0.3]])
    assert rows.sum(0).tolist() == pytest.approx([2.5, 0.8, 0.4, 0.3])
    scores = saliency(rows[None, None, None], torch.arange(4), mode)[0, 0]
    torch.testing.assert_close(scores, torch.tensor([0.625, 0.2667, 0.2, 0.3]), atol=1e-4, rtol=0)


def test_zipcache_modes_differ_where_rows_are_missing() -> None:
    rows = torch.tensor([[0.5, 0.3, 0.2, 0], [0.4, 0.1, 0.2, 0.3]])[None, None, None]
    columns = torch.tensor([2, 3])
    paper, repo = (saliency(rows, columns, mode)[0, 0].tolist() for mode in ("paper", "repo"))
    assert paper == pytest.approx([0.45, 0.2, 0.2, 0.3])
    assert repo == pytest.approx([0.9 / 4, 0.4 / 3, 0.4 / 2, 0.3])


def test_zipcache_channel_scale_example() -> None:
    value = torch.tensor([[1.0, 4.0], [2.0, 8.0], [0.5, 16.0], [-1.0, -4.0]])[None, None]
    scale = channel_scale(value)
    torch.testing.assert_close(scale[0, 0].float(), torch.tensor([1.4142, 4.0]), atol=1e-3, rtol=0)
    expected = torch.tensor([[0.7071, 1.0], [1.4142, 2.0], [0.3536, 4.0], [-0.7071, -1.0]])
    torch.testing.assert_close((value / scale.float().unsqueeze(2))[0, 0], expected, atol=1e-3, rtol=0)


def test_zipcache_salient_tokens_are_finer() -> None:
    part = staged(50)
    scores = torch.rand(1, 2, 50, generator=torch.Generator().manual_seed(0))
    block = Block(ZipCache(), part.key, part.value, scores, torch.float32)
    key, _ = block.read()
    exact = part.key.gather(2, block.order().unsqueeze(-1).expand_as(part.key))
    error = (key - exact).abs().mean(-1)
    assert bool((block.salient().sum(-1) == 30).all())
    assert float(error[:, :, :30].mean()) < 0.5 * float(error[:, :, 30:].mean())
    salient = scores.masked_fill(~block.salient(), torch.inf).amin(-1)
    assert bool((salient >= scores.masked_fill(block.salient(), -1.0).amax(-1)).all())


def test_zipcache_never_rewrites_a_code() -> None:
    model = loaded()
    cache = build("zipcache")
    follow(model, cache, prompt(), prompt(1, 11, 1))
    before = {
        name: tensor.clone() for name, tensor in cache.persistent_tensors().items() if ".0_" in name or ".1_" in name
    }
    for step in range(25):
        feed(model, cache, prompt(1, 1, step), start=171 + step)
    after = cache.persistent_tensors()
    assert cache.residents[0].counters == {"blocks": 4}
    assert before and all(torch.equal(after[name], tensor) for name, tensor in before.items())


# ---- KVQuant --------------------------------------------------------------------------------------------------


def samples(values: Tensor) -> nuq.Samples:
    return nuq.Samples([values], [values], None, None, "")


def test_kmeans_finds_what_is_there() -> None:
    points = torch.tensor([-1.0, -1.0, -0.25, 0.5, 0.5, 1.0])
    assert kmeans(points, None, 4).tolist() == [-1.0, -0.25, 0.5, 1.0]
    weighted = kmeans(torch.tensor([0.0, 1.0, 10.0]), torch.tensor([1.0, 3.0, 1.0]), 2)
    assert weighted.tolist() == pytest.approx([0.75, 10.0])


def test_nearest_centroid() -> None:
    lut = torch.tensor([-1.0, 0.0, 0.5, 1.0])
    values = torch.linspace(-1.2, 1.2, 101)
    want = (values[:, None] - lut).abs().argmin(1)
    assert torch.equal(nearest(values, lut).long(), want)


def test_as_many_values_as_codes_are_exact_without_outliers() -> None:
    levels = torch.tensor([-1.0, -0.5, 0.5, 1.0])
    key = levels[torch.randint(0, 4, (64, 64), generator=torch.Generator().manual_seed(0))]
    key[0], key[1] = levels[[0, 3]].repeat(32), levels[[3, 0]].repeat(32)
    book = fit(samples(key), 2, 0.0, 0, False)
    part = staged(64)
    table = _table()
    post = table.apply(key.view(64, 2, 32).transpose(0, 1)[None], torch.arange(64))
    part.key, part.value = post, key.view(64, 2, 32).transpose(0, 1)[None].contiguous()
    layer = NuqLayer(KVQuant(bits=2, outliers=0.0, sinks=0), part, context(64), book, table)
    got_key, got_value = layer.dense(0)[1]
    torch.testing.assert_close(got_key, post[0, 1], atol=2e-3, rtol=0)
    torch.testing.assert_close(got_value, part.value[0, 1], atol=2e-3, rtol=0)


@given(st.integers(0, 10_000), st.sampled_from([0.01, 0.03, 0.1]))
def test_outliers_are_exactly_as_many_as_asked_for(seed: int, share: float) -> None:
    """Also with ties: values from a handful of levels."""
    values = torch.randint(0, 3, (5, 192), generator=torch.Generator().manual_seed(seed)).float()
    mask, low, high = value_outliers(values, share)
    count = sum(split_counts(192, share))
    assert count == -int(-share * 192 // 1)
    assert mask.sum(-1).tolist() == [count] * 5
    assert bool((low <= high).all())


def test_more_bits_never_hurt() -> None:
    values = torch.randn(400, 64, generator=torch.Generator().manual_seed(1))
    errors = []
    for bits in (2, 3, 4, 5):
        book = fit(samples(values), bits, 0.01, 0, False)
        points = nuq.normalised(values, book.key_low.float(), book.key_high.float()).clamp(-1, 1)
        errors.append(float((book.key_lut.float()[nearest(points, book.key_lut).long()] - points).square().mean()))
    assert errors == sorted(errors, reverse=True)


def test_a_planted_spike_is_kept() -> None:
    values = torch.randn(200, 64, generator=torch.Generator().manual_seed(2))
    book = fit(samples(values), 3, 0.01, 0, False)
    part = staged(40)
    table = _table()
    flat = values[:40].clone()
    flat[17, 40] = 50.0
    part.key = table.apply(flat.view(40, 2, 32).transpose(0, 1)[None], torch.arange(40))
    part.value = flat.view(40, 2, 32).transpose(0, 1)[None].contiguous()
    layer = NuqLayer(KVQuant(bits=3, sinks=0), part, context(40), book, table)
    key, value = layer.dense(0)[1]
    plain = table.undo(key, torch.arange(40))
    assert float(plain[17, 8]) == pytest.approx(50.0, rel=1e-4)
    assert float(value[17, 8]) == 50.0


def test_a_decoded_token_is_coded_as_a_prompt_token() -> None:
    """Frozen thresholds and the outlier path hold for later tokens too."""
    values = torch.randn(200, 64, generator=torch.Generator().manual_seed(2))
    book = fit(samples(values), 3, 0.02, 0, False)
    part, table = staged(40, scale=1.5), _table()
    whole = NuqLayer(KVQuant(bits=3), part, context(40), book, table)
    head = Staged(part.key[:, :, :25], part.value[:, :, :25], part.query, None, part.module)
    grown = NuqLayer(KVQuant(bits=3), head, context(25), book, table)
    for token in range(25, 40):
        grown.append(part.key[:, :, token : token + 1], part.value[:, :, token : token + 1])
    assert whole.counters["key_outliers"] > 0
    for name, tensor in whole.tensors().items():
        assert torch.equal(grown.tensors()[name], tensor), name


def test_fisher_weighs_what_matters() -> None:
    values = torch.randn(300, 64, generator=torch.Generator().manual_seed(3))
    weight = (values > 0).float() * 100 + 1e-3
    plain = fit(samples(values), 2, 0.0, 0, False)
    weighted = fit(nuq.Samples([values], [values], [weight], [weight], ""), 2, 0.0, 0, False)
    assert int((weighted.key_lut > 0).sum()) > int((plain.key_lut > 0).sum())


def test_calibration_is_kept_with_the_model() -> None:
    model = loaded()
    wanted = {"bits": 3, "share": 0.01, "tokens": 200, "fisher": False, "qnorm": False}
    first = nuq.codebooks(model.model, model.tokenizer, **wanted)
    assert nuq.codebooks(model.model, None, **wanted) is first
    with pytest.raises(ConfigError, match="tokenizer"):
        nuq.codebooks(model.model, None, **(wanted | {"tokens": 199}))


def test_gradients_reach_every_layer() -> None:
    model = loaded()
    found = nuq.collect(model.model, model.tokenizer, 120, True)
    assert found.key_weight is not None and found.value_weight is not None
    assert all(float(weight.sum()) > 0 for weight in [*found.key_weight, *found.value_weight])
    assert all(parameter.grad is None for parameter in model.model.parameters())


class _Coded(torch.nn.Module):
    """A linear layer that gradients do not pass by themselves."""

    def __init__(self, plain: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features, self.plain = plain.in_features, [plain]

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.plain[0](x)


def test_gradients_pass_weights_in_another_form() -> None:
    plain, coded = tiny_loaded(), tiny_loaded()
    for layer in coded.model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, module in list(part.named_children()):
                if isinstance(module, torch.nn.Linear):
                    setattr(part, name, _Coded(module))
    want = nuq.collect(plain.model, plain.tokenizer, 60, True)
    got = nuq.collect(coded.model, coded.tokenizer, 60, True)
    assert want.key_weight is not None and got.key_weight is not None
    for mine, theirs in zip(got.key_weight, want.key_weight, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-3)
    assert not any(module._forward_hooks for module in coded.model.modules())


def test_projection_in_another_form_weighs_values_alike() -> None:
    linear = torch.nn.Linear(64, 48, bias=True)
    holder, other = torch.nn.Module(), torch.nn.Module()
    holder.o_proj, other.o_proj = linear, _Coded(linear)
    like = torch.zeros(1)
    torch.testing.assert_close(output_weight(other, 64, like), output_weight(holder, 64, like))
    with pytest.raises(UnsupportedModelError, match="o_proj"):
        output_weight(torch.nn.Module(), 64, like)
