"""/v1 with the real `openai` package against a real server, and its small parts alone."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.messages_prompt import render, transcript
from app.openai_answer import StopText
from app.openai_body import CHAT, read_chat, read_completion
from app.settings import Settings
from app.systems import SYSTEMS
from engine.errors import EngineError, OutOfMemoryError, PromptError
from tests.app.fake_engine import FakeEngine
from tests.app.test_api import Server
from tests.app.test_runs import wait_for

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    built = Server(tmp_path_factory.mktemp("openai"), FakeEngine(), allowed_models=("embedded", "a/b"))
    yield built
    built.close()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with client_of(server) as made:
        yield made


def client_of(server: Server, key: str = "none") -> openai.OpenAI:
    url = server.url.removesuffix("/qe") + "/v1"
    return openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=30)


def test_models_are_those_that_may_be_run(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["embedded", "a/b"]


def test_a_chat_answer_with_its_own_fields_and_figures(client: openai.OpenAI, server: Server) -> None:
    answer = client.chat.completions.create(
        model="embedded",
        messages=HELLO,
        max_tokens=12,
        temperature=0,
        seed=7,
        user="somebody",
        extra_body={"kv_budget": 0.3, "quant_share": 0.4, "bits": 4, "system": "qevict-no-promotion"},
    )
    assert answer.choices[0].message.content == "".join(f" <b>{number}</b>" for number in range(12))
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (85, 12, 97)
    extra = answer.usage.model_extra
    assert extra is not None
    kv = extra["kv"]
    assert (kv["kv_budget"], kv["quant_share"], kv["bits"]) == (0.3, 0.4, 4)
    assert kv["system"] == "qevict-no-promotion"
    stored = server.context.sessions.get(answer.id.removeprefix("chatcmpl-"))
    assert stored.settings["config"]["promotion"] is False
    assert stored.settings["options"]["seed"] == 7 and stored.settings["options"]["max_new_tokens"] == 12


@pytest.mark.parametrize("chat", [True, False])
def test_a_stream_is_the_same_text_and_ends_with_usage(client: openai.OpenAI, chat: bool) -> None:
    asked: dict[str, Any] = {
        "model": "a/b",
        "max_tokens": 20,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    stream: Any
    if chat:
        stream = client.chat.completions.create(messages=HELLO, **asked)
    else:
        stream = client.completions.create(prompt="Hello", **asked)
    text, finish, usage = "", [], None
    for chunk in stream:
        if not chunk.choices:
            usage = chunk.usage
            continue
        choice = chunk.choices[0]
        text += (choice.delta.content if chat else choice.text) or ""
        finish += [choice.finish_reason] if choice.finish_reason else []
    assert text == "".join(f" <b>{number}</b>" for number in range(20))
    assert finish == ["length"] and usage is not None and usage.completion_tokens == 20


def test_a_stop_text_ends_the_run_and_is_not_shown(server: Server) -> None:
    slow = server.engine
    slow.delay = 0.01
    with client_of(server) as client:
        answer = client.completions.create(model="embedded", prompt="x", max_tokens=2000, stop=["</b> <b>3", "nope"])
        assert answer.choices[0].text == " <b>0</b> <b>1</b> <b>2"
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None and answer.usage.completion_tokens == 4
        sid = answer.id.removeprefix("cmpl-")
        assert server.context.runs.wait(sid, 10)
        assert server.context.sessions.get(sid).state == "stopped"
    slow.delay = 0.0


@pytest.mark.parametrize(
    ("changes", "status", "said"),
    [
        ({"model": "c/d"}, 404, "this server runs embedded, a/b"),
        ({"extra_body": {"kv_budget": 2}}, 400, "kv_budget must be in (0, 1]"),
        ({"extra_body": {"bits": 3}}, 400, "bits must be 2 or 4"),
        ({"extra_body": {"system": "h3o"}}, 400, "system must be one of qevict, fullkv"),
        ({"extra_body": {"system": "oracle-past"}}, 400, "system must be one of qevict, fullkv"),
        ({"extra_body": {"system": "snapkv", "bits": 4}}, 400, "snapkv has no bits"),
        ({"extra_body": {"system": "kivi-2", "kv_budget": 0.3}}, 400, "leave kv_budget out"),
        ({"extra_body": {"system": "snapkv", "document": "x"}}, 400, "put the document into the prompt"),
        ({"extra_body": {"preset": "nope"}}, 400, "nope"),
        ({"extra_body": {"temprature": 1}}, 400, "unknown field 'temprature'"),
        ({"max_tokens": 9999}, 400, "max_new_tokens must be at most 5000"),
        ({"temperature": -1}, 400, "temperature"),
        ({"n": 2}, 400, "n is not supported"),
        ({"presence_penalty": 0.5}, 400, "presence_penalty is not supported"),
        ({"messages": []}, 400, "at least one message"),
        ({"messages": [{"role": "robot", "content": "x"}]}, 400, "role must be one of"),
        ({"messages": [{"role": "user", "content": ""}]}, 400, "prompt is empty"),
    ],
)
def test_errors_have_openais_form(client: openai.OpenAI, changes: dict[str, Any], status: int, said: str) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(**{"model": "embedded", "messages": HELLO, "max_tokens": 5, **changes})
    assert caught.value.status_code == status
    body: Any = caught.value.body
    assert said in body["message"] and body["type"].endswith("_error")


def test_a_failing_run_is_an_error_in_a_stream_too(tmp_path: Path) -> None:
    engine = FakeEngine(fail_after=2, error=OutOfMemoryError("the device ran out of memory: take less."))
    server = Server(tmp_path, engine)
    with client_of(server) as client:
        with pytest.raises(openai.InternalServerError, match="out of memory") as caught:
            client.chat.completions.create(model="embedded", messages=HELLO)
        assert caught.value.status_code == 503
        with pytest.raises(openai.APIError, match="out of memory"):
            list(client.chat.completions.create(model="embedded", messages=HELLO, stream=True))
        engine.fail_after = None
        assert client.chat.completions.create(model="embedded", messages=HELLO, max_tokens=3).choices
    server.close()


def test_a_full_queue_is_a_rate_limit(tmp_path: Path) -> None:
    server = Server(tmp_path, FakeEngine(gate=threading.Event()), max_runs_per_user=1)
    with client_of(server) as client:
        server.start("first")
        cookie = "; ".join(f"{name}={value}" for name, value in server.http.cookies.items())
        with pytest.raises(openai.RateLimitError, match="1 is the most"):
            client.chat.completions.create(model="embedded", messages=HELLO, extra_headers={"Cookie": cookie})
    server.close()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_stops_its_run(tmp_path: Path, stream: bool) -> None:
    server = Server(tmp_path, FakeEngine(delay=0.01))
    url = server.url.removesuffix("/qe") + "/v1/completions"
    body = {"model": "embedded", "prompt": "x", "max_tokens": 4000, "stream": stream}
    if stream:
        with httpx.stream("POST", url, json=body, timeout=30) as answer:
            next(answer.iter_lines())
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url, json=body, timeout=1.0)
    wait_for(lambda: server.context.runs.active is None)
    assert [info.state for info in server.context.sessions.list()] == ["stopped"]
    server.close()


def test_the_key_is_the_login(tmp_path: Path) -> None:
    server = Server(tmp_path, FakeEngine(), login=(("class", "open sesame"),))
    with client_of(server, "class:open sesame") as client:
        assert client.models.list().data
    with client_of(server, "class:wrong") as client, pytest.raises(openai.AuthenticationError, match="log in first"):
        client.models.list()
    server.close()


@given(
    st.lists(st.text("ab<>", max_size=5), max_size=12), st.lists(st.text("ab<>", min_size=1, max_size=3), max_size=3)
)
def test_a_stop_text_is_found_wherever_pieces_are_cut(pieces: list[str], stops: list[str]) -> None:
    found = StopText(tuple(stops))
    shown = "".join([found.push(piece) for piece in pieces]) + found.rest()
    whole = "".join(pieces)
    # The first piece in which a stop text is complete decides; of several, the one that begins first.
    for end in (sum(map(len, pieces[: count + 1])) for count in range(len(pieces))):
        places = [place for stop in stops if (place := whole[:end].find(stop)) >= 0]
        if places:
            assert found.hit and shown == whole[: min(places)]
            return
    assert not found.hit and shown == whole


class FakeTokenizer:
    chat_template = "x"
    bos_token, bos_token_id = "<s>", 1

    def __init__(self, adds: bool, fails: bool = False) -> None:
        self._adds, self._fails = adds, fails

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [1] if self._adds else []}

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        if self._fails:
            raise ValueError("roles must alternate")
        return "<s>" + "|".join(f"{one['role']}:{one['content']}" for one in messages) + "|"


class Loaded:
    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer


TALK = (("system", "Be brief."), ("user", "Hi"), ("assistant", "Yes?"), ("user", "Go on"))


def test_a_conversation_goes_through_the_models_template() -> None:
    body = {"messages": [{"role": role, "content": text} for role, text in TALK]}
    wanted = read_chat(body, Settings())
    assert wanted.request.messages == TALK
    assert render(Loaded(FakeTokenizer(adds=True)), TALK).startswith("system:Be brief.|user:Hi|")
    assert render(Loaded(FakeTokenizer(adds=False)), TALK).startswith("<s>system:")
    assert render("no tokenizer", TALK) == transcript(TALK)
    assert transcript(TALK).endswith("User: Go on\nAssistant:")
    with pytest.raises(PromptError, match="roles must alternate"):
        render(Loaded(FakeTokenizer(adds=False, fails=True)), TALK)


def test_text_parts_are_joined_and_other_parts_refused() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert read_chat({"messages": [{"role": "user", "content": parts}]}, Settings()).request.prompt == "ab"
    with pytest.raises(PromptError, match="type text only"):
        read_chat({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, Settings())


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_can_be_asked_for(name: str) -> None:
    assert read_completion({"prompt": "x", "system": name}, Settings()).system == name


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
NAMES = [*CHAT, "prompt", "n", "logit_bias", "tools", "response_format", "zzz"]


@given(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=5))
def test_no_body_is_more_than_a_sentence(body: dict[str, Any]) -> None:
    for read in (read_chat, read_completion):
        try:
            read({"messages": HELLO, "prompt": "x", **body} if len(body) % 2 else body, Settings())
        except EngineError as error:
            json.dumps(str(error))
