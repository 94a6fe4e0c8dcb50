"""What somebody asks of a comparison, checked before a model is loaded, and made into what the engine takes.

Knows the names of systems through the engine's registry, which is imported only when names are checked.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from app.engine_import import import_engine
from engine.errors import BudgetError, ConfigError, PromptError

if TYPE_CHECKING:
    from engine.compare import CompareOptions, SystemChoice

LEAST, MOST = 2, 4
"""How many systems stand in one comparison."""
DEFAULT_SYSTEMS = ("qevict", "snapkv", "streamingllm", "kivi-2")
BUDGET_KINDS = ("share", "total_bytes", "tokens")
SINK_TOKENS, WINDOW = 5, 8
"""Where the drawn windows begin, and how long they are: QEvict's own default grid."""


@dataclass(frozen=True, slots=True)
class CompareRequest:
    """One comparison, as asked for.

    Attributes:
        systems: two to four names from the registry.
        budget: one of `BUDGET_KINDS` with its value; of every system that takes one.
        mode: "teacher" (all read FullKV's tokens) or "free".
        reference: length at which the budget is matched, see `BudgetSpec.reference`.
        match_to: a system whose bytes the QEvict systems get instead of the budget; empty = none.
        parameters: what differs from a system's defaults, by its name.
        kv_dtype: what all systems store full-precision tokens in.
    """

    prompt: str
    systems: tuple[str, ...]
    budget: Mapping[str, float] = field(default_factory=lambda: {"share": 0.2})
    mode: str = "teacher"
    max_new_tokens: int = 128
    match_to: str = ""
    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    model: str = "embedded"
    device: str = "auto"
    dtype: str = "auto"
    kv_dtype: str = "float16"
    reference: str = "prompt+new"
    chat: bool = True
    ignore_eos: bool = False
    seed: int = 0
    title: str = ""
    lang: str = "en"

    def check(self) -> None:
        """Refuses what can't be compared; loads no model.

        Raises:
            PromptError: nothing to read. ConfigError: a name, a number of systems, a parameter or the budget is wrong,
            or a system has no place in this mode or under this budget.
            BackendError: a system needs a package that is not here.
        """
        if not self.prompt.strip():
            raise PromptError("the prompt is empty: give the systems something to read.")
        if not LEAST <= len(self.systems) <= MOST:
            raise ConfigError(f"a comparison takes {LEAST} to {MOST} systems, got {len(self.systems)}.")
        twice = [name for name in dict.fromkeys(self.systems) if self.systems.count(name) > 1]
        if twice:
            raise ConfigError(f"each system can stand in a comparison once, got {twice[0]} twice.")
        self.choices()
        self.options()

    def choices(self) -> list[SystemChoice]:
        """The systems as the engine takes them.

        Raises:
            ConfigError, BackendError: see `check`.
        """
        import_engine()
        from engine.baselines import registry
        from engine.compare import SystemChoice
        from engine.errors import BackendError

        known = {info.name: info for info in registry.systems()}
        asked = [*self.systems, *([self.match_to] if self.match_to else []), *self.parameters]
        for name in asked:
            if name not in known:
                raise ConfigError(f"unknown system {name!r}; known are {', '.join(known)}.")
        for name in self.systems:
            missing = known[name].unavailable
            if missing:
                raise BackendError(missing)
        if self.match_to and not any(known[name].family == "tiers" for name in self.systems):
            raise ConfigError(f"only QEvict can be given the bytes of {self.match_to}, and it is not compared here.")
        return [
            SystemChoice(
                name,
                self._parameters(name, known),
                match_to=self.match_to or None if known[name].family == "tiers" else None,
            )
            for name in self.systems
        ]

    def _parameters(self, name: str, known: Mapping[str, Any]) -> dict[str, Any]:
        from engine.baselines import registry
        from engine.baselines.base import RunPlan

        given = dict(self.parameters.get(name, {}))
        rival = registry.rival(name, given)
        own = rival.budgeted and not (self.match_to and rival.family == "tiers")
        # In teacher mode FullKV runs beside the systems; here only whether it does is asked.
        rival.check_run(RunPlan(self.options().budget if own else None, witness=self.mode == "teacher" or None))
        return given

    def options(self) -> CompareOptions:
        """The options as the engine takes them.

        Raises:
            ConfigError: a budget or a number is out of range.
        """
        from engine.compare import BudgetSpec, CompareOptions

        amounts: dict[str, Any] = {
            kind: value if kind == "share" else round(value) for kind, value in self.budget.items()
        }
        return CompareOptions(
            mode=self.mode,
            budget=BudgetSpec(**amounts, reference=self.reference),
            max_new_tokens=self.max_new_tokens,
            kv_dtype=self.kv_dtype,
            interval=WINDOW,
            sink_tokens=SINK_TOKENS,
            chat=self.chat,
            ignore_eos=self.ignore_eos,
            seed=self.seed,
        )


