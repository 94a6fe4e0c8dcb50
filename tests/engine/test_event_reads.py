"""A routing event makes the host wait once, and costs as many operations for 30 layers as for 2."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from engine.config import QEvictConfig
from engine.event_read import read_event
from engine.move_plan import plan_moves
from engine.trace import Tier
from tests.engine.drive import BACKENDS, Drive

# What makes a host wait for a device: a value, a size that only the device knows, or a copy to the host.
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim", "item"}
ASKING = {"cpu", "numpy", "tolist", "item", "__bool__", "__int__", "__float__", "__index__", "__contains__", "nonzero"}


class Operations(TorchDispatchMode):
    """Counts what is dispatched, and notes what would wait."""

    def __init__(self) -> None:
        super().__init__()
        self.all: Counter[str] = Counter()
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.all[name] += 1
        if name in WAITING or (name == "repeat_interleave" and isinstance(args[-1], torch.Tensor)):
            self.waits.append(name)
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            self.waits += [f"{name} by a mask" for at in args[1] if at is not None and at.dtype in MASKS]
        return func(*args, **(kwargs or {}))


MASKS = (torch.bool, torch.uint8)


class Questions(TorchFunctionMode):
    """Notes what the host asks of tensors, in the names of the public interface."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.kept: list[torch.Tensor] = []
        """Results of copies to the host: what is done to them is free."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        out = func(*args, **(kwargs or {}))
        if name in ASKING and not (name == "numpy" and any(args[0] is copy for copy in self.kept)):
            self.asked.append(name)
        if name == "cpu":
            self.kept.append(out)
        return out


def watched(work: Callable[[], object]) -> tuple[Operations, Questions]:
    operations, questions = Operations(), Questions()
    with questions, operations:
        work()
    return operations, questions


def test_the_watch_sees_what_waits() -> None:
    x = torch.arange(6)
    mask = x > 2
    for work, what in (
        (lambda: x[2].item(), "_local_scalar_dense"),
        (lambda: bool(mask.any()), "_local_scalar_dense"),
        (lambda: int(x.max()), "_local_scalar_dense"),
        (lambda: mask.nonzero(), "nonzero"),
        (lambda: x[mask], "index by a mask"),
        (lambda: x.clone().index_put_((mask,), x[:3]), "index_put_ by a mask"),
        (lambda: torch.equal(x, x), "equal"),
    ):
        operations, _ = watched(work)
        assert what in operations.waits, what
    for work, what in ((lambda: x.tolist(), "tolist"), (lambda: x.cpu(), "cpu"), (lambda: x.numpy(), "numpy")):
        _, questions = watched(work)
        assert questions.asked == [what]
    operations, questions = watched(lambda: (x + 1).cumsum(0).gather(0, x).where(mask, x)[x].sum())
    assert not operations.waits and not questions.asked


def events(layers: int, backend: str, traced: bool, **changes: Any) -> list[tuple[Operations, Questions]]:
    """Watched events of a run in which every layer sees the same."""
    config = QEvictConfig(
        **{
            "window_size": 4,
            "sink_tokens": 5,
            "local_tokens": 8,
            "kv_budget": 0.35,
            "planned_new_tokens": 40,
            **changes,
        },
        backend=backend,
    )
    drive = Drive(config, layers=layers, seed=2, spread=1.5, pads=(0, 3))
    if not traced:
        drive.cache.on_route = None
    found = []
    route = drive.cache._route
    drive.cache._route = lambda: found.append(watched(route))  # type: ignore[method-assign]
    donor = Drive(config, layers=1, seed=2, spread=1.5, pads=(0, 3))
    for tokens in [61, *[1] * 10, 9, 1]:
        donor.columns = drive.columns
        drive.feed(donor.draw(tokens) * layers)
    assert len(found) >= 4
    board = drive.cache.board
    assert bool((board == Tier.EVICTED).any())
    assert bool((board == Tier.QUANT).any()) == (config.quant_share > 0)
    return found


CASES: list[tuple[str, bool, dict[str, Any]]] = [
    *((backend, True, {}) for backend in BACKENDS),
    ("sdpa", False, {}),
    ("sdpa", True, {"score_scope": "kv_head"}),
    ("sdpa", True, {"ranker": "key_norm"}),
    ("sdpa", True, {"ranker": "decayed"}),
    ("eager", True, {"quant_share": 0.0, "age_normalised": True}),
]


@pytest.mark.parametrize(("backend", "traced", "changes"), CASES, ids=str)
def test_an_event_reads_once_for_any_number_of_layers(backend: str, traced: bool, changes: dict[str, Any]) -> None:
    few, many = (events(layers, backend, traced, **changes) for layers in (2, 30))
    assert len(few) == len(many)
    for (small, asked), (large, asked_of_many) in zip(few, many, strict=True):
        assert not small.waits and not large.waits
        assert asked.asked == asked_of_many.asked == ["cpu"]
        assert small.all == large.all, "the number of operations must not depend on the number of layers"


def test_what_is_read_is_what_was_there() -> None:
    generator = torch.Generator().manual_seed(0)
    counts = [torch.randint(0, 90, (7,), generator=generator) for _ in range(3)]
    boards = (
        torch.rand(7, 11, generator=generator)[:, :5],
        torch.randint(0, 6, (7, 5), dtype=torch.uint8, generator=generator),
        torch.randint(0, 6, (7, 3), dtype=torch.uint8, generator=generator),
    )
    sizes = torch.tensor([3, 0, 5, 1, 2, 9])
    for flag in (True, False):
        read = read_event(sizes, counts, torch.tensor(flag), boards)
        assert read.sizes == sizes.tolist() and read.came_back is flag
        assert np.array_equal(read.occupied, torch.stack(counts).numpy())
        assert all(torch.equal(a, b) for a, b in zip(read.boards, boards, strict=True))
    assert read_event(sizes, counts, torch.tensor(False)).boards == ()


def test_a_plan_by_hand() -> None:
    """One row, five arena slots, four ledger slots, two staged blocks, the last of them open."""
    sink, local, full, quant, gone, empty = (int(tier) for tier in Tier)
    arena = [sink, quant, full, gone, quant]  # slot 1 goes down for the first time, slot 4 has a shadow in 3
    ledger = [full, quant, gone, empty]  # 0 rises; 3 is the shadow
    targets = torch.tensor([[*arena, *ledger, quant, local]], dtype=torch.uint8)
    owner = torch.tensor([[-1, -1, -1, -1, 3]])
    plan = plan_moves(targets, owner, torch.tensor([4]), places=4, open_block=True)
    # Arena: sink and full stay where they can; the risen window and the open block follow, the open one last.
    assert plan.arena_count.tolist() == [4] and plan.live_count.tolist() == [4] and plan.shadow_count.tolist() == [1]
    assert plan.arena_source[0].tolist() == [0, 5, 2, 10, 11]
    # Ledger: entry 1 stays live, entry 3 is live again in its place; new ones take the rest of the front.
    assert plan.ledger_source[0].tolist() == [1, 6, 9, 8]
    assert plan.revived[0].tolist() == [False, False, False, True] and int(plan.revived_by[0, 3]) == 4
    to_arena, to_ledger = plan.lists(plan.sizes().tolist())
    assert [(m.to.tolist(), m.source.tolist()) for m in to_arena] == [([], []), ([1], [5]), ([3], [10])]
    assert [(m.to.tolist(), m.source.tolist()) for m in to_ledger] == [([0], [1]), ([], []), ([2], [9])]
