"""A short load trial: thirty followers, ten users, half a minute. Times are printed, not judged: machines differ."""

from __future__ import annotations

from pathlib import Path

from tests.load.followers import trial

SECONDS = 30.0


def test_thirty_followers_and_ten_users_lose_nothing(tmp_path: Path) -> None:
    figures = trial(tmp_path, SECONDS, followers=30, users=10, delay=0.01)
    print(figures)
    assert (figures["lost"], figures["doubled"], figures["cut"]) == (0, 0, 0)
    assert figures["failed"] == [] and figures["refused"] == 0
    assert figures["streams"] >= 30 and figures["reconnects"] > 0 and figures["runs_done"] >= 1
    assert figures["memory_growth"] is None or figures["memory_growth"] < 0.25
