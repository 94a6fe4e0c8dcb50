"""Reads presets: named run settings and notes on models, as TOML files that anyone can write.

A file holds `title_en`, `title_zh`, `note_en`, `note_zh`, `group`, `order` and a table `[settings]` of `QEvictConfig`'s
fields. A table `[sweep]` with `setting`, `names` and `values` makes one preset of each value; titles and notes may then
hold `{value}`. Everything unknown, of a wrong type or impossible is refused with file, key and rule.
Knows the configuration; knows no model, no interface.
"""

from __future__ import annotations

import difflib
import functools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import QEvictConfig
from engine.errors import ConfigError

FOLDER = Path(__file__).resolve().parent
DEFAULT = "paper-20"
GROUPS = ("paper", "variant", "ablation", "sweep", "own")

_TEXTS = ("title_en", "title_zh", "note_en", "note_zh")
_RUN_KEYS = (*_TEXTS, "group", "order", "settings", "sweep")
_SWEEP_KEYS = ("setting", "names", "values")
_MODEL_KEYS = ("name", *_TEXTS, "order", "parameters_millions", "positions", "licence", "gated")


class PresetError(ConfigError):
    """A preset file that cannot be used; the text names file, key and rule."""


@dataclass(frozen=True, slots=True)
class Preset:
    """Named run settings.

    Attributes:
        name: what the command line and the page call it: the file's stem, or a sweep's name.
        title_en, title_zh: a few words for a list.
        note_en, note_zh: one sentence on what it is for.
        group: one of `GROUPS`.
        order: place in a list, low first.
        config: the settings themselves.
        path: the file that it came from.
    """

    name: str
    title_en: str
    title_zh: str
    note_en: str
    note_zh: str
    group: str
    order: int
    config: QEvictConfig
    path: Path


@dataclass(frozen=True, slots=True)
class ModelNote:
    """What is known of a model beforehand. `name` goes to `load_model`; `positions` counts tokens."""

    name: str
    title_en: str
    title_zh: str
    note_en: str
    note_zh: str
    order: int
    parameters_millions: int
    positions: int
    licence: str
    gated: bool


@functools.cache
def _built_in() -> Mapping[str, Preset]:
    found: dict[str, Preset] = {}
    for path in sorted((FOLDER / "runs").glob("*.toml")):
        for preset in load_file(path):
            if preset.name in found:
                raise PresetError(f"{path}: name {preset.name!r} must be unique, but {found[preset.name].path} has it.")
            found[preset.name] = preset
    return {preset.name: preset for preset in sorted(found.values(), key=lambda preset: preset.order)}


def load_presets() -> dict[str, Preset]:
    """All presets that come with the product, by name, in the order of a list.

    Raises:
        PresetError: one of the files cannot be used, or two share a name.
    """
    return dict(_built_in())


def load_preset(name: str) -> Preset:
    """The preset called `name`, or the one in the file of that path (`*.toml`).

    Raises:
        PresetError: no such preset or file, a file that cannot be used, or one that holds several.
    """
    if name.endswith(".toml"):
        several = load_file(Path(name).expanduser())
        if len(several) != 1:
            raise PresetError(f"{name}: sweep must be left out of a file that is used as one preset.")
        return several[0]
    presets = _built_in()
    if name in presets:
        return presets[name]
    near = difflib.get_close_matches(name, presets, n=1)
    hint = f"; did you mean {near[0]}?" if near else "."
    raise PresetError(f"preset must be one of {', '.join(presets)}, or a .toml file, got {name!r}{hint}")


def load_file(path: Path) -> tuple[Preset, ...]:
    """The presets that the file at `path` holds: one, or one for each value of a sweep.

    Raises:
        PresetError: unreadable, not TOML, an unknown key, a wrong type, or an impossible value.
    """
    table = _read(path, _RUN_KEYS)
    settings = _typed(path, table, "settings", dict, {})
    texts = {key: _typed(path, table, key, str, path.stem if key.startswith("title") else "") for key in _TEXTS}
    group = _typed(path, table, "group", str, "own")
    if group not in GROUPS:
        raise PresetError(f"{path}: group must be one of {', '.join(GROUPS)}, got {group!r}.")
    order = _typed(path, table, "order", int, 1000)
    presets = []
    for place, (name, changes) in enumerate(_sweep(path, table, settings)):
        value = next(iter(changes.values()), "")
        presets.append(
            Preset(
                name=name,
                **{key: text.replace("{value}", str(value)) for key, text in texts.items()},
                group=group,
                order=order + place,
                config=_config(path, {**settings, **changes}),
                path=path,
            )
        )
    return tuple(presets)


@functools.cache
def load_models() -> tuple[ModelNote, ...]:
    """Notes on the models that are known beforehand, in the order of a list.

    Raises:
        PresetError: one of the files cannot be used.
    """
    notes = []
    for path in sorted((FOLDER / "models").glob("*.toml")):
        table = _read(path, _MODEL_KEYS)
        for key in _MODEL_KEYS:
            if key not in table:
                raise PresetError(f"{path}: {key} must be there.")
        notes.append(
            ModelNote(
                name=_typed(path, table, "name", str),
                **{key: _typed(path, table, key, str) for key in _TEXTS},
                order=_typed(path, table, "order", int),
                parameters_millions=_typed(path, table, "parameters_millions", int),
                positions=_typed(path, table, "positions", int),
                licence=_typed(path, table, "licence", str),
                gated=_typed(path, table, "gated", bool),
            )
        )
    return tuple(sorted(notes, key=lambda note: note.order))


def _read(path: Path, known: Sequence[str]) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PresetError(f"{path}: the file must be readable ({error.strerror or error}).") from error
    except UnicodeDecodeError as error:
        raise PresetError(f"{path}: the file must be UTF-8 text ({error.reason} at byte {error.start}).") from error
    except tomllib.TOMLDecodeError as error:
        raise PresetError(f"{path}: the file must be TOML ({error}).") from error
    _refuse_unknown(path, "", table, known)
    return table


def _refuse_unknown(path: Path, prefix: str, table: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}."
            raise PresetError(f"{path}: {prefix}{key} is an unknown key; {hint}")


def _typed(path: Path, table: Mapping[str, Any], key: str, kind: type, default: Any = None) -> Any:
    value = table.get(key, default)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        wanted = {str: "text", int: "a whole number", bool: "true or false", dict: "a table", list: "a list"}[kind]
        raise PresetError(f"{path}: {key} must be {wanted}, got {value!r}.")
    return value


def _sweep(path: Path, table: Mapping[str, Any], settings: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """(name, changed settings) of every preset in the file."""
    if "sweep" not in table:
        return [(path.stem, {})]
    sweep = _typed(path, table, "sweep", dict)
    _refuse_unknown(path, "sweep.", sweep, _SWEEP_KEYS)
    setting = _typed(path, sweep, "setting", str)
    names = _typed(path, sweep, "names", list)
    values = _typed(path, sweep, "values", list)
    if not names or len(names) != len(values) or not all(isinstance(name, str) and name for name in names):
        raise PresetError(f"{path}: sweep.names must be texts, as many as sweep.values, got {len(names)}.")
    if setting in settings:
        raise PresetError(f"{path}: settings.{setting} must be left out, since sweep.setting sets it.")
    return [(name, {setting: value}) for name, value in zip(names, values, strict=True)]


def _config(path: Path, settings: Mapping[str, Any]) -> QEvictConfig:
    try:
        return QEvictConfig.from_mapping(settings)
    except ConfigError as error:
        raise PresetError(f"{path}: settings: {error}") from error
