"""A class of thirty follows its teacher: nothing lost, all end where the teacher does. Lag is printed, not judged."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.load.presentation import faults, trial

SECONDS = 8.0


def test_thirty_follow_the_teacher(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = trial(tmp_path, SECONDS, followers=30)
    with capsys.disabled():
        print(
            f"\n  lag of 30 followers in ms: stored run {figures['stored']['lag_ms']}, live {figures['live']['lag_ms']}"
        )
    assert faults(figures) == []
    assert figures["stored"]["pushed"] == figures["live"]["pushed"] == int(SECONDS * 10)
    assert figures["live"]["run_messages"] > 100
    assert figures["engine"]["before"], "the server's own figures of its runs must be there to be compared"
    assert figures["left"] == {"on": False}
