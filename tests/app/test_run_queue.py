"""Who comes next, who is refused, how long it takes: the queue alone, then under a run manager."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.run_queue import FairQueue, Limits, QueueFullError, RunTimes
from app.runs import RunRequest
from app.settings import Settings
from app.visitors import ForbiddenError
from engine.trace import ErrorEvent
from tests.app.fake_engine import FakeEngine, FakeLoader
from tests.app.test_runs import House, wait_for


def served(queue: FairQueue[str]) -> list[str]:
    return [queue.pop() for _ in range(len(queue))]


def test_users_take_turns() -> None:
    queue: FairQueue[str] = FairQueue()
    for item in ("a1", "a2", "a3", "b1", "c1", "b2"):
        queue.add(item, item[0])
    assert queue.order() == ["a1", "b1", "c1", "a2", "b2", "a3"] == served(queue)


def test_somebody_new_goes_before_a_second_run_but_not_before_earlier_first_ones() -> None:
    queue: FairQueue[str] = FairQueue()
    for item in ("a1", "a2", "a3", "a4"):
        queue.add(item, "a")
    assert [queue.pop(), queue.pop()] == ["a1", "a2"]
    queue.add("b1", "b")
    assert served(queue) == ["b1", "a3", "a4"]


def test_a_run_that_is_taken_out_gives_its_turn_to_its_user() -> None:
    queue: FairQueue[str] = FairQueue()
    for item in ("a1", "a2", "b1", "b2"):
        queue.add(item, item[0])
    queue.remove("a1")
    assert queue.order() == ["b1", "a2", "b2"] or queue.order() == ["a2", "b1", "b2"]
    queue.add("a3", "a")
    assert queue.order()[2:] == ["b2", "a3"]


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(["add", "pop", "cancel"])), max_size=60))
def test_nobody_waits_longer_than_one_turn_of_everybody(steps: list[tuple[str, str]]) -> None:
    """Between two runs of one user that both waited all the time, everybody else gets at most one turn... each."""
    queue: FairQueue[tuple[str, int]] = FairQueue()
    for number, (user, step) in enumerate(steps):
        if step == "add":
            queue.add((user, number), user)
        elif len(queue) and step == "pop":
            assert queue.order()[0] == queue.pop()
        elif len(queue):
            queue.remove(queue.order()[number % len(queue)])
        order = queue.order()
        assert len(order) == len(queue)
        for who in "abcd":
            mine = [place for place, (name, _) in enumerate(order) if name == who]
            arrivals = [order[place][1] for place in mine]
            assert arrivals == sorted(arrivals), "one user's runs keep their order"
    order = queue.order()
    waiting = {name for name, _ in order}
    seen: dict[str, int] = {}
    for place, (name, _) in enumerate(order):
        seen[name] = seen.get(name, 0) + 1
        # The n-th run of a user stands at most behind n of everybody else's, and those of one turn ahead.
        assert place <= (seen[name] + len(steps)) * len(waiting)


def admit(limits: Limits, user: str, address: str, present: list[tuple[str, str]]) -> str:
    try:
        limits.admit(user, address, present)
    except QueueFullError as error:
        return str(error)
    return ""


def test_limits_for_users_addresses_and_starts() -> None:
    now = [0.0]
    settings = Settings(queue_length=8, max_runs_per_user=2, max_runs_per_address=3, starts_per_minute=4)
    limits = Limits(settings, clock=lambda: now[0])
    assert admit(limits, "a", "1", [("a", "1")]) == ""
    assert "you have 2 runs here already, and 2 is the most" in admit(limits, "a", "2", [("a", "1")] * 2)
    assert "3 runs from your address" in admit(limits, "d", "1", [("a", "1"), ("b", "1"), ("c", "1")])
    assert "8 runs are waiting already" in admit(limits, "z", "9", [(str(n), str(n)) for n in range(9)])
    for _ in range(4):
        assert admit(limits, "e", "5", []) == ""
    assert "try again in 60 seconds" in admit(limits, "f", "5", [])
    now[0] = 61.0
    assert admit(limits, "f", "5", []) == ""


def test_without_limits_and_without_a_name_everything_is_taken() -> None:
    limits = Limits(Settings(queue_length=100))
    assert admit(limits, "", "", [("", "")] * 50) == ""


def test_the_expected_time_is_the_middle_of_what_was_measured() -> None:
    times = RunTimes()
    assert times.expect(100) is None
    for seconds in (1.0, 2.0, 300.0):
        times.add(seconds, 100)
    assert times.expect(50) == 1.0


def request(user: str, tokens: int = 8, **fields: Any) -> RunRequest:
    return RunRequest(user, options={"max_new_tokens": tokens}, user=user, address=user, **fields)


def test_runs_of_several_users_alternate_and_know_their_wait(tmp_path: Path) -> None:
    engine = FakeEngine(gate=threading.Event(), delay=0.002)
    house = House(tmp_path, engine, FakeLoader())
    first = house.runs.start(request("a"))
    wait_for(lambda: engine.started)
    sessions = [house.runs.start(request(user)) for user in ("a", "a", "b", "c")]
    assert house.runs.status(sessions[2]).ahead == 1 and house.runs.status(sessions[2]).wait_seconds is None
    assert engine.gate is not None
    engine.gate.set()
    for session in (first, *sessions):
        assert house.runs.wait(session, 20)
    assert engine.started == ["a", "b", "c", "a", "a"] or engine.started == ["a", "b", "a", "c", "a"]
    engine.gate.clear()
    house.runs.start(request("a", 16))
    wait_for(lambda: len(engine.started) == 6)
    status = house.runs.status(house.runs.start(request("b")))
    assert status.ahead == 1 and status.wait_seconds is not None and 0.0 <= status.wait_seconds < 20.0
    house.close()


def test_a_user_at_the_limit_is_refused_and_may_come_back(tmp_path: Path) -> None:
    house = House(tmp_path, FakeEngine(gate=threading.Event()), FakeLoader(), max_runs_per_user=2)
    sessions = [house.runs.start(request("a")) for _ in range(2)]
    with pytest.raises(QueueFullError, match="2 is the most"):
        house.runs.start(request("a"))
    house.runs.start(request("b"))
    assert house.runs.stop(sessions[1])
    house.runs.start(request("a"))
    assert 'qevict_refused_total{why="limit"} 1' in house.runs.metrics.text({})
    house.close()


def test_a_run_that_nobody_looks_at_is_stopped_and_says_so(tmp_path: Path) -> None:
    house = House(tmp_path, FakeEngine(delay=0.01), FakeLoader(), abandon_seconds=1)
    left = house.runs.start(request("a", 3000))
    waiting = house.runs.start(request("b", 3000))
    began = time.monotonic()
    while time.monotonic() - began < 3 and house.runs.status(left).state != "ended":
        time.sleep(0.05)
    assert house.runs.status(left).state == "running", "somebody asked for its status all the time"
    wait_for(lambda: waiting not in house.runs.waiting)
    wait_for(lambda: house.runs.active is None)
    for session in (left, waiting):
        assert house.runs.wait(session, 5)
        said = [event.message for event in house.trace(session) if isinstance(event, ErrorEvent)]
        assert said == ["nobody looked at this run for 1 seconds: it was stopped."]
        assert house.sessions.get(session).state == "stopped"
    house.close()


def test_only_the_owner_stops_a_run(tmp_path: Path) -> None:
    house = House(tmp_path, FakeEngine(gate=threading.Event()), FakeLoader())

    def demand(user: str) -> None:
        if user != "a":
            raise ForbiddenError("no")

    house.runs._demand = demand
    mine, other = house.runs.start(request("a")), house.runs.start(request("b"))
    for refused in (lambda: house.runs.stop(other), lambda: house.runs.watch(other, 1)):
        with pytest.raises(ForbiddenError):
            refused()
    assert house.runs.stop(mine)
    house.close()
