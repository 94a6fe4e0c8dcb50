"""The README's claim: a system of one's own is one class of ten lines and one line in the registry.

The class is read from the README, so that what it shows is what works.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.adapter import cache_keyword
from engine.baselines import registry
from engine.baselines.kept import keep, top_mask
from engine.baselines.matching import BudgetSpec
from engine.baselines.observation import Observer
from engine.compare import CompareOptions, SystemChoice, compare
from engine.trace import Tier
from tests.engine.baselines.matrix import NEW, PROMPT, feed, follow, loaded, plan, prompt

README = Path(__file__).parents[3] / "README.md"
BUDGET = BudgetSpec(share=0.6)


def _blocks() -> tuple[str, str]:
    """The class and the registry's line."""
    told = README.read_text(encoding="utf-8").partition("Add a system in ten lines")[2].partition("</details>")[0]
    code, line = re.findall(r"```python\n(.*?)```", told, re.DOTALL)
    return code, line


@pytest.fixture
def name(monkeypatch: pytest.MonkeyPatch) -> str:
    """Registers the README's system for one test."""
    code, line = _blocks()
    names: dict[str, Any] = {
        "dataclass": dataclasses.dataclass,
        "Observer": Observer,
        "keep": keep,
        "top_mask": top_mask,
        "torch": torch,
    }
    exec(compile(code, str(README), "exec"), names)
    entry = eval(line, names)
    entry = entry[0] if isinstance(entry[0], tuple) else entry
    monkeypatch.setattr(registry, "_SYSTEMS", (*registry._SYSTEMS, entry))
    return str(entry[0])


def test_it_is_ten_lines() -> None:
    code, line = _blocks()
    assert sum(bool(row.strip()) for row in code.splitlines()) <= 10
    assert len(line.strip().splitlines()) == 1


def test_it_is_listed_with_its_parameters(name: str) -> None:
    info = registry.systems()[-1]
    assert (info.name, info.storage, info.budgeted, info.unavailable) == (name, "real", True, None)
    assert {parameter.name for parameter in info.parameters} == {"window", "kernel", "pool", "group"}


def test_it_generates_counts_and_pads(name: str) -> None:
    model = loaded()
    parameters = {"window": 8}
    cache = registry.make(name, model, BUDGET, new_tokens=NEW, parameters=parameters)
    ids = prompt()
    out = model.model.generate(ids, max_new_tokens=8, do_sample=False, **{cache_keyword(model.model): cache})
    assert out.shape[1] == PROMPT + 8
    expected = registry.rival(name, parameters).account(cache.kv_shape, PROMPT, 7, plan(model, BUDGET))
    assert sum(tensor.nbytes for tensor in cache.persistent_tensors().values()) == expected
    assert bool((cache.residency() == Tier.EVICTED).any())

    rows, later, pads = prompt(2), prompt(2, 6, 1), [0, 12]

    def fresh() -> Any:
        return registry.make(name, model, BUDGET, new_tokens=NEW, parameters=parameters)

    together = follow(model, fresh(), rows, later, pads)
    alone = follow(model, fresh(), rows[1:], later[1:], pads[1:])
    torch.testing.assert_close(alone, together[1:], atol=1e-4, rtol=1e-4)


def test_it_keeps_what_it_says(name: str) -> None:
    """The prompt tokens whose values are largest, head by head."""
    model = loaded()
    cache, full = registry.make(name, model, BUDGET, new_tokens=NEW), registry.make("fullkv", model, new_tokens=NEW)
    for one in (cache, full):
        feed(model, one, prompt())
        one.settle()
    for layer in range(2):
        for head, (_, value) in enumerate(full.residents[layer].dense(0)):
            held = cache.residency()[layer, head] == Tier.FULL
            assert float(value[held].norm(dim=-1).min()) >= float(value[~held].norm(dim=-1).max())


def test_it_stands_in_a_comparison(name: str) -> None:
    text = "A tide table is a short story about the moon. " * 5
    options = CompareOptions(budget=BudgetSpec(share=0.5), max_new_tokens=12, chat=False, ignore_eos=True)
    own, snap = compare(loaded(), text, [name, SystemChoice("snapkv")], options).systems
    assert own.bytes == own.expected_bytes == snap.bytes
    assert own.fmm is not None and 0.0 < own.fmm < 1.0 and own.kl is not None and own.kl > 0.0
