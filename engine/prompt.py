"""A prompt as token ids, and in parts that the cache can be fed with.

Knows a tokenizer and its chat template; knows no cache.
"""

from __future__ import annotations

from engine.errors import PromptError
from engine.models import LoadedModel

PREFILL_CHUNK = 512
"""Prompt tokens per forward: progress, and a stop that is heard, at no measured cost."""


def prompt_ids(loaded: LoadedModel, prompt: str, chat: bool) -> list[int]:
    """Token ids of a prompt, in the chat template if asked for and there.

    Raises:
        PromptError: the prompt is empty.
    """
    if not prompt.strip():
        raise PromptError("the prompt must not be empty: paste a text, choose a sample document, or give a file.")
    tokenizer = loaded.tokenizer
    if chat and tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        encoded = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        encoded = tokenizer(prompt)["input_ids"]
    ids = [int(token) for token in encoded]
    if not ids:
        raise PromptError("the prompt has no token for this model's tokenizer: write some text.")
    return ids


def split_ids(loaded: LoadedModel, document: str, prompt: str, chat: bool) -> tuple[list[int], int]:
    """All token ids, and how many of them are the document; 0 where there is none."""
    if not document.strip():
        return prompt_ids(loaded, prompt, chat), 0
    if not prompt.strip():
        raise PromptError("a document must come with a question: the prompt is empty.")
    whole = prompt_ids(loaded, f"{document}\n\n{prompt}", chat)
    alone = prompt_ids(loaded, document, chat)
    pairs = enumerate(zip(whole, alone, strict=False))
    shared = next((place for place, (a, b) in pairs if a != b), min(len(whole), len(alone)))
    # A forward of one token would count as decoding: both parts need two.
    return whole, shared if 2 <= shared <= len(whole) - 2 else 0


def prompt_parts(ids: list[int], chunk: int) -> list[list[int]]:
    """The prompt in forwards of `chunk` tokens; none has one token, which the cache would take for decoding."""
    chunk = max(2, chunk)
    starts = list(range(0, len(ids), chunk))
    if len(ids) > 1 and len(ids) - starts[-1] == 1:
        # chunk - 1 and 2 tokens where there is room for that, else one forward of 3.
        starts[-1:] = [starts[-1] - 1] if chunk > 2 else []
    return [ids[begin:end] for begin, end in zip(starts, [*starts[1:], len(ids)], strict=True)]


def eos_ids(loaded: LoadedModel) -> set[int]:
    """All ids that end a sequence for this model."""
    found: set[int] = set()
    for source in (loaded.model.generation_config, loaded.model.config, loaded.tokenizer):
        value = getattr(source, "eos_token_id", None)
        found.update(value if isinstance(value, list) else [] if value is None else [int(value)])
    return found
