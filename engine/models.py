"""Loads a causal language model and its tokenizer: the embedded one, a local folder, or a name on the hub.

Decides device and dtype, and turns everything that can go wrong into a named error. Knows nothing of caches of keys
and values: whether QEvict can manage the architecture is the cache's question.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from engine import embedded, host
from engine.errors import (
    ConfigError,
    EngineError,
    ModelError,
    ModelNotFoundError,
    ModelTooLargeError,
    UnsupportedModelError,
)
from engine.trace import Progress

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

EMBEDDED = "embedded"
DEVICES = ("auto", "cpu", "cuda", "mps")
SPREAD = "spread"
"""As a device: the layers are divided among all GPUs (by accelerate), and each layer's pools lie where the layer is."""
DTYPES = ("auto", "float32", "float16", "bfloat16")

_NO_NETWORK = frozenset(
    ("LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectionError", "ConnectError", "TimeoutException")
)
"""Names of the classes that the hub's client raises when it cannot reach the hub."""

_MEMORY_MARGIN = 1.10
"""Weights plus what loading them needs on top; measured 1.0 to 1.05 for safetensors."""


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
        model: in eval mode, on `device`.
        tokenizer: a fast tokenizer with a pad token.
        name: as the user named it; "embedded" is SmolLM2-135M-Instruct.
        label: for display.
        device: "cpu", "cuda", "cuda:1", "mps"; of a model that is spread over several, the one that token ids go to.
        dtype: "float32", "float16" or "bfloat16".
        fingerprint: 16 hex digits of a SHA-256 over the configuration and a fixed sample of every weight.
        max_positions: longest sequence that the model was made for, in tokens.
        weights: form of the linear layers: "int4", "float16", "bfloat16", or the dtype where they are unchanged.
        weights_error: relative error of the logits that the form costs, None where it is exact.
        devices: all that hold weights, in the order of the layers; one, unless the model is spread.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    label: str
    device: str
    dtype: str
    fingerprint: str
    max_positions: int
    weights: str = "float32"
    weights_error: float | None = None
    devices: tuple[str, ...] = ()


def load_model(
    name: str = EMBEDDED,
    *,
    device: str = "auto",
    dtype: str = "auto",
    weights: str = "auto",
    progress: embedded.ProgressSink | None = None,
) -> LoadedModel:
    """The model called `name`, ready to run.

    Args:
        name: "embedded", a folder with a checkpoint, or a name on the hub ("owner/model").
        device: "auto" takes cuda, else mps, else cpu; "cuda:1" names one of several; "spread" divides the layers among
            all GPUs, for a model that one cannot hold.
        dtype: "auto" takes float32 on the CPU, the checkpoint's own elsewhere.
        weights: form of the linear layers, see `engine.weights`; "auto" takes the embedded model's own 4-bit codes on
            the CPU where they are faster and nobody asked for a dtype, and leaves every other model as it is.
        progress: told how far the stages "convert" (first use of the embedded model) and "load" have come.

    Raises:
        ModelNotFoundError: no such model, no access to it, or no network to fetch it.
        ModelTooLargeError: the weights do not fit the free memory.
        UnsupportedModelError: not a causal language model, or one that needs code of its own.
        ModelError: a broken checkpoint or tokenizer.
        ConfigError: an unknown device, dtype or form of weights, or one that cannot be had here.
    """
    if not name.strip():
        raise ModelNotFoundError('the model name is empty: give "embedded", a folder, or a name such as owner/model.')
    chosen_device = choose_device(device)
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}.")
    if name == EMBEDDED:
        return _load_embedded(chosen_device, dtype, weights, progress)
    where, local_only = _locate(name)
    label = Path(name).name if "/" in name else name
    return _load(name, where, label, chosen_device, dtype, weights, local_only, progress)


def choose_device(device: str) -> str:
    """The device that `device` means on this machine.

    Raises:
        ConfigError: an unknown device, or one that this machine does not have.
    """
    import torch

    if device == SPREAD:
        return _spread_ready()
    kind, _, index = device.partition(":")
    if kind not in DEVICES or (index and not (kind == "cuda" and index.isdigit())):
        raise ConfigError(f"device must be one of {', '.join(DEVICES)}, {SPREAD} or cuda:N, got {device!r}.")
    present = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if device == "auto":
        return next(kind for kind, there in present.items() if there)
    if not present[kind] or (index and int(index) >= torch.cuda.device_count()):
        there = ", ".join(kind for kind, there in present.items() if there)
        raise ConfigError(f"device must be one that this machine has ({there}), got {device!r}.")
    return device


