"""Plain causal attention of one sequence over all that it has seen, with its probabilities.

For the FullKV twin and for recordings, which hand the probabilities on; nothing that is fast.
"""

from __future__ import annotations

import torch
from torch import Tensor


def causal_probabilities(query: Tensor, key: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Probabilities [H_q, T, S] in float32 of query [1, H_q, T, d], the last T of the S columns of key [H_kv, S, d]."""
    heads, tokens, dim = query.shape[1:]
    kv, columns = key.shape[:2]
    grouped = query[0].reshape(kv, heads // kv * tokens, dim).float()
    logits = (grouped @ key.float().transpose(-1, -2)) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.view(heads, tokens, columns)
    above = torch.ones(tokens, tokens, dtype=torch.bool, device=logits.device).triu(1)
    logits[:, :, columns - tokens :].masked_fill_(above, -torch.inf)
    return logits.softmax(-1)


def weighted_values(probs: Tensor, value: Tensor) -> Tensor:
    """Output [1, H_q, T, d] in float32 of probabilities [H_q, T, S] over value [H_kv, S, d]."""
    heads, tokens, columns = probs.shape
    kv, _, dim = value.shape
    out = probs.view(kv, heads // kv * tokens, columns) @ value.float()
    return out.view(1, heads, tokens, dim)
