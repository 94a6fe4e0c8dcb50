"""The script for a GPU machine: its cases cover what they promise, and one failure does not cost the others."""

from __future__ import annotations

import importlib.util
import itertools
from argparse import Namespace
from typing import Any

import pytest

from engine.benchmarks.gpu_cases import BITS, DTYPES, GROUPS, HEAD_DIMS, QUICK, WINDOWS, Case, covering

VALUES = (GROUPS, HEAD_DIMS, WINDOWS, BITS, DTYPES)


def settings(case: Case) -> tuple[object, ...]:
    return case.group, case.head_dim, case.window, case.bits, case.dtype


def test_every_pair_of_values_occurs() -> None:
    rows = [settings(case) for case in covering()]
    for i, j in itertools.combinations(range(5), 2):
        assert {(row[i], row[j]) for row in rows} == set(itertools.product(VALUES[i], VALUES[j]))
    assert len(rows) <= 30
    quick = [settings(case) for case in QUICK]
    assert all({row[i] for row in quick} == set(VALUES[i]) for i in range(5))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="package triton is not installed")
def test_a_failing_check_is_reported_and_the_rest_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.benchmarks import gpu_check

    def broken() -> dict[str, Any]:
        raise RuntimeError("out of shared memory")

    work = [("good", lambda: {"passed": True}), ("broken", broken), ("wrong", lambda: {"passed": False}),
            ("last", lambda: {"passed": True})]  # fmt: skip
    monkeypatch.setattr(gpu_check, "checks", lambda device, quick: iter(work))
    monkeypatch.setattr(gpu_check.torch.cuda, "is_available", lambda: False)
    said: list[tuple[str, dict[str, Any]]] = []
    arguments = Namespace(quick=True, checks=True, cells=False)
    assert not gpu_check.run(arguments, lambda kind, row: said.append((kind, row)))
    checks = {row["check"]: row for kind, row in said if kind == "check"}
    assert list(checks) == ["good", "broken", "wrong", "last"]
    assert "shared memory" in checks["broken"]["error_text"] and checks["last"]["passed"]
    assert said[-1] == ("summary", {"checks": 4, "failed": ["broken", "wrong"]})
    monkeypatch.setattr(gpu_check, "checks", lambda device, quick: iter(work[:1]))
    assert gpu_check.run(arguments, lambda kind, row: None)
