"""The codec: half a step, packing, extremes."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis.extra import numpy as hnp

from engine.quant import SCALE_FLOOR, QuantizedWindows, dequantize, quantize, unpack
from tests.engine.oracle import quantize_line

FINITE = st.floats(-60_000, 60_000, width=32)


def steps(packed: QuantizedWindows, value_groups: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Step of every key and value element, [..., 1, d] and [..., Ω, d]."""
    value = packed.value_scale.float().transpose(-1, -2).repeat_interleave(dim // value_groups, -1)
    return packed.key_scale.float().unsqueeze(-2), value


@settings(max_examples=150)
@given(st.data(), st.sampled_from([2, 4]), st.sampled_from([1, 2, 4]), st.sampled_from([4, 8, 16, 32]))
def test_every_element_lies_within_half_a_step(data: st.DataObject, bits: int, groups: int, window: int) -> None:
    """Also where channels are constant, huge, tiny or far from zero."""
    key = torch.from_numpy(data.draw(hnp.arrays(np.float32, (2, window, 8), elements=FINITE)))
    value = torch.from_numpy(data.draw(hnp.arrays(np.float32, (2, window, 8), elements=FINITE)))
    packed = quantize(key, value, bits, groups)
    back_key, back_value = dequantize(packed, bits)
    for original, back, step in zip((key, value), (back_key, back_value), steps(packed, groups, 8), strict=True):
        assert bool(back.isfinite().all())
        assert bool((step >= SCALE_FLOOR).all())
        error = (original - back).abs()
        assert bool((error <= step * 0.5 + original.abs() * 2e-7 + step * 1e-4).all())


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_half_a_step_of_the_true_range(bits: int, scale: float) -> None:
    """The step itself is no wider than range / levels, but for float16's own grain."""
    torch.manual_seed(1)
    key, value = torch.randn(50, 8, 64) * scale, torch.randn(50, 8, 64) * scale + scale
    packed = quantize(key, value, bits)
    ranges = (key.amax(1) - key.amin(1), value.amax(2) - value.amin(2))
    for wide, step in zip(ranges, (packed.key_scale.float(), packed.value_scale[:, 0].float()), strict=True):
        assert bool((step <= wide / (2**bits - 1) * 1.002 + scale * 2e-3 + SCALE_FLOOR).all())
    back_key, back_value = dequantize(packed, bits)
    assert bool(((key - back_key).abs() <= packed.key_scale.float()[:, None] * 0.501).all())
    assert bool(((value - back_value).abs() <= packed.value_scale[:, 0].float()[..., None] * 0.501).all())


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("groups", [1, 4])
def test_equals_quantization_by_hand(bits: int, groups: int) -> None:
    torch.manual_seed(2)
    key, value = torch.randn(3, 8, 16), torch.randn(3, 8, 16)
    packed = quantize(key, value, bits, groups)
    key_codes, value_codes = unpack(packed.key_codes, bits, -1), unpack(packed.value_codes, bits, -2)
    for n in range(3):
        for channel in range(16):
            codes, scale, zero = quantize_line(key[n, :, channel].double().numpy(), bits)
            assert key_codes[n, channel].tolist() == codes
            assert packed.key_scale[n, channel].item() == scale and packed.key_zero[n, channel].item() == zero
        for token in range(8):
            for group in range(groups):
                part = slice(group * 16 // groups, (group + 1) * 16 // groups)
                codes, scale, zero = quantize_line(value[n, token, part].double().numpy(), bits)
                assert value_codes[n, token, part].tolist() == codes
                assert packed.value_scale[n, group, token].item() == scale
                assert packed.value_zero[n, group, token].item() == zero


@pytest.mark.parametrize("bits, window", [(2, 4), (2, 8), (2, 32), (4, 2), (4, 8)])
def test_packing_goes_there_and_back(bits: int, window: int) -> None:
    """Token t of a channel lies in bits (t mod n)·bits of byte t // n; codes survive exactly."""
    levels, per_byte = 2**bits, 8 // bits
    torch.manual_seed(3)
    codes = torch.randint(0, levels, (5, window, 16))
    codes[:, 0], codes[:, 1] = 0, levels - 1  # pins the range of each channel, so that codes are the input
    packed = quantize(codes.float(), torch.zeros(5, window, 16), bits)
    assert packed.key_codes.shape == (5, 16, window // per_byte)
    assert torch.equal(unpack(packed.key_codes, bits, -1).transpose(-1, -2).long(), codes)
    for token in range(window):
        byte = packed.key_codes[:, :, token // per_byte].long()
        assert torch.equal((byte >> (token % per_byte) * bits) & (levels - 1), codes[:, token])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("constant", [0.0, -0.0, 1.0, -3.7, 65_504.0, -65_504.0, 1e-8, -1e-8, 6e-5])
def test_constant_channels_are_finite_and_close(constant: float, dtype: torch.dtype) -> None:
    key = torch.full((1, 8, 16), constant).to(dtype)
    packed = quantize(key, key, 2)
    for back in dequantize(packed, 2):
        assert bool(back.isfinite().all())
        grain = max(abs(key.float()[0, 0, 0].item()) * 2**-10, SCALE_FLOOR)
        assert bool(((back - key.float()).abs() <= grain).all())


def test_codes_are_never_all_zero_for_real_content() -> None:
    """A known prototype stored zeros."""
    torch.manual_seed(4)
    packed = quantize(torch.randn(10, 8, 64), torch.randn(10, 8, 64), 2)
    for name in ("key_codes", "value_codes", "key_scale", "value_scale", "key_zero", "value_zero"):
        tensor = getattr(packed, name)
        assert bool((tensor.flatten(1).float().abs().sum(1) > 0).all()), name
