"""A document that is asked about again: found, bounded, of its owner alone, and said in the answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from app.messages_prompt import document_of, transcript, with_document
from app.prefixes import Prefixes, Shelf
from app.result_table import rows
from engine.prefix import PrefixStore
from tests.app.fake_engine import FakeEngine
from tests.app.test_api import Server
from tests.app.tiny_loader import load_tiny

DOCUMENT = "The old map showed a river where there was none, and a road that went to the sea. " * 3
KEY = ("embedded", "auto", "auto")


def serve(folder: Path, **limits: Any) -> Server:
    return Server(folder, FakeEngine(), parts={"loader": load_tiny}, **limits)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    built = serve(tmp_path_factory.mktemp("kept"))
    yield built
    built.close()


def client_of(server: Server, http: httpx.Client | None = None) -> openai.OpenAI:
    url = server.url.removesuffix("/qe") + "/v1"
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60, http_client=http)


def ask(client: openai.OpenAI, question: str, document: str = DOCUMENT, **more: Any) -> Any:
    return client.chat.completions.create(
        model="embedded",
        messages=[*more.pop("before", []), {"role": "user", "content": question}],
        max_tokens=12,
        temperature=0,
        extra_body={"document": document, "kv_budget": 0.5, **more},
    )


def used(answer: Any) -> bool:
    found: bool = answer.usage.model_extra["timing"]["prefix_used"]
    return found


def test_the_second_question_starts_from_the_kept_document(server: Server) -> None:
    with client_of(server) as client:
        first = ask(client, "Where does the road go?")
        second = ask(client, "Where does the road go?")
        third = ask(client, "What else is there on the map?")
    assert [used(answer) for answer in (first, second, third)] == [False, True, True]
    assert first.choices[0].message.content == second.choices[0].message.content
    for answer in (first, second, third):
        timing, kv = (answer.usage.model_extra[name] for name in ("timing", "kv"))
        assert 100 < timing["document_tokens"] < timing["prompt_tokens"]
        assert kv["prefix_bytes"] > 0
    stored = server.context.sessions.get(second.id.removeprefix("chatcmpl-"))
    assert stored.settings["document"] == DOCUMENT.strip()
    listed = server.http.get("/sessions").json()["sessions"]
    assert all("document" not in one["settings"] for one in listed)


def test_a_conversation_has_its_document_in_front_of_the_first_question(server: Server) -> None:
    before = [{"role": "system", "content": "Be brief."}]
    with client_of(server) as client:
        answers = [ask(client, question, before=before) for question in ("Where to?", "And then?")]
    assert [used(answer) for answer in answers] == [False, True]


def test_a_reference_sees_the_document_in_full_precision(server: Server) -> None:
    with client_of(server) as client:
        answers = [ask(client, "Why is that so?", reference=True) for _ in range(2)]
    assert [used(answer) for answer in answers] == [False, False]


def test_a_run_takes_a_document_and_its_result_says_what_came_of_it(server: Server) -> None:
    body: dict[str, Any] = {
        "document": DOCUMENT,
        "config": {"kv_budget": 0.5},
        "options": {"max_new_tokens": 10, "reference": False},
    }
    summaries = []
    for question in ("What is on the map?", "Where is the river?"):
        sid = server.start(question, **body)
        assert server.context.runs.wait(sid, 60)
        summaries.append(server.context.sessions.get(sid).summary)
    said = [[row for row in rows(summary, "en") if row[0].startswith("Kept document")] for summary in summaries]
    assert [len(found) for found in said] == [1, 1]
    assert "read" in said[0][0][1] and "used" in said[1][0][1]
    refused = server.http.post("/runs", json={"prompt": "x", "document": "y" * 2000})
    assert refused.status_code == 422 and "at most 1000 characters" in refused.json()["detail"]


def test_nobody_learns_from_the_time_what_another_has_asked(tmp_path: Path) -> None:
    server = serve(tmp_path, list_sessions=False)
    try:
        with httpx.Client(timeout=60) as mine, httpx.Client(timeout=60) as yours:
            assert not used(ask(client_of(server, mine), "Where?"))
            assert not used(ask(client_of(server, yours), "Where?"))
            assert mine.cookies and dict(mine.cookies) != dict(yours.cookies)
            last = ask(client_of(server, mine), "Why?")
            assert used(last)
            both = server.context.runs._driver._prefixes
            assert both is not None and both.nbytes == 2 * last.usage.model_extra["kv"]["prefix_bytes"]
    finally:
        server.close()


def test_nothing_is_kept_where_there_is_no_room_for_it(tmp_path: Path) -> None:
    server = serve(tmp_path, prefix_mb=0)
    try:
        with client_of(server) as client:
            answers = [ask(client, "Where?") for _ in range(2)]
        assert [used(answer) for answer in answers] == [False, False]
        assert answers[1].usage.model_extra["kv"]["prefix_bytes"] == 0
    finally:
        server.close()


def test_a_batch_starts_from_kept_documents_too(tmp_path: Path) -> None:
    server = serve(tmp_path, batch=2)
    try:
        with client_of(server) as client:
            answers = [ask(client, question) for question in ("Where?", "Where?")]
        assert [used(answer) for answer in answers] == [False, True]
        assert answers[0].choices[0].message.content == answers[1].choices[0].message.content
    finally:
        server.close()


class Sized:
    """Stands in for a snapshot."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


def test_shelves_share_one_bound_and_count_their_own() -> None:
    store = PrefixStore(100)
    mine, yours = Shelf(store, "a"), Shelf(store, "b")
    mine.add("k", Sized(60))  # type: ignore[arg-type]
    assert mine.get("k") is not None and yours.get("k") is None
    assert (mine.nbytes, yours.nbytes) == (60, 0)
    yours.add("k", Sized(70))  # type: ignore[arg-type]
    assert mine.get("k") is None and (mine.nbytes, yours.nbytes, store.nbytes) == (0, 70, 70)


def test_there_is_no_shelf_for_nobody_and_none_for_a_model_that_is_gone() -> None:
    private, shared = Prefixes(1, private=True), Prefixes(1, private=False)
    assert private.shelf(KEY, "") is None and shared.shelf(KEY, "") is not None
    assert Prefixes(0, private=False).shelf(KEY, "u") is None
    shelf = shared.shelf(KEY, "u")
    assert shelf is not None
    shelf.add("k", Sized(10))  # type: ignore[arg-type]
    shared.keep_only(lambda *model: True)
    assert shared.nbytes == 10
    shared.keep_only(lambda *model: False)
    assert shared.nbytes == 0


def test_a_document_is_found_again_in_the_rendered_conversation() -> None:
    talk = with_document((("system", "Be brief."), ("user", "Hi"), ("assistant", "Yes?"), ("user", "Go on")), "A B")
    assert talk[1] == ("user", "A B\n\nHi") and talk[3] == ("user", "Go on")
    document, rest = document_of(transcript(talk), "A B")
    assert document.endswith("User: A B") and rest.startswith("Hi\n")
    assert document_of("changed", "A B") == ("", "changed")
