"""Generated tasks: seeded, of the asked length, with the answer where it is said to be."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from engine.errors import ConfigError, PromptError
from engine.evaluation.items import MAIN, Item, Span, Text, continuations, read_texts
from engine.evaluation.tasks import COPIED, QUOTED, make_items, task_info, tasks
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
STORY = " ".join(
    f"On day {day} the ferry crossed the sound with {day * 7 % 31} crates and a rather long list of passengers."
    for day in range(120)
)
TEXTS = [Text("ferry", STORY), Text("again", STORY[::-1].replace(" ", ". "))]
NAMES = [info.name for info in tasks()]


def text_of(ids: Sequence[int]) -> str:
    return bytes(token for token in ids if token < 256).decode()


def answer_of(item: Item, span: str = MAIN) -> str:
    return text_of(item.forced[item.spans[span].begin : item.spans[span].end])


@pytest.mark.parametrize("name", NAMES)
def test_items_depend_on_seed_and_index_alone(name: str) -> None:
    first = make_items(name, TOKENIZER, TEXTS, length=600, count=3, seed=5)
    again = make_items(name, TOKENIZER, TEXTS, length=600, count=2, seed=5)
    assert first[:2] == again
    assert len({item.prompt_hash for item in first}) == 3
    assert first[0].prompt_hash != make_items(name, TOKENIZER, TEXTS, length=600, count=1, seed=6)[0].prompt_hash
    for item in first:
        assert 0.6 * 600 <= len(item.prompt) <= 1.4 * 600
        assert item.task == name and task_info(name).chance < 1.0


@pytest.mark.parametrize("name", NAMES)
def test_the_question_inside_the_prompt_is_the_same_text(name: str) -> None:
    after = make_items(name, TOKENIZER, TEXTS, length=600, count=1)[0]
    inside = make_items(name, TOKENIZER, TEXTS, length=600, count=1, question="inside")[0]
    assert after.prompt + after.forced == inside.prompt + inside.forced
    assert inside.spans[MAIN].begin >= 1 and answer_of(after) == answer_of(inside)
    assert len(inside.prompt) >= len(after.prompt)


def test_a_needle_is_in_the_text_once_and_asked() -> None:
    item = make_items("niah1_raw", TOKENIZER, TEXTS, length=600, count=1)[0]
    answer, prompt = answer_of(item), text_of(item.prompt)
    assert prompt.count(f"is{answer}.") == 1 and len(answer) == 6
    asked = text_of(item.forced[: item.spans[MAIN].begin]).strip()
    assert f"{asked}{answer}." in prompt


def test_a_line_is_in_the_table_once() -> None:
    item = make_items("kvline", TOKENIZER, TEXTS, length=600, count=1)[0]
    question = text_of(item.forced[: item.spans[MAIN].begin])
    assert ("\n" + text_of(item.prompt)).count(f"{question}{answer_of(item)}") == 1
    assert ("\n" + text_of(item.prompt)).count(question) == 1
    lines = text_of(item.prompt).splitlines()
    assert question.startswith("\n") and text_of(item.prompt).endswith("\n")
    assert len(lines) == item.notes["lines"] > 10 and len(set(lines)) == len(lines)


def test_a_copy_is_scored_from_its_ninth_token_on() -> None:
    item = make_items("copy_passage", TOKENIZER, TEXTS, length=600, count=1)[0]
    prompt = text_of(item.prompt)
    passage = prompt[: prompt.index("\n\nThe same text again:")]
    assert answer_of(item) == passage[8:COPIED]


def test_a_quotation_goes_on_as_the_text_did() -> None:
    item = make_items("quote_as", TOKENIZER, TEXTS[:1], length=600, count=1)[0]
    begun = text_of(item.forced[: item.spans[MAIN].begin]).rpartition('"')[2]
    assert begun + answer_of(item) in text_of(item.prompt) and len(answer_of(item)) == QUOTED


def test_labels_are_a_choice_of_five_whose_first_tokens_differ() -> None:
    items = make_items("icl_label5", TOKENIZER, TEXTS, length=600, count=6)
    for item in items:
        assert len(set(item.choices)) == 5
        assert item.choices[0] == item.forced[item.spans[MAIN].begin]
        asked = text_of(item.forced).partition(" ->")[0]
        assert f"\n{asked} ->" not in text_of(item.prompt)


def test_drift_asks_twice_with_other_text_between() -> None:
    item = make_items("drift", TOKENIZER, TEXTS, length=600, count=1)[0]
    assert answer_of(item, "first") == answer_of(item)
    assert item.spans[MAIN].begin - item.spans["first"].end > 64
    assert f"is{answer_of(item)}." in text_of(item.prompt)


def test_stretches_of_text_do_not_overlap_and_texts_take_turns() -> None:
    items = continuations(TOKENIZER, TEXTS, 200, 20, 6)
    assert [item.source.partition("@")[0] for item in items[:4]] == ["ferry", "again"] * 2
    assert {item.spans[MAIN] for item in items} == {Span(1, 20)}
    whole = text_of(items[0].prompt + items[0].forced) + text_of(items[2].prompt)
    assert STORY.startswith(whole)
    assert continuations(TOKENIZER, [Text("short", "too short")], 200, 20, 6) == []


def test_texts_come_from_a_folder_or_its_texts(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "b.txt").write_text("Second.")
    (tmp_path / "texts" / "a.txt").write_text("First.")
    (tmp_path / "texts" / "zh_c.txt").write_text("第三。")
    assert [text.name for text in read_texts(tmp_path)] == ["a", "b"]
    assert [text.text for text in read_texts(tmp_path / "texts")] == ["First.", "Second."]
    with pytest.raises(PromptError, match="folder"):
        read_texts(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(PromptError, match=r"no \.txt"):
        read_texts(tmp_path / "empty")


def test_short_texts_are_no_haystack_where_longer_ones_are() -> None:
    texts = [Text("note", "Too short. Far too short."), TEXTS[0]]
    items = make_items("niah1_raw", TOKENIZER, texts, length=600, count=4)
    assert {item.source for item in items} == {"ferry"}
    assert make_items("niah1_raw", TOKENIZER, texts[:1], length=600, count=1)[0].source == "note"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"question": "before"}, "question must be"),
        ({"length": 64}, "128 tokens"),
        ({"texts": []}, "at least one text"),
    ],
)
def test_wrong_input(changes: dict[str, object], words: str) -> None:
    given: dict[str, object] = {"length": 600, "count": 1, "texts": TEXTS} | changes
    with pytest.raises(ConfigError, match=words):
        make_items("kvline", TOKENIZER, **given)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="task must be"):
        task_info("no-such-task")
    with pytest.raises(ConfigError, match="span"):
        Item("t", 0, 1, (1, 2), (3, 4), {MAIN: Span(0, 1)})
