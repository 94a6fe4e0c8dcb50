"""Rivals by `system`, with the real engine on a tiny model: through the `openai` package and through /qe/runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from app.systems import EVICTING, QUANTIZING, RIVAL_SETTINGS, RIVALS, SYSTEMS, apply_system, listed
from engine.baselines import registry
from engine.config import QEvictConfig
from engine.errors import ConfigError
from engine.trace import EndEvent, Keyframe, MemoryReading, RoutingEvent, RunMeta, StepEvent, Tier, decode
from engine.trace_board import Board
from tests.app.fake_engine import FakeEngine
from tests.app.test_api import Server
from tests.app.tiny_loader import load_tiny

STORY = "The old map showed a river where there was none, and a road that went to the sea. " * 3
READY = [name for name in RIVALS if registry.info(name).unavailable is None]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    built = Server(tmp_path_factory.mktemp("rivals"), FakeEngine(), parts={"loader": load_tiny})
    yield built
    built.close()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    url = server.url.removesuffix("/qe") + "/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as made:
        yield made


def ask(client: openai.OpenAI, name: str, **more: Any) -> Any:
    own = {"system": name} | ({"kv_budget": 0.4} if registry.info(name).budgeted else {})
    return client.completions.create(
        model="embedded", prompt=STORY, max_tokens=24, temperature=0, extra_body=own, **more
    )


def test_the_registry_is_what_can_be_asked_for(server: Server) -> None:
    answer = server.http.get("/systems").json()["systems"]
    assert answer == listed()
    # Others exist only beside FullKV, or are one of QEvict's runs counted in another way.
    free = [one for one in registry.systems() if not one.needs_reference and one.family != "tiers"]
    assert {one.name for one in free} == {*RIVALS, "fullkv"}
    assert {one.name for one in free if one.budgeted} == set(EVICTING)
    assert {one["name"] for one in answer if not one["budgeted"]} == set(QUANTIZING)
    assert set(SYSTEMS) <= {one.name for one in registry.systems()}


def test_what_is_not_installed_is_said_in_the_answer(client: openai.OpenAI) -> None:
    reason = registry.info("hf-quantized").unavailable
    if reason is None:
        pytest.skip("the package is installed here")
    with pytest.raises(openai.BadRequestError, match="optimum") as caught:
        ask(client, "hf-quantized")
    assert reason in str(caught.value)


@pytest.mark.parametrize("name", READY)
def test_a_rival_answers_with_its_bytes_and_a_trace_that_a_board_can_follow(
    client: openai.OpenAI, server: Server, name: str
) -> None:
    answer = ask(client, name)
    assert answer.usage.completion_tokens == 24 and answer.usage.prompt_tokens > 200
    kv = answer.usage.model_extra["kv"]
    assert (kv["system"], kv["storage"]) == (name, registry.info(name).storage)
    assert 0 < kv["persistent_bytes"] <= kv["peak_persistent_bytes"] and 0 < kv["share"] < 1
    assert "quant_share" not in kv
    events = [decode(line) for line in server.lines(f"/s/{answer.id.removeprefix('cmpl-')}/trace")]
    assert [event.seq for event in events] == list(range(len(events)))
    meta, end = events[0], events[-1]
    assert isinstance(meta, RunMeta) and isinstance(end, EndEvent)
    assert (meta.policy, meta.reference, end.why) == (name, "none", "length")
    assert "cells_by_majority" in meta.notices
    tokens = [number for event in events if isinstance(event, StepEvent) for number in event.ids]
    assert len(tokens) == 24
    board = Board(meta)
    for event in events:
        board.forward(event)
    assert board.seq_len == meta.prompt_tokens + 24
    looks = [event for event in events if isinstance(event, RoutingEvent | Keyframe)]
    assert [event.event_id for event in looks] == list(range(len(looks))) and len(looks) == 4
    memory = board.memory
    assert isinstance(memory, MemoryReading) and memory.persistent == pytest.approx(kv["persistent_bytes"], rel=0.1)
    gone = int((board.tiers == Tier.EVICTED).sum())
    coded = int((board.tiers == Tier.QUANT).sum())
    family = registry.info(name).family
    assert (gone > 0) == (family == "evict") and (coded > 0) == (family == "quantize")
    assert memory.codes > 0 or family != "quantize"


@pytest.mark.parametrize("name", ["snapkv", "kivi-2"])
def test_a_rivals_stream_is_the_same_text_and_ends_with_its_bytes(client: openai.OpenAI, name: str) -> None:
    whole = ask(client, name)
    text, usage = "", None
    for chunk in ask(client, name, stream=True, stream_options={"include_usage": True}):
        if chunk.choices:
            text += chunk.choices[0].text
        else:
            usage = chunk.usage
    assert text == whole.choices[0].text
    assert usage is not None and usage.model_extra is not None
    assert usage.model_extra["kv"]["persistent_bytes"] == whole.usage.model_extra["kv"]["persistent_bytes"]


def test_a_chat_with_a_rival_raises_a_budget_that_is_too_small(client: openai.OpenAI) -> None:
    answer: Any = client.chat.completions.create(
        model="embedded",
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": STORY}],
        max_tokens=16,
        extra_body={"system": "snapkv", "kv_budget": 0.02},
    )
    assert any("0.02" in notice or "2.0%" in notice for notice in answer.model_extra["notices"])
    assert answer.usage.model_extra["kv"]["kv_budget"] > 0.02


@pytest.mark.parametrize("name", ["qevict", "snapkv", "streamingllm", "h2o"])
def test_a_text_too_short_for_its_budget_gets_a_larger_one(client: openai.OpenAI, name: str) -> None:
    said = client.completions.create(
        model="tiny", prompt="moon", max_tokens=3, temperature=0.0, extra_body={"system": name, "kv_budget": 0.2}
    )
    assert said.usage is not None and said.usage.completion_tokens == 3
    kv = said.usage.model_dump()["kv"]
    assert 0.2 < kv["kv_budget"] <= 1.0 and (name != "qevict" or kv["kv_budget"] == 1.0)


def test_a_run_takes_a_system_as_well(server: Server) -> None:
    sid = server.start(STORY, system="h2o", config={"kv_budget": 0.4}, options={"max_new_tokens": 16})
    assert server.context.runs.wait(sid, 60)
    info = server.context.sessions.get(sid)
    assert (info.policy, info.state, info.settings["system"]) == ("h2o", "done", "h2o")
    assert info.summary["kv"]["storage"] == "real"
    sid = server.start(STORY, system="qevict-int4", config={"kv_budget": 0.4}, options={"max_new_tokens": 16})
    assert server.context.runs.wait(sid, 60)
    info = server.context.sessions.get(sid)
    assert (info.policy, info.settings["config"]["bits"]) == ("qevict-int4", 4)
    refused = server.http.post("/runs", json={"prompt": "x", "system": "h3o"})
    assert refused.status_code == 422 and "snapkv" in refused.json()["detail"]
    refused = server.http.post("/runs", json={"prompt": "x", "system": "h2o", "config": {"ranker": "recent"}})
    assert refused.status_code == 422 and "h2o has no ranker" in refused.json()["detail"]


def test_a_rival_that_is_stopped_keeps_what_it_has(server: Server) -> None:
    sid = server.start(STORY, system="snapkv", config={"kv_budget": 1.0}, options={"max_new_tokens": 3000})
    for number, _ in server.follow(sid, stop_at=8):
        assert number <= 8
    server.http.post(f"/s/{sid}/stop")
    assert server.context.runs.wait(sid, 60)
    info = server.context.sessions.get(sid)
    assert info.state == "stopped" and 0 < info.summary["num_tokens"] < 3000
    assert info.summary["kv"]["persistent_bytes"] > 0


def test_only_settings_that_mean_something_are_taken() -> None:
    assert apply_system("snapkv", QEvictConfig(), RIVAL_SETTINGS) == QEvictConfig()
    with pytest.raises(ConfigError, match="zipcache keeps what its own settings say"):
        apply_system("zipcache", QEvictConfig(), ["kv_budget"])
