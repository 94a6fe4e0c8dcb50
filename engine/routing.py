"""The routing decision, pure: scores, tiers and capacities in, target tiers out (paper §2.3).

    W_cand = F ∪ Q ∪ aged      F' = TopK_{K_f}(W_cand)      Q' = TopK_{K_q'}(W_cand \\ F')      E' = rest

Works on all decision rows at once (layers x batch rows x decision groups); no loop over any of them.
Knows nothing of keys, values or storage.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.trace import Tier


@dataclass(frozen=True, slots=True)
class Candidates:
    """One table of windows that compete; N decision rows, C places.

    Attributes:
        blocks: block id, -1 where the place holds no candidate, [N, C] int.
        scores: what they are ranked by, higher is better, [N, C] float.
        quantized: the window is in Quant now, [N, C] bool.
        recorded: the window owns a ledger entry, live or shadow, [N, C] bool.
    """

    blocks: Tensor
    scores: Tensor
    quantized: Tensor
    recorded: Tensor


def decide(candidates: Candidates, full_capacity: Tensor, quant_capacity: Tensor, promotion: bool) -> Tensor:
    """Target tier of every candidate.

    Full is chosen first. Entries of promoted windows stay in the ledger and are charged, so that
    K_q' = K_q - shadows. Ties go to the lower window id: a stable sort over ids in order.

    Args:
        candidates: N rows of C places.
        full_capacity: K_f, int [N].
        quant_capacity: K_q, int [N].
        promotion: False bars Quant windows from Full (paper Table 18).

    Returns:
        uint8 [N, C]: Tier.FULL, Tier.QUANT, Tier.EVICTED, or Tier.EMPTY where there is no candidate.
    """
    present = candidates.blocks >= 0
    far = torch.iinfo(candidates.blocks.dtype).max
    by_id = torch.where(present, candidates.blocks, far).argsort(dim=1, stable=True)
    ranked = torch.where(present, candidates.scores, -torch.inf).gather(1, by_id)
    order = by_id.gather(1, ranked.argsort(dim=1, descending=True, stable=True))

    here = present.gather(1, order)
    may_rise = here if promotion else here & ~candidates.quantized.gather(1, order)
    full = may_rise & (may_rise.cumsum(1) <= full_capacity[:, None])
    shadows = (full & candidates.recorded.gather(1, order)).sum(1)
    rest = here & ~full
    quant = rest & (rest.cumsum(1) <= (quant_capacity - shadows)[:, None])

    lost = torch.where(rest, int(Tier.EVICTED), int(Tier.EMPTY))
    kept = torch.where(full, int(Tier.FULL), torch.where(quant, int(Tier.QUANT), lost)).to(torch.uint8)
    return torch.empty_like(kept).scatter_(1, order, kept)