def sharper(error: BudgetError, request: CompareRequest, loaded: Any) -> BudgetError:
    """The same refusal, which names the systems that the budget is too small for and what suffices for all.

    Args:
        loaded: the model, whose shape decides the bytes.
    """
    from engine.baselines import registry
    from engine.baselines.base import RunPlan
    from engine.baselines.recorder import Reference
    from engine.baselines.rival_cache import RivalCache
    from engine.budget import KVShape
    from engine.prompt import prompt_ids

    options = request.options()
    prompt = len(prompt_ids(loaded, request.prompt, options.chat))
    new = max(1, min(options.max_new_tokens, loaded.max_positions - prompt))
    own = RivalCache(loaded.model, Reference(), RunPlan(planned_new_tokens=new)).kv_shape
    stored = RunPlan(kv_dtype=options.kv_dtype).stored(loaded.model.dtype)
    shape = KVShape(own.num_layers, own.num_kv_heads, own.head_dim, stored.itemsize)
    refused: dict[str, BudgetError] = {}
    for choice in request.choices():
        rival, budget = registry.rival(choice.name, choice.parameters), options.budget
        if choice.match_to is not None:
            budget = registry.match_to(choice.match_to, shape, prompt, new, kv_dtype=options.kv_dtype)
        run = RunPlan(budget if rival.budgeted else None, new, options.kv_dtype, options.seed, loaded.tokenizer)
        try:
            rival.account(shape, prompt, new - 1, run)
        except BudgetError as problem:
            refused[choice.name] = problem
    if not refused:
        return error
    full = shape.full_kv_bytes(prompt + new)
    asked = options.budget.model_bytes(shape, prompt, new)
    share = max(problem.smallest_share for problem in refused.values())
    instead = f"the bytes of {request.match_to} are" if request.match_to else f"a budget of {asked / full:.2%} is"
    least = math.ceil(share * full)
    enough = f"the smallest feasible for all is {share:.2%} of FullKV ({least:,} bytes)."
    if share > 1.0:
        enough = f"the smallest feasible for all is {least:,} bytes, more than FullKV itself holds: take a longer text."
    return BudgetError(
        f"{instead} too small for {' and '.join(refused)} at {prompt:,} + {new:,} tokens: {enough}",
        smallest_bytes=least,
        smallest_share=share,
    )


def split_names(words: str) -> tuple[str, ...]:
    """Names from a comma-separated list; empty parts are left out."""
    return tuple(part for part in (word.strip() for word in words.split(",")) if part)


def parameters_of(settings: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Parameters from words such as "snapkv.window=16"; values are JSON, or else text.

    Raises:
        ConfigError: a word has another form.
    """
    found: dict[str, dict[str, Any]] = {}
    for word in settings:
        target, is_set, value = word.partition("=")
        system, has_name, name = target.partition(".")
        if not (is_set and has_name and system and name):
            raise ConfigError(f"a parameter must look like snapkv.window=16, got {word!r}.")
        try:
            read: Any = json.loads(value)
        except json.JSONDecodeError:
            read = value
        found.setdefault(system, {})[name] = read
    return found