def _spread_ready() -> str:
    """ "spread", where a model can be divided.

    Raises:
        ConfigError: fewer than two GPUs, or accelerate is not installed.
    """
    found = _count_gpus()
    if found < 2:
        raise ConfigError(
            f"device {SPREAD!r} divides a model among GPUs and needs two of them; this machine has {found}."
        )
    if importlib.util.find_spec("accelerate") is None:
        raise ConfigError(f"device {SPREAD!r} needs the extra `spread`: pip install accelerate.")
    return SPREAD


def _count_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _load_embedded(device: str, dtype: str, weights: str, progress: embedded.ProgressSink | None) -> LoadedModel:
    """Loads the converted folder; one that turns out broken is built once more."""
    folder = embedded.ensure_converted(progress)
    label = f"{embedded.LABEL} (embedded)"
    try:
        return _load(EMBEDDED, str(folder), label, device, dtype, weights, True, progress)
    except (ModelTooLargeError, ConfigError):
        raise
    except EngineError:
        folder = embedded.ensure_converted(progress, rebuild=True)
        return _load(EMBEDDED, str(folder), label, device, dtype, weights, True, progress)


def _locate(name: str) -> tuple[str, bool]:
    """(what to hand to transformers, whether it lies here) for a name that is not the embedded one."""
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFoundError(f"the folder {path} must hold a checkpoint, but it has no config.json.")
        return str(path), True
    if path.is_file():
        raise UnsupportedModelError(f"{path} is a file: give the folder of a checkpoint in safetensors form.")
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ModelNotFoundError(f"there is no folder {path}: check the path of the model.")
    return name, not _hub_answers()


def _hub_answers() -> bool:
    """Whether the hub's name resolves: without this look, its client would retry for half a minute."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    if any(os.environ.get(key) for key in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True
    address = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    try:
        socket.getaddrinfo(address.hostname or "", address.port or 443)
    except OSError:
        return False
    return True


def _load(
    name: str,
    where: str,
    label: str,
    device: str,
    dtype: str,
    weights: str,
    local_only: bool,
    progress: embedded.ProgressSink | None,
) -> LoadedModel:
    from transformers import AutoConfig, AutoTokenizer

    from engine.weights import settle

    tell = progress or (lambda _: None)
    options = {"local_files_only": local_only, "trust_remote_code": False}
    tell(Progress("load", 0, 3))
    with _explained(name, local_only), _quiet_transformers():
        config = AutoConfig.from_pretrained(where, **options)
        _refuse_other_tasks(name, config)
        torch_dtype = _choose_dtype(dtype, device, config)
        _refuse_too_large(name, config, device, torch_dtype)
        tokenizer = AutoTokenizer.from_pretrained(where, **options)
        tell(Progress("load", 1, 3))
        model = _read_weights(name, where, torch_dtype, options | ({"device_map": "auto"} if device == SPREAD else {}))
        tell(Progress("load", 2, 3))
        moved: Any = model
        if device != SPREAD:
            moved.to(device)
        moved.eval()
    devices = tuple(dict.fromkeys(str(weight.device) for weight in model.parameters()))
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    short_id = fingerprint(model)
    codes = Path(where) / embedded.CODES if local_only else None
    with _explained(name, local_only):
        settled = settle(model, tokenizer, weights, dtype_asked=dtype, fingerprint=short_id, codes_file=codes)
    loaded = LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=name,
        label=label,
        device=device if device != SPREAD else str(model.get_input_embeddings().weight.device),
        dtype=str(torch_dtype).removeprefix("torch."),
        fingerprint=short_id,
        max_positions=max_positions(model.config),
        weights=settled.path,
        weights_error=settled.error,
        devices=devices,
    )
    tell(Progress("load", 3, 3))
    return loaded


def _read_weights(name: str, where: str, torch_dtype: torch.dtype, options: dict[str, Any]) -> PreTrainedModel:
    """The model with every weight read; one that the checkpoint lacks would be random, so it is an error."""
    from transformers import AutoModelForCausalLM

    read: Any = AutoModelForCausalLM.from_pretrained
    answer: tuple[PreTrainedModel, dict[str, Any]] = read(where, dtype=torch_dtype, output_loading_info=True, **options)
    model, report = answer
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(f"the checkpoint of {name} lacks {len(missing)} weights, {missing[0]} among them.")
    return model


def _refuse_other_tasks(name: str, config: Any) -> None:
    from transformers import AutoModelForCausalLM

    known = type(config) in AutoModelForCausalLM._model_mapping
    made_for = list(getattr(config, "architectures", None) or [])
    causal = ("CausalLM", "LMHeadModel", "ForConditionalGeneration")
    if not known or config.is_encoder_decoder or (made_for and not any(a.endswith(causal) for a in made_for)):
        kind = made_for[0] if made_for else config.model_type
        raise UnsupportedModelError(f"{name} must be a causal language model, but it is a {kind}.")


def _choose_dtype(dtype: str, device: str, config: Any) -> torch.dtype:
    import torch

    if dtype == "auto":
        own = getattr(config, "dtype", None)
        wanted = torch.float32 if device == "cpu" or not isinstance(own, torch.dtype) else own
        return wanted if wanted in (torch.float32, torch.float16, torch.bfloat16) else torch.float32
    chosen: torch.dtype = getattr(torch, dtype)
    return chosen


def _refuse_too_large(name: str, config: Any, device: str, torch_dtype: torch.dtype) -> None:
    """Counts the weights on the meta device, which takes no memory, and compares with what is free."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        shape = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    need = int(sum(weight.numel() for weight in shape.parameters()) * torch_dtype.itemsize * _MEMORY_MARGIN)
    free = free_bytes(device)
    if free is not None and need > free:
        has = "all GPUs together have" if device == SPREAD else f"{device} has"
        raise ModelTooLargeError(
            f"the weights of {name} need {_gigabytes(need)} as {str(torch_dtype).removeprefix('torch.')}, but {has} "
            f"{_gigabytes(free)} free: choose a smaller model, a smaller dtype, or free some memory."
        )


