"""Linear layers in fewer bits than float32, each run by a kernel of torch; activations come and go as they are.

Three forms, for a CPU: 4-bit codes in groups (what a GGUF file holds, kept as it is), float16 with float32 sums, and
bfloat16. A form is a module like any other: every cache that a model is run with meets the same weights.
Knows nothing of files, of models, or of which form is the fastest here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

Rows: TypeAlias = Callable[[Tensor], Tensor]
"""x [..., in] → y [..., out] in the dtype of x, without a bias."""

NIBBLE_ZERO = 8
"""torch's kernel computes (code - 8) · scale + zero."""
_GROUP_SIZES = (32, 64, 128, 256)
_OUT_MULTIPLE = 16
_INNER_TILES = 2


class CodedRows:
    """4-bit codes by torch's int4 kernel. The kernel is fast in bfloat16 only, which rounds x, y and the scales.

    Args:
        codes: uint8 [out, in], 0..15.
        scale, minimum: [out, in / group]; a weight is scale · code + minimum.
    """

    def __init__(self, codes: Tensor, scale: Tensor, minimum: Tensor) -> None:
        self.group = codes.shape[1] // scale.shape[1]
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), _INNER_TILES)
        scale, minimum = scale.float(), minimum.float()
        pairs = torch.stack([scale, minimum + NIBBLE_ZERO * scale], -1)
        self.packed: Tensor = packed
        self.scales = pairs.transpose(0, 1).to(torch.bfloat16).contiguous()

    @staticmethod
    def fits(out_features: int, in_features: int, groups: int) -> bool:
        """Whether torch's kernel takes this shape."""
        whole = groups > 0 and in_features % groups == 0
        return whole and in_features // groups in _GROUP_SIZES and out_features % _OUT_MULTIPLE == 0

    def __call__(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)
        out: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(flat, self.packed, self.group, self.scales)
        return out.to(x.dtype).view(*x.shape[:-1], -1)

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scales.nbytes


class HalfRows:
    """float16 weights, float32 activations and sums, by the FBGEMM library inside torch (x86 only)."""

    def __init__(self, weight: Tensor) -> None:
        self.packed: Any = torch.ops.quantized.linear_prepack_fp16(weight.float().contiguous(), None)
        self.nbytes = 2 * weight.numel()

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.quantized.linear_dynamic_fp16(x.float(), self.packed)
        return out.to(x.dtype)


class BrainRows:
    """bfloat16 weights; x and y are rounded to bfloat16 too, sums are float32."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.to(torch.bfloat16)
        self.nbytes = self.weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x.to(torch.bfloat16), self.weight).to(x.dtype)


class PlainRows:
    """The weight as it is."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.nbytes = weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)


FORMS: dict[str, Callable[[Tensor], Rows]] = {"float32": PlainRows, "bfloat16": BrainRows, "float16": HalfRows}
"""How a float32 weight [out, in] becomes each form; "int4" needs codes instead."""


def runs(form: str) -> bool:
    """Whether torch can run `form` on this machine's CPU at all; says nothing about speed."""
    try:
        if form == "int4":
            codes = torch.zeros(16, 32, dtype=torch.uint8)
            CodedRows(codes, torch.ones(16, 1), torch.zeros(16, 1))(torch.zeros(1, 32))
        else:
            FORMS[form](torch.zeros(16, 32))(torch.zeros(1, 32))
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return True


class LowBitLinear(nn.Module):
    """A linear layer in up to two forms: one for few rows (decoding), one for many (a prompt).

    Args:
        few: form for up to `few_rows` rows. many: form for more; the same object where one form does both.
        few_rows: largest number of rows that `few` takes.
        bias: [out] or None.
    """

    anchor: Tensor

    def __init__(self, few: Rows, many: Rows, few_rows: int, in_features: int, out_features: int, bias: Any) -> None:
        super().__init__()
        self.in_features, self.out_features, self.few_rows = in_features, out_features, few_rows
        self.few, self.many = few, many
        self.bias: Tensor | None = bias
        # Code that asks a module for its device looks at its first parameter; the forms hold no parameters.
        self.anchor = nn.Parameter(torch.zeros(0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] → [..., out] in the dtype of x."""
        out = self.few(x) if x.numel() <= self.few_rows * self.in_features else self.many(x)
        return out if self.bias is None else out + self.bias

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, few_rows={self.few_rows}"
