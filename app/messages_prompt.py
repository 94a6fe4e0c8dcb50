"""A conversation as one text that a model reads: by the model's own chat template, or plainly where it has none.

Knows a loaded model's tokenizer; knows no run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.errors import PromptError


def render(loaded: Any, messages: Sequence[tuple[str, str]]) -> str:
    """The text for (role, text) pairs, up to where the model's answer begins.

    Raises:
        PromptError: the model's template refuses these roles in this order.
    """
    tokenizer = getattr(loaded, "tokenizer", None)
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        return transcript(messages)
    listed = [{"role": role, "content": text} for role, text in messages]
    try:
        rendered = str(tokenizer.apply_chat_template(listed, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # a template is a program of the model's makers and raises what it likes
        raise PromptError(f"this model's chat template refuses the messages: {str(error)[:200]}") from error
    # The engine's tokenizer call adds the opening token itself, where the model has one.
    opening = getattr(tokenizer, "bos_token", None)
    adds = tokenizer("")["input_ids"][:1] == [getattr(tokenizer, "bos_token_id", None)]
    return rendered.removeprefix(opening) if opening and adds else rendered


def transcript(messages: Sequence[tuple[str, str]]) -> str:
    """The conversation as plain lines."""
    lines = [f"{role.capitalize()}: {text}" for role, text in messages]
    return "\n".join([*lines, "Assistant:"])


def with_document(messages: Sequence[tuple[str, str]], document: str) -> tuple[tuple[str, str], ...]:
    """The conversation with a document in front of the first thing that the user says."""
    out = list(messages)
    place = next((at for at, (role, _) in enumerate(out) if role == "user"), 0)
    role, said = out[place]
    out[place] = (role, f"{document}\n\n{said}")
    return tuple(out)


def document_of(rendered: str, document: str) -> tuple[str, str]:
    """(all up to the document's end, what follows) of a conversation that `with_document` has begun.

    The first is empty where the model's template has changed the document: the conversation is then read as one.
    """
    at = rendered.find(f"{document}\n\n")
    if at < 0:
        return "", rendered
    return rendered[: at + len(document)], rendered[at + len(document) + 2 :]
