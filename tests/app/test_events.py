"""The event bus: heads, coalescing, rings, followers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.events import OPENING, PING, Bus, Channel, TokenCoalescer, frame, head
from app.store_file import StoreError
from engine.errors import TraceError
from engine.trace import EndEvent, ErrorEvent, LateMetrics, Progress, StepEvent, TraceEvent, encode


def message(seq: int, kind: str = "prog") -> bytes:
    return json.dumps({"k": kind, "s": seq, "stage": "prefill", "done": 0, "total": 1}, separators=(",", ":")).encode()


def frames(chunks: Iterable[bytes]) -> list[tuple[int, dict[str, object]]]:
    """(id, message) of all events of a stream; id -1 where there is none."""
    out = []
    for block in b"".join(chunks).split(b"\n\n"):
        number, data = -1, None
        for line in block.split(b"\n"):
            if line.startswith(b"id: "):
                number = int(line[4:])
            elif line.startswith(b"data: "):
                data = json.loads(line[6:])
        if data is not None:
            out.append((number, data))
    return out


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (Progress("load", 1, 2, 7), ("prog", 7, None)),
        (LateMetrics(12, 0.1, 0.1, 0.1, (1.0, 0.0, 0.0), None, 32, [], 9), ("late", 9, 12)),
        (EndEvent("stop", {"k": "route"}, 3), ("end", 3, None)),
        (ErrorEvent('","s":5', "", 4), ("err", 4, None)),
    ],
)
def test_a_head_is_read_without_the_body(event: TraceEvent, expected: tuple[str, int, int | None]) -> None:
    assert head(encode(event)) == expected
    assert head(json.dumps(json.loads(encode(event))).encode()) == expected


@given(st.binary(max_size=60))
def test_a_head_of_anything_else_is_a_trace_error(data: bytes) -> None:
    try:
        kind, seq, _ = head(data)
    except TraceError:
        return
    assert isinstance(kind, str) and isinstance(seq, int)


def test_a_passing_message_has_no_id() -> None:
    assert frame(b"{}", -1) == b"data: {}\n\n"
    assert frame(b"{}", 3) == b"id: 3\ndata: {}\n\n"


def test_tokens_are_joined_to_twenty_a_second_and_nothing_is_lost() -> None:
    clock = [0.0]
    coalescer = TokenCoalescer(20, lambda: clock[0])
    sent: list[TraceEvent] = []
    for number in range(200):
        clock[0] += 0.005
        sent += coalescer.push(StepEvent(number + 1, [str(number)], [number]))
    assert len(sent) <= 21
    sent += coalescer.flush()
    steps = [event for event in sent if isinstance(event, StepEvent)]
    assert [number for step in steps for number in step.ids] == list(range(200))
    assert [piece for step in steps for piece in step.pieces] == [str(number) for number in range(200)]
    assert steps[-1].seq_len == 200


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 0.2)), max_size=60))
def test_joining_keeps_the_order(script: list[tuple[bool, float]]) -> None:
    clock = [0.0]
    coalescer = TokenCoalescer(20, lambda: clock[0])
    sent: list[TraceEvent] = []
    expected: list[str] = []
    for number, (is_token, pause) in enumerate(script):
        clock[0] += pause
        expected.append(str(number))
        sent += coalescer.push(StepEvent(number, [str(number)]) if is_token else Progress(str(number), 0, 1))
    sent += coalescer.flush()
    got: list[str] = []
    for event in sent:
        got += event.pieces if isinstance(event, StepEvent) else [getattr(event, "stage", "?")]
    assert got == expected


def test_a_ring_forgets_the_oldest_and_says_where_it_begins() -> None:
    channel = Channel("x", 10)
    for seq in range(25):
        channel.publish(message(seq), seq)
    assert (channel.first_seq, channel.next_seq) == (15, 25)
    assert channel.read(0) == (15, [message(seq) for seq in range(15, 25)])
    assert channel.read(20, 3) == (20, [message(seq) for seq in range(20, 23)])
    assert channel.read(25) == (25, [])
    with pytest.raises(TraceError):
        channel.publish(message(27), 27)


def follow(bus: Bus, after: int = -1, *, ping_seconds: float = 5.0) -> list[bytes]:
    async def collect() -> list[bytes]:
        return [chunk async for chunk in bus.follow("x", after, ping_seconds=ping_seconds)]

    return asyncio.run(collect())


def publish_all(channel: Channel, count: int) -> threading.Thread:
    def work() -> None:
        for seq in range(count):
            channel.publish(message(seq), seq)
        channel.close()

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_many_followers_get_the_same_sequence_without_loss() -> None:
    bus = Bus(8192)
    channel = bus.open("x")
    count = 1500

    async def main() -> list[list[bytes]]:
        async def collect() -> list[bytes]:
            return [chunk async for chunk in bus.follow("x")]

        tasks = [asyncio.create_task(collect()) for _ in range(40)]
        await asyncio.sleep(0)
        thread = publish_all(channel, count)
        out = await asyncio.gather(*tasks)
        thread.join()
        return out

    for chunks in asyncio.run(main()):
        assert [number for number, _ in frames(chunks)] == list(range(count))
    assert bus.followers == 0


def test_a_follower_resumes_after_the_last_message_that_it_has() -> None:
    bus = Bus(100)
    publish_all(bus.open("x"), 50).join()
    assert [number for number, _ in frames(follow(bus, after=41))] == list(range(42, 50))


def test_who_fell_out_of_the_ring_is_brought_back_from_the_store() -> None:
    stored = [message(seq) for seq in range(40)]
    bus = Bus(16, lambda session, from_seq: iter(stored[from_seq:]))
    channel = bus.open("x")
    for body in stored:
        channel.publish(body, head(body)[1])
    channel.close()
    assert [number for number, _ in frames(follow(bus))] == list(range(40))


def test_a_broken_store_costs_a_follower_only_what_left_the_ring() -> None:
    def broken(session: str, from_seq: int) -> Iterable[bytes]:
        raise StoreError("no")

    bus = Bus(16, broken)
    publish_all(bus.open("x"), 40).join()
    assert [number for number, _ in frames(follow(bus))] == list(range(24, 40))


def test_an_ended_session_is_told_from_the_store() -> None:
    stored = [message(seq) for seq in range(600)]
    bus = Bus(16, lambda session, from_seq: iter(stored[from_seq:]))
    assert [number for number, _ in frames(follow(bus, after=99))] == list(range(100, 600))


def test_a_quiet_stream_pings_and_a_closed_bus_ends_it() -> None:
    bus = Bus(16)
    bus.open("x")

    async def main() -> list[bytes]:
        chunks = []
        async for chunk in bus.follow("x", ping_seconds=0.02):
            chunks.append(chunk)
            if chunks.count(PING) == 2:
                bus.close()
        return chunks

    chunks = asyncio.run(main())
    assert chunks[0] == OPENING and chunks.count(PING) >= 2


def test_a_passing_message_reaches_late_comers_until_the_run_begins() -> None:
    bus = Bus(16)
    channel = bus.open("x")
    channel.say(message(-1))
    channel.say(encode(Progress("queue", 0, 3), -1))

    async def first() -> list[bytes]:
        chunks = []
        async for chunk in bus.follow("x"):
            chunks.append(chunk)
            if len(frames(chunks)) == 1:
                return chunks
        return chunks

    assert frames(asyncio.run(first()))[0][1]["total"] == 3
    channel.publish(message(0), 0)
    channel.close()
    assert [number for number, _ in frames(follow(bus))] == [0]


def test_unsaved_sessions_stay_readable_for_a_while() -> None:
    bus = Bus(16, keep_unsaved=2)
    for name in "abc":
        bus.open(name)
        bus.retire(name, stored=False)
    bus.open("d")
    bus.retire("d", stored=True)
    assert [bus.channel(name) is not None for name in "abcd"] == [False, True, True, False]
    bus.forget("b")
    assert bus.channel("b") is None


def test_a_follower_whose_loop_is_gone_does_not_stop_the_run() -> None:
    bus = Bus(16)
    channel = bus.open("x")
    loop = asyncio.new_event_loop()

    async def subscribe() -> None:
        channel.subscribe()

    loop.run_until_complete(subscribe())
    loop.close()
    channel.publish(message(0), 0)
    assert channel.followers == 0
