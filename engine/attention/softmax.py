"""Attention over one set of keys with its log-sum-exp, and the merge of several sets.

    out = Σ_p w_p · out_p,   w_p = exp(lse_p - lse),   lse = log Σ_p exp(lse_p)          (exact)

Without softcap torch's flash kernels do the work: on a CPU always, on a CUDA device in half precision and
without a bias. Everything else is plain torch in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

NO_KEYS = -1e30
"""Log-sum-exp of an empty set: finite, so that a merge has no NaN."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    causal: bool = False,
    bias: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp.

    Args:
        query: [B, H_q, T, d]; key, value: [B, H_kv, K, d] of the same dtype.
        scale: softmax scale. causal: query i sees keys up to i (T = K).
        bias: added to the logits, broadcastable to [B, H_kv, T, K], finite.

    Returns:
        out [B, H_q, T, d] in the query's dtype, lse float32 [B, H_q, T].
    """
    batch, heads, tokens, dim = query.shape
    kv, keys = key.shape[1], key.shape[2]
    if keys == 0:
        return torch.zeros_like(query), torch.full((batch, heads, tokens), NO_KEYS, device=query.device)
    if query.device.type == "cpu" and softcap is None:
        return _flash_cpu(query, key, value, scale=scale, causal=causal, bias=bias)
    if query.device.type == "cuda" and bias is None and softcap is None and _flash_takes(query, key, causal):
        return _flash_cuda(query, key, value, scale=scale, causal=causal)
    grouped = query.reshape(batch, kv, heads // kv, tokens, dim).float()
    logits = grouped @ key.float().unsqueeze(2).transpose(-1, -2) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if bias is not None:
        logits = logits + bias.float().unsqueeze(2)
    if causal:
        later = torch.ones(tokens, keys, dtype=torch.bool, device=query.device).triu(1)
        logits = logits.masked_fill(later, NO_KEYS)
    lse = logits.logsumexp(-1)
    out = (logits - lse.unsqueeze(-1)).exp() @ value.float().unsqueeze(2)
    return out.reshape(batch, heads, tokens, dim).to(query.dtype), lse.reshape(batch, heads, tokens)


def _flash_cpu(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, causal: bool, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """torch's CPU flash kernel; a query head group is folded into the query length at T = 1."""
    batch, heads, tokens, dim = query.shape
    kv = key.shape[1]
    fold = tokens == 1 and heads != kv
    if fold:
        query = query.reshape(batch, kv, heads // kv, dim)
    if bias is not None:
        # float16 would turn the bias into -inf, and a row that sees nothing into a log-sum-exp of 0.
        bias = bias.clamp_min(torch.finfo(query.dtype).min / 2).to(query.dtype)
        if bias.shape[1] not in (1, query.shape[1]):
            bias = bias.repeat_interleave(query.shape[1] // bias.shape[1], 1)
        bias = bias.expand(batch, -1, query.shape[2], -1)
    # A strided head axis is fine, a strided channel axis is not.
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=bias, scale=scale
    )
    return (out.reshape(batch, heads, tokens, dim), lse.reshape(batch, heads, tokens).float())


def _flash_takes(query: Tensor, key: Tensor, causal: bool) -> bool:
    """Whether torch's CUDA flash kernel can serve these: its own checks are skipped by a direct call.

    Causal with fewer queries than keys is left out: that kernel aligns the diagonal at the end, our callers
    at the start.
    """
    half = query.dtype in (torch.float16, torch.bfloat16) and key.dtype == query.dtype
    dim = query.shape[-1]
    return (
        half
        and dim % 8 == 0
        and dim <= 256
        and (not causal or query.shape[2] == key.shape[2])
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def _flash_cuda(query: Tensor, key: Tensor, value: Tensor, *, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """torch's CUDA flash kernel, which takes grouped KV heads as they are; `benchmarks/gpu_check.py` checks it."""
    # A strided channel axis is not fine. The log-sum-exp may be padded along the queries.
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    found = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, False, scale=scale)
    return found[0], found[1][..., : query.shape[2]].float()


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Joins attention over disjoint key sets: (out [..., T, d], lse [..., T]) each; weights in float32."""
    if len(parts) == 1:
        return parts[0]
    lses = torch.stack([lse for _, lse in parts])
    total = lses.logsumexp(0)
    weights = (lses - total).exp().unsqueeze(-1)
    out = sum((weights[i] * part.float() for i, (part, _) in enumerate(parts)), torch.zeros((), device=total.device))
    return out.to(parts[0][0].dtype), total
