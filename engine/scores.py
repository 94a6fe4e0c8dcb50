"""How windows are ranked: rankers, the query ring of deferred scoring, and prompt column masses.

    S_t(w) = S_{t-Ω}(w) + (1/H_q) Σ_h Σ_τ Σ_{i∈w} a_τ^h(i)                       (paper §2.2)

A backend that returns only a log-sum-exp uses *deferred scoring*: between two events the accessible
set grows by local tokens only, so the last queries and their log-sum-exps give the very same masses
at the event: a = exp(q·k·scale - lse). Probabilities and sums are float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.config import QEvictConfig

QUERY_CHUNK = 256


@dataclass(frozen=True, slots=True)
class Ranker:
    """What one query adds to a window, and how a state is ranked; higher is better.

    cumulative: Σ a. decayed: S ← γS + a per step, γ from the half-life. p_norm: Σ a^p, ranked by the
    p-th root (order is the same). key_norm: sign · mean ‖k‖₂, no attention needed.
    """

    config: QEvictConfig

    @property
    def uses_attention(self) -> bool:
        return self.config.ranker != "key_norm"

    @property
    def power(self) -> float:
        return self.config.norm_p if self.config.ranker == "p_norm" else 1.0

    @property
    def decay(self) -> float:
        """γ per step; 1 where nothing decays."""
        return 0.5 ** (1.0 / self.config.decay_half_life) if self.config.ranker == "decayed" else 1.0

    def query_weights(self, queries: int, device: torch.device) -> Tensor | None:
        """Weight of each of the last `queries` queries, oldest first; None = all 1."""
        if self.decay == 1.0:
            return None
        age = torch.arange(queries - 1, -1, -1, device=device, dtype=torch.float32)
        return torch.exp(age * math.log(self.decay))

    def prompt_weights(self, queries: int, device: torch.device) -> Tensor | None:
        """The same for the queries of a prompt; all 0 where only its last n count, known when it ends."""
        if self.config.prefill_queries is None:
            return self.query_weights(queries, device)
        return torch.zeros(queries, device=device)

    def tail_weights(self, queries: int, device: torch.device) -> Tensor:
        """Weights of a prompt's last n queries, scored when it has ended."""
        weights = self.query_weights(queries, device)
        return torch.ones(queries, device=device) if weights is None else weights

    def rank(self, scores: Tensor, first_columns: Tensor, seq_len: int) -> Tensor:
        """What windows are ranked by; `age_normalised` divides by the queries that could see the window."""
        if not self.config.age_normalised or not self.uses_attention:
            return scores
        return scores / (seq_len - first_columns).clamp_min(1)

    def key_scores(self, key: Tensor) -> Tensor:
        """sign · mean ‖k‖₂ of windows [..., heads, Ω, d] → [...]; the mean runs over heads and tokens."""
        norms = torch.linalg.vector_norm(key.float(), dim=-1)
        return self.config.key_norm_sign * torch.mean(norms, dim=(-1, -2))


class QueryRing:
    """Queries and log-sum-exps since the last event, for deferred scoring: workspace.

    `query` is [L, B, H_q, R, d] and `lse` [L, B, H_q, R], R the routing interval.
    """

    def __init__(self, layers: int, batch: int, heads: int, size: int, head_dim: int, like: Tensor) -> None:
        self.query = torch.zeros(layers, batch, heads, size, head_dim, dtype=like.dtype, device=like.device)
        self.lse = torch.zeros(layers, batch, heads, size, dtype=torch.float32, device=like.device)
        self.count = 0

    def put(self, layer: int, query: Tensor, lse: Tensor) -> None:
        """Keeps one layer's query [B, H_q, 1, d] and lse [B, H_q] at the current place."""
        self.query[layer, :, :, self.count] = query[:, :, 0]
        self.lse[layer, :, :, self.count] = lse

    @property
    def nbytes(self) -> int:
        return self.query.nbytes + self.lse.nbytes


def key_masses(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    *,
    scale: float,
    softcap: float | None,
    visible: Tensor,
    weights: Tensor | None,
    power: float,
) -> Tensor:
    """Σ over queries of weight · a^power for every key.

    Args:
        query: [B, H_q, T, d]. key: [B, H_kv, K, d]. lse: [B, H_q, T].
        visible: bool, broadcastable to [B, 1 or H_kv, T, K].
        weights: [T] or None. power: exponent of the probabilities.

    Returns:
        float32 [B, H_q, K].
    """
    batch, heads, tokens, dim = query.shape
    kv = key.shape[1]
    grouped = query.reshape(batch, kv, heads // kv, tokens, dim).float()
    logits = grouped @ key.float().unsqueeze(2).transpose(-1, -2) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits - lse.reshape(batch, kv, heads // kv, tokens, 1)
    mass = torch.where(visible.unsqueeze(2), logits.exp(), 0.0)
    if power != 1.0:
        mass = mass**power
    if weights is None:
        return mass.sum(3).reshape(batch, heads, -1)
    return (weights @ mass).reshape(batch, heads, -1)


def group_mean(masses: Tensor, groups: int) -> Tensor:
    """Mean over the query heads of each decision group: [B, H_q, K] → [B·G, K]."""
    batch, heads, places = masses.shape
    return masses.reshape(batch * groups, heads // groups, places).mean(1)


def prompt_column_masses(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    *,
    scale: float,
    softcap: float | None,
    query_start: int,
    key_start: int,
    first_valid: int,
    weights: Tensor | None,
    power: float,
) -> Tensor:
    """Column sums of a causal prompt, in chunks of queries, only below the diagonal.

    Args:
        query: [1, H_q, T, d] at columns `query_start` on. key: [1, H_kv, K, d] at columns `key_start` on.
        lse: [1, H_q, T]. first_valid: first column that is no padding.

    Returns:
        float32 [H_q, K]: never materialises [T, K] at once.
    """
    tokens, keys = query.shape[2], key.shape[2]
    total = torch.zeros(query.shape[1], keys, device=query.device)
    key_columns = torch.arange(key_start, key_start + keys, device=query.device)
    for begin in range(0, tokens, QUERY_CHUNK):
        end = min(begin + QUERY_CHUNK, tokens)
        part = None if weights is None else weights[begin:end]
        if part is not None and not bool(part.any()):
            continue
        reach = min(keys, query_start + end - key_start)
        columns = torch.arange(query_start + begin, query_start + end, device=query.device)
        seen = key_columns[None, :reach] <= columns[:, None]
        seen &= (key_columns[None, :reach] >= first_valid) & (columns[:, None] >= first_valid)
        total[:, :reach] += key_masses(
            query[:, :, begin:end],
            key[:, :, :reach],
            lse[:, :, begin:end],
            scale=scale,
            softcap=softcap,
            visible=seen[None, None],
            weights=part,
            power=power,
        )[0]
    return total
