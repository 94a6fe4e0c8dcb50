"""A run as an iterator of trace events.

    for event in generate(load_model(), "Once upon a time", QEvictConfig(), RunOptions()):
        ...

Yields the run as it happens; stop it between tokens with `close()`, or with `should_stop` to get a
summary too. One sequence. Knows the model, the cache and the reference; knows no server and no file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from engine.config import QEvictConfig
from engine.errors import OutOfMemoryError
from engine.models import LoadedModel
from engine.prefix import PrefixStore
from engine.prompt import prompt_ids
from engine.run import Run
from engine.run_options import RunOptions
from engine.trace import TraceEvent

__all__ = ["RunOptions", "alone", "generate", "numbered", "prompt_ids"]


def generate(
    loaded: LoadedModel,
    prompt: str,
    config: QEvictConfig | None = None,
    options: RunOptions | None = None,
    *,
    session: str = "",
    watched_row: Callable[[], int] | None = None,
    should_stop: Callable[[], bool] | None = None,
    policy: str = "qevict",
    document: str = "",
    prefixes: PrefixStore | None = None,
) -> Iterator[TraceEvent]:
    """Runs one prompt and yields its trace; events carry seq 0, 1, 2, ….

    Args:
        loaded: the model. prompt: text.
        config: cache settings; `planned_new_tokens` is set to the run's own number of new tokens.
        options: everything else.
        session: id that the trace carries.
        watched_row: board row whose scores are recorded at each event; None = one after the other.
        should_stop: asked between tokens and prompt chunks; True ends the run with a summary.
        policy: name that the trace carries.
        document: text in front of the prompt that is compressed on its own, before the prompt is read. The same
            document asked again then starts from `prefixes`, unless a reference must see it in full precision.
        prefixes: where such documents are kept; None keeps none.

    Raises:
        PromptError, BudgetError, BackendError, UnsupportedModelError, OutOfMemoryError: before or during the run.
    """
    run = Run(loaded, prompt, config or QEvictConfig(), options or RunOptions(), session, policy, document, prefixes)
    yield from alone(run, watched_row, should_stop)


def alone(
    run: Run, watched_row: Callable[[], int] | None, should_stop: Callable[[], bool] | None
) -> Iterator[TraceEvent]:
    """The numbered events of a run that shares its forwards with no other.

    Raises:
        OutOfMemoryError: during the run.
    """
    seq = 0
    try:
        for event in run.events(watched_row, should_stop):
            yield numbered(event, seq)
            seq += 1
    except (torch.OutOfMemoryError, MemoryError) as error:
        loaded = run.loaded
        raise OutOfMemoryError(
            f"{loaded.label} ran out of memory on {loaded.device} with a prompt of {len(run.ids)} tokens: "
            "take a shorter prompt or a smaller model."
        ) from error


def numbered(event: TraceEvent, seq: int) -> TraceEvent:
    """The event with its number in the trace."""
    object.__setattr__(event, "seq", seq)
    return event
