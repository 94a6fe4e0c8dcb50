"""The decision against sorted lists."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import torch
from hypothesis import given, settings

from engine.routing import Candidates, decide
from engine.trace import Tier


@st.composite
def tables(draw: st.DrawFn) -> tuple[Candidates, torch.Tensor, torch.Tensor]:
    """Random rows: places in any order, holes, ties, entries of live and promoted windows."""
    rows, places = draw(st.integers(1, 3)), draw(st.integers(1, 14))
    blocks, scores, quantized, recorded = [], [], [], []
    for _ in range(rows):
        ids = draw(st.permutations(range(places)))
        present = draw(st.lists(st.booleans(), min_size=places, max_size=places))
        blocks.append([i if here else -1 for i, here in zip(ids, present, strict=True)])
        scores.append(draw(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]), min_size=places, max_size=places)))
        kinds = draw(st.lists(st.sampled_from("fqr"), min_size=places, max_size=places))
        quantized.append([kind == "q" for kind in kinds])
        recorded.append([kind in "qr" for kind in kinds])
    capacities = [torch.tensor(draw(st.lists(st.integers(0, 8), min_size=rows, max_size=rows))) for _ in range(2)]
    table = Candidates(torch.tensor(blocks), torch.tensor(scores), torch.tensor(quantized), torch.tensor(recorded))
    return table, capacities[0], capacities[1]


@settings(max_examples=300)
@given(tables(), st.booleans())
def test_equals_sorted_lists(drawn: tuple[Candidates, torch.Tensor, torch.Tensor], promotion: bool) -> None:
    table, full_capacity, quant_capacity = drawn
    targets = decide(table, full_capacity, quant_capacity, promotion)
    for n in range(table.blocks.shape[0]):
        here = [place for place, block in enumerate(table.blocks[n].tolist()) if block >= 0]
        here.sort(key=lambda p: (-table.scores[n, p].item(), table.blocks[n, p].item()))
        rising = [p for p in here if promotion or not table.quantized[n, p]]
        full = rising[: int(full_capacity[n])]
        shadows = sum(bool(table.recorded[n, p]) for p in full)
        rest = [p for p in here if p not in full]
        quant = rest[: max(0, int(quant_capacity[n]) - shadows)]
        for place in range(table.blocks.shape[1]):
            wanted = Tier.EMPTY if place not in here else Tier.EVICTED
            wanted = Tier.FULL if place in full else Tier.QUANT if place in quant else wanted
            assert targets[n, place] == wanted


@given(tables(), st.randoms())
def test_the_order_of_places_does_not_matter(
    drawn: tuple[Candidates, torch.Tensor, torch.Tensor], chance: random.Random
) -> None:
    table, full_capacity, quant_capacity = drawn
    before = decide(table, full_capacity, quant_capacity, True)
    order = list(range(table.blocks.shape[1]))
    chance.shuffle(order)
    mixed = Candidates(*(getattr(table, name)[:, order] for name in ("blocks", "scores", "quantized", "recorded")))
    assert torch.equal(decide(mixed, full_capacity, quant_capacity, True), before[:, order])


def test_a_tie_goes_to_the_lower_window() -> None:
    no = torch.zeros(1, 4, dtype=torch.bool)
    table = Candidates(torch.tensor([[7, 3, 9, 5]]), torch.ones(1, 4), no, no)
    targets = decide(table, torch.tensor([1]), torch.tensor([2]), True)[0].tolist()
    assert targets == [Tier.QUANT, Tier.FULL, Tier.EVICTED, Tier.QUANT]


def test_shadows_of_promoted_windows_are_charged() -> None:
    """K_q' = K_q − entries owned by members of F': two live windows rise, one place is left."""
    blocks, scores = torch.arange(5)[None], torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0]])
    live = torch.tensor([[True, True, True, True, True]])
    targets = decide(Candidates(blocks, scores, live, live), torch.tensor([2]), torch.tensor([3]), True)[0].tolist()
    assert targets == [Tier.FULL, Tier.FULL, Tier.QUANT, Tier.EVICTED, Tier.EVICTED]
    barred = decide(Candidates(blocks, scores, live, live), torch.tensor([2]), torch.tensor([3]), False)[0].tolist()
    assert barred == [Tier.QUANT, Tier.QUANT, Tier.QUANT, Tier.EVICTED, Tier.EVICTED]
