"""The CPU kernels for torch tensors: decode attention over the tiers, the full cache's, and a prompt's.

Knows the pools' layout (see `kernels/qevict.h`); knows nothing of tiers, routing, budgets or models.
Where the library is absent, `available()` is False and `reason()` says why in a sentence.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from engine.attention.native_library import (
    LANES,
    NativeColumns,
    NativePlan,
    address,
    available,
    dtype_code,
    isa,
    loaded,
    reason,
    set_threads,
    share_torch_threads,
    supported_isas,
    threads,
    use_isa,
)
from engine.errors import BackendError

__all__ = [
    "LANES",
    "DecodePlan",
    "LedgerTensors",
    "Shape",
    "available",
    "column_masses",
    "full_decode",
    "isa",
    "prefill_attention",
    "reason",
    "set_threads",
    "share_torch_threads",
    "supported_isas",
    "threads",
    "use_isa",
]


@dataclass(frozen=True, slots=True)
class Shape:
    """What does not change during a run.

    Attributes:
        batch, num_heads, num_kv_heads, head_dim: the model's shape and the batch.
        window_size: tokens per block, Ω.
        rows_per_batch: decision rows per batch row, G: 1 for one decision per layer, `num_kv_heads` for one per head.
        bits: code width of the ledger, 2 or 4.
        value_groups: channel groups of V that have their own scale and zero.
        rotary_dim: channels that carry the position (half-split pairs c, c + rotary_dim / 2).
        grid_offset: columns by which block 0 begins before column 0.
        scale: softmax scale.
        softcap: logits become softcap * tanh(logit / softcap); 0 for none.
        rope_scale: factor of the model's cos and sin (attention scaling).
    """

    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window_size: int
    rows_per_batch: int = 1
    bits: int = 2
    value_groups: int = 1
    rotary_dim: int = 0
    grid_offset: int = 0
    scale: float = 1.0
    softcap: float = 0.0
    rope_scale: float = 1.0

    def unsupported(self) -> str | None:
        """Why the kernels cannot serve this shape; None where they can."""
        if self.head_dim % LANES or not 16 <= self.head_dim <= 1024:
            return f"head_dim {self.head_dim} is not a multiple of 16 from 16 to 1,024"
        if self.num_heads % self.num_kv_heads or self.num_kv_heads % self.rows_per_batch:
            return f"{self.num_heads} heads do not divide among {self.num_kv_heads} KV heads"
        if self.bits not in (2, 4) or not 1 <= self.window_size <= 256:
            return f"{self.bits}-bit codes of windows of {self.window_size} tokens are unknown to the kernel"
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            return f"rotary_dim {self.rotary_dim} is odd or larger than head_dim {self.head_dim}"
        if self.value_groups < 1 or self.head_dim % (self.value_groups * LANES):
            return f"{self.value_groups} value groups of head_dim {self.head_dim} are not multiples of 16 channels"
        return None


@dataclass(frozen=True, slots=True)
class LedgerTensors:
    """The code pool of one layer, contiguous slices of `rows` decision rows; see `kernels/qevict.h` for the layout.

    Attributes:
        key_codes: uint8 [rows, Hd, NB, d, KB, 16]; key_scale, key_zero: float16 [rows, Hd, NB, d, 16].
        value_codes: uint8 [rows, Hd, NB * 16, KB, d]; value_scale, value_zero: float16 [rows, Hd, NB, GV, Ω, 16].
        ids: int32 [rows, NB * 16], live entries first; live_count: int32 [rows].
    """

    key_codes: torch.Tensor
    key_scale: torch.Tensor
    key_zero: torch.Tensor
    value_codes: torch.Tensor
    value_scale: torch.Tensor
    value_zero: torch.Tensor
    ids: torch.Tensor
    live_count: torch.Tensor


class DecodePlan:
    """One layer's pools as addresses, checked once; refreshed by `bind` when pools are reallocated.

    Args:
        shape: the run's constants.
        cos, sin: float32 [max_positions, rotary_dim / 2], unit norm; may be empty where the ledger is never used.

    Raises:
        BackendError: the kernels are not available, or cannot serve the shape.
    """

    def __init__(self, shape: Shape, cos: torch.Tensor, sin: torch.Tensor) -> None:
        self._library = loaded()
        problem = shape.unsupported()
        if problem:
            raise BackendError(f"backend 'fused' cannot serve this model on a CPU: {problem}")
        self.shape = shape
        half = (cos.shape[0], shape.rotary_dim // 2)
        self._plan = NativePlan(
            batch=shape.batch, q_heads=shape.num_heads, kv_heads=shape.num_kv_heads, head_dim=shape.head_dim,
            rows_per_batch=shape.rows_per_batch, window=shape.window_size, bits=shape.bits,
            value_groups=shape.value_groups, rotary_dim=shape.rotary_dim, grid_offset=shape.grid_offset,
            max_positions=cos.shape[0], scale=shape.scale, softcap=shape.softcap, rope_scale=shape.rope_scale,
            cos=address(cos, "cos", half, torch.float32), sin=address(sin, "sin", half, torch.float32),
        )  # fmt: skip
        self._address = ctypes.addressof(self._plan)
        self._tables = (cos, sin)
        self._held: tuple[object, ...] = ()
        self._query_items = shape.batch * shape.num_heads * shape.head_dim
        self._key_items = shape.batch * shape.num_kv_heads * shape.head_dim
        self._masses: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
        self._scored: tuple[object, object] = (None, None)
        self._scored_at = (0, 0)

    def bind(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        ids: torch.Tensor,
        count: torch.Tensor,
        first_column: torch.Tensor,
        ledger: LedgerTensors | None = None,
    ) -> None:
        """Takes the pools of one layer; call it again whenever one of them is reallocated.

        Args:
            keys, values: arena [rows, Hd, S, Ω, d], float32, float16 or bfloat16; keys post-RoPE.
            ids: int32 [rows, S], block ids, valid ones first; count: int32 [rows], how many.
            first_column: int32 [rows], columns of left padding.
            ledger: the code pool, or None where there is none (yet).

        Raises:
            BackendError: a tensor has another shape, dtype or layout than the kernel reads.
        """
        shape, plan = self.shape, self._plan
        rows, per_row = shape.batch * shape.rows_per_batch, shape.num_kv_heads // shape.rows_per_batch
        slots, omega, d = int(ids.shape[-1]), shape.window_size, shape.head_dim
        pool = (rows, per_row, slots, omega, d)
        plan.arena_dtype = dtype_code(keys, "arena keys")
        plan.arena_slots = slots
        plan.arena_k = address(keys, "arena keys", pool)
        plan.arena_v = address(values, "arena values", pool, keys.dtype)
        plan.arena_ids = address(ids, "arena ids", (rows, slots), torch.int32)
        plan.arena_count = address(count, "arena count", (rows,), torch.int32)
        plan.first_column = address(first_column, "first_column", (rows,), torch.int32)
        blocks = 0 if ledger is None else int(ledger.ids.shape[-1]) // LANES
        plan.ledger_blocks = blocks
        plan.live_count = None
        if ledger is not None and blocks:
            if omega * shape.bits % 8 or omega > 128:
                raise BackendError(f"ledger windows of {omega} tokens at {shape.bits} bits are unknown to the kernel")
            if self._tables[0].shape[0] < omega:
                raise BackendError(f"the cos table has {self._tables[0].shape[0]} positions, a window {omega} tokens")
            size, groups = omega * shape.bits // 8, shape.value_groups
            half, byte = torch.float16, torch.uint8
            channels = (rows, per_row, blocks, d, LANES)
            tokens = (rows, per_row, blocks, groups, omega, LANES)
            plan.k_codes = address(ledger.key_codes, "key codes", (rows, per_row, blocks, d, size, LANES), byte)
            plan.v_codes = address(ledger.value_codes, "value codes", (rows, per_row, blocks * LANES, size, d), byte)
            plan.k_scale = address(ledger.key_scale, "key scale", channels, half)
            plan.k_zero = address(ledger.key_zero, "key zero", channels, half)
            plan.v_scale = address(ledger.value_scale, "value scale", tokens, half)
            plan.v_zero = address(ledger.value_zero, "value zero", tokens, half)
            plan.ledger_ids = address(ledger.ids, "ledger ids", (rows, blocks * LANES), torch.int32)
            plan.live_count = address(ledger.live_count, "live count", (rows,), torch.int32)
        self._masses = ((rows, slots), (rows, blocks * LANES))
        self._held = (keys, values, ids, count, first_column, ledger)
        self._scored, self._scored_at = (None, None), (0, 0)

    def decode(
        self,
        query: torch.Tensor,
        seq_len: int,
        *,
        key: torch.Tensor | None = None,
        value: torch.Tensor | None = None,
        slot: int | torch.Tensor = 0,
        offset: int = 0,
        arena_mass: torch.Tensor | None = None,
        ledger_mass: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of one new token per batch row over arena and live ledger entries; one softmax over both.

        Args:
            query: [batch, num_heads, d] (a length-1 sequence axis is accepted), post-RoPE.
            seq_len: columns so far, the new token's included.
            key, value: [batch, num_kv_heads, d], post-RoPE; written first into the open slot. None writes nothing.
            slot: the open slot, one for all rows or int32 [rows]; offset: the token's place in its block.
            arena_mass, ledger_mass: float32 [rows, S] and [rows, NB * 16]; both or neither. To each slot is
                **added** the mean over the row's query heads of the probability that its tokens received.

        Returns:
            out float32 [batch, num_heads, d] and the log-sum-exp float32 [batch, num_heads].

        Raises:
            BackendError: a dtype or layout the kernel does not read, or a position beyond the cos table.
        """
        shape = self.shape
        if not self._held:
            raise BackendError("DecodePlan.decode before bind: the plan has no pools yet")
        query = query.contiguous()
        if query.numel() != self._query_items:
            raise BackendError(f"query has {tuple(query.shape)}; one token per batch row is expected")
        out = torch.empty(shape.batch, shape.num_heads, shape.head_dim)
        lse = torch.empty(shape.batch, shape.num_heads)
        k_at = v_at = slots_at = kv_dtype = 0
        if key is not None and value is not None:
            key, value = key.contiguous(), value.contiguous()
            if key.numel() != self._key_items or value.shape != key.shape:
                raise BackendError(f"key has {tuple(key.shape)}; one token per batch row is expected")
            k_at, v_at, kv_dtype = key.data_ptr(), value.data_ptr(), dtype_code(key, "key")
            if value.dtype != key.dtype:
                raise BackendError(f"value has dtype {value.dtype}, key {key.dtype}; they must be equal")
            if isinstance(slot, torch.Tensor):
                slots_at, slot = address(slot, "slot", self._masses[0][:1], torch.int32), 0
            elif not 0 <= slot < self._plan.arena_slots:
                raise BackendError(f"slot {slot} is outside the arena's {self._plan.arena_slots}")
            if not 0 <= offset < shape.window_size:
                raise BackendError(f"offset {offset} is outside a block of {shape.window_size}")
        if arena_mass is not self._scored[0] or ledger_mass is not self._scored[1]:
            self._score_into(arena_mass, ledger_mass)
        arena_at, ledger_at = self._scored_at
        code = self._library.qevict_decode(
            self._address, query.data_ptr(), dtype_code(query, "query"), k_at, v_at, kv_dtype, slots_at, slot, offset,
            seq_len, out.data_ptr(), lse.data_ptr(), arena_at, ledger_at,
        )  # fmt: skip
        if code == 2:
            raise BackendError(
                f"a live ledger entry is not a window within the {self._plan.max_positions} positions of the cos table"
            )
        if code:
            raise MemoryError("the CPU kernel found no memory for its workspace")
        return out, lse

    def read(self) -> int:
        """Only reads what `decode` would, with the same threads: the least time that a step can take. A sum of it."""
        return int(self._library.qevict_read(self._address))

    def _score_into(self, arena_mass: torch.Tensor | None, ledger_mass: torch.Tensor | None) -> None:
        """Checks where masses are added, once for a pair: every step of a run adds to the same two tensors."""
        if (arena_mass is None) != (ledger_mass is None):
            raise BackendError("arena_mass and ledger_mass are asked for together")
        at = (0, 0)
        if arena_mass is not None and ledger_mass is not None:
            at = (
                address(arena_mass, "arena_mass", self._masses[0], torch.float32),
                address(ledger_mass, "ledger_mass", self._masses[1], torch.float32),
            )
        self._scored, self._scored_at = (arena_mass, ledger_mass), at