def free_bytes(device: str) -> int | None:
    """Free memory of `device` in bytes, or None where it is not told."""
    import torch

    if device.startswith("cuda"):
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    if device == SPREAD:
        return sum(int(torch.cuda.mem_get_info(index)[0]) for index in range(_count_gpus()))
    return host.free_memory_bytes()


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB"


def max_positions(config: Any) -> int:
    """Longest sequence, in tokens, that the configuration allows."""
    text = config.get_text_config(decoder=True)
    for attribute in ("max_position_embeddings", "n_positions", "max_sequence_length"):
        value = getattr(text, attribute, None)
        if isinstance(value, int) and value > 0:
            return value
    raise UnsupportedModelError(f"the configuration of {config.model_type} does not say how many positions it has.")


def fingerprint(model: PreTrainedModel) -> str:
    """16 hex digits that name configuration and weights; the same on every device and for every equal load.

    Samples 64 or more spread elements of each parameter: milliseconds instead of a pass over gigabytes, and any
    fine-tune, other quantization or half-read file changes it.
    """
    import torch

    digest = hashlib.sha256()
    settings = model.config.to_dict()
    for volatile in ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "_attn_implementation"):
        settings.pop(volatile, None)
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    for name, weight in sorted(model.named_parameters()):
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        flat = weight.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // 64)]
        digest.update(sample.to("cpu", torch.float32).numpy().tobytes())
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Hides transformers' own progress bars: ours is the one that the user sees."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    level = logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()


@contextlib.contextmanager
def _explained(name: str, local_only: bool) -> Iterator[None]:
    """Turns what transformers, the hub's client and torch raise into one sentence of ours."""
    try:
        yield
    except EngineError:
        raise
    except Exception as error:
        raise _named_error(name, local_only, error) from error


def _named_error(name: str, local_only: bool, error: Exception) -> EngineError:
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    # The hub's classes are compared by name: the engine does not import its client.
    kinds = {kind.__name__ for link in chain for kind in type(link).__mro__}
    text = str(error)
    first = text.strip().splitlines()[0] if text.strip() else type(error).__name__
    if "trust_remote_code" in text:
        return UnsupportedModelError(f"{name} needs code of its own to run, and foreign code is never run here.")
    if "GatedRepoError" in kinds or "gated repo" in text:
        return ModelNotFoundError(
            f"{name} is gated: accept its terms on its page on the hub, then log in with `hf auth login`."
        )
    if "HFValidationError" in kinds:
        return ModelNotFoundError(f"{name!r} is neither a folder here nor a possible name on the hub (owner/model).")
    if "OutOfMemoryError" in kinds or "MemoryError" in kinds:
        return ModelTooLargeError(f"the memory ran out while {name} was loading: choose a smaller model or dtype.")
    if kinds & {"RepositoryNotFoundError", "RevisionNotFoundError"}:
        return ModelNotFoundError(f"the hub has no model {name}, or it is private: check the name or log in.")
    if kinds & _NO_NETWORK:
        return ModelNotFoundError(
            f"{name} is not on this machine, and the hub cannot be reached to fetch it: "
            "check the network, or give a local folder or the embedded model."
        )
    if isinstance(error, ImportError):
        return ModelError(f"{name} needs a package that is not installed: {first}")
    return ModelError(f"{name} cannot be loaded: {first}")