def full_decode(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, scale: float, softcap: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same kernel over a whole cache: the fair opponent of the tiers.

    Args:
        query: [batch, num_heads, d]; keys, values: [batch, num_kv_heads, S, d], contiguous, S >= 1.
        scale: softmax scale; softcap: 0 for none.

    Returns:
        out float32 [batch, num_heads, d] and the log-sum-exp float32 [batch, num_heads].

    Raises:
        BackendError: the kernels are not available, or a layout that they do not read.
    """
    library = loaded()
    batch, kv_heads, length, d = keys.shape
    query = query.contiguous()
    heads = query.numel() // (batch * d)
    problem = Shape(batch, heads, kv_heads, d, 8).unsupported()
    if problem or length < 1:
        raise BackendError(f"the CPU kernel cannot serve this shape: {problem or 'the cache is empty'}")
    shape = (batch, kv_heads, length, d)
    k_at, v_at = address(keys, "keys", shape), address(values, "values", shape, keys.dtype)
    out, lse = torch.empty(batch, heads, d), torch.empty(batch, heads)
    if library.qevict_full(
        query.data_ptr(), dtype_code(query, "query"), k_at, v_at, dtype_code(keys, "keys"), batch, heads, kv_heads, d,
        length, scale, softcap, out.data_ptr(), lse.data_ptr(),
    ):  # fmt: skip
        raise MemoryError("the CPU kernel found no memory for its workspace")
    return out, lse


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in float32 with adjacent channels; rows and heads may lie anywhere."""
    tensor = tensor.float()
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def column_masses(
    query: torch.Tensor,
    key: torch.Tensor,
    lse: torch.Tensor,
    *,
    scale: float,
    window_size: int,
    grid_offset: int = 0,
    first_query_column: int = 0,
    first_column: int = 0,
    groups: int = 1,
    softcap: float = 0.0,
    weights: torch.Tensor | None = None,
    power: float = 1.0,
) -> torch.Tensor:
    """Probability that each block of keys received from all prompt queries, below the causal diagonal.

    Args:
        query: [num_heads, T, d] and key: [num_kv_heads, S, d], post-RoPE, column = index for keys.
        lse: [num_heads, T], log-sum-exp of each query's logits over all the keys it saw.
        scale, softcap: as in the attention that gave `lse`; softcap 0 for none.
        window_size, grid_offset: block of column c is (c + grid_offset) // window_size.
        first_query_column: column of query 0; first_column: columns before it are padding.
        groups: decision groups of heads (1 for the layer, num_kv_heads for one per KV head).
        weights: [T] or None, a factor for every query (0 leaves it out); none negative.
        power: exponent of the probabilities before they are summed.

    Returns:
        float32 [groups, blocks], mean over the group's query heads.

    Raises:
        BackendError: the kernels are not available, or shapes that do not fit each other.
    """
    library = loaded()
    heads, queries, d = query.shape
    kv_heads, keys = key.shape[:2]
    if heads % kv_heads or heads % groups or key.shape[2] != d or tuple(lse.shape) != (heads, queries):
        raise BackendError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)}, lse {tuple(lse.shape)} and {groups} groups do not fit"
        )
    query, key = _rows(query), _rows(key)
    lse = lse.float().contiguous()
    weights = None if weights is None else weights.float().contiguous()
    if weights is not None and weights.numel() != queries:
        raise BackendError(f"{weights.numel()} weights for {queries} queries")
    blocks = (keys + grid_offset + window_size - 1) // window_size
    mass = torch.zeros(groups, blocks)
    columns = NativeColumns(
        heads=heads, kv_heads=kv_heads, head_dim=d, queries=queries, keys=keys, dtype=0,
        first_column=first_query_column, pad=first_column, window=window_size, grid_offset=grid_offset,
        blocks=blocks, groups=groups, scale=scale, softcap=softcap, power=power,
        query=query.data_ptr(), key=key.data_ptr(),
        query_head_stride=query.stride(0), query_row_stride=query.stride(1),
        key_head_stride=key.stride(0), key_row_stride=key.stride(1),
        lse=lse.data_ptr(), weights=None if weights is None else weights.data_ptr(), mass=mass.data_ptr(),
    )  # fmt: skip
    if library.qevict_columns(ctypes.byref(columns)):
        raise MemoryError("the CPU kernel found no memory for its workspace")
    return mass


def prefill_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    window_size: int = 8,
    grid_offset: int = 0,
    first_query_column: int = 0,
    first_column: int = 0,
    groups: int = 1,
    softcap: float = 0.0,
    weights: torch.Tensor | None = None,
    masses: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Causal attention of a prompt with the masses of its windows, each logit and exponential computed once.

    Args:
        query: [num_heads, T, d]; key, value: [num_kv_heads, S, d]; post-RoPE, column = index for keys.
        masses: whether the window masses are wanted.
        The others as for `column_masses`.

    Returns:
        out float32 [num_heads, T, d] (a view of [T, num_heads, d] memory), lse float32 [num_heads, T] (-Inf for a
        query that is padding and sees no key; its out is 0), and masses float32 [groups, blocks] or None.

    Raises:
        BackendError: the kernels are not available, or shapes that do not fit each other.
    """
    library = loaded()
    heads, queries, d = query.shape
    kv_heads, keys = key.shape[:2]
    problem = Shape(1, heads, kv_heads, d, window_size).unsupported()
    if problem or heads % groups or key.shape != value.shape or key.shape[2] != d:
        raise BackendError(
            f"the CPU kernel cannot serve query {tuple(query.shape)}, key {tuple(key.shape)}, value "
            f"{tuple(value.shape)} and {groups} groups: {problem or 'they do not fit'}"
        )
    query, key, value = (_rows(tensor) for tensor in (query, key, value))
    weights = None if weights is None else weights.float().contiguous()
    if weights is not None and weights.numel() != queries:
        raise BackendError(f"{weights.numel()} weights for {queries} queries")
    blocks = (keys + grid_offset + window_size - 1) // window_size
    out, lse = torch.empty(queries, heads, d), torch.empty(heads, queries)
    mass = torch.zeros(groups, blocks) if masses else None
    columns = NativeColumns(
        heads=heads, kv_heads=kv_heads, head_dim=d, queries=queries, keys=keys, dtype=0,
        first_column=first_query_column, pad=first_column, window=window_size, grid_offset=grid_offset,
        blocks=blocks, groups=groups, scale=scale, softcap=softcap, power=1.0,
        query=query.data_ptr(), key=key.data_ptr(), value=value.data_ptr(),
        query_head_stride=query.stride(0), query_row_stride=query.stride(1),
        key_head_stride=key.stride(0), key_row_stride=key.stride(1),
        value_head_stride=value.stride(0), value_row_stride=value.stride(1),
        out=out.data_ptr(), out_head_stride=d, out_row_stride=heads * d, lse_out=lse.data_ptr(),
        weights=None if weights is None else weights.data_ptr(), mass=None if mass is None else mass.data_ptr(),
    )  # fmt: skip
    if library.qevict_prefill(ctypes.byref(columns)):
        raise MemoryError("the CPU kernel found no memory for its workspace")
    return out.transpose(0, 1), lse, mass
