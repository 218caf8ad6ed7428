"""Attention on a CPU: few large torch calls over paged KV.

A pass is cut into *pieces* once, and every layer runs the same pieces:

- sequences with the same small number of query tokens (decoding, verification) are batched: one
  gather of their K and V, one ``scaled_dot_product_attention`` over [rows, kv_heads, queries];
- a longer query (a prompt, or a chunk of one) goes in tiles, each with the keys up to its end.

Query heads that share a KV head are folded into the query dimension. That is the same sum, and
several times faster here than ``enable_gqa``, which walks K and V once for each query head.

Memory beyond a sequence's length may hold anything, NaN included, and a masked NaN is still NaN. So
the gather never touches it: positions past the end read the sequence's own last token instead. That
costs nothing, as the slots to gather are computed once a pass.

Sizes are rounded to what the kernel treats alike (constants below), so that a token's result is the
same bits whether it was prefilled, decoded or verified, alone or in a batch. Where that was tried
(x86 with AVX-512) it holds exactly; a CPU whose kernels divide sums in other places is only as near
as rounding.

Knows nothing of requests, and of layers only their shape and window.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from paceline.attention.backend import AttentionMetadata, HeadShape
from paceline.attention.unfused import UnfusedAttention

# Longest query that is batched with others: the largest draft length and its bonus token, and some.
_MAX_BATCHED_QUERY = 32
# A batched piece gathers about this much K (and as much V) per thread: still in cache when read.
_GATHER_BYTES = 1 << 20
# Longer queries go in tiles of this many tokens: a tile's keys end where its last token does.
_QUERY_TILE = 128
# Gathers up to this size reuse one buffer: fresh memory would cost more than the copy.
_SCRATCH_BYTES = 64 << 20
# One piece's mask has at most this many elements.
_MASK_ELEMENTS = 4 << 20
# Keys per piece are rounded up to whole vectors, so that padding does not change the order of sums.
_KEY_ALIGNMENT = 32
# The kernel takes keys in blocks of this many and halves a last block of a size between these two,
# which changes the order of sums as well; such a block is filled up to the greater size.
_KEY_BLOCK = 512
_KEY_SPLIT = (192, 384)
# The kernel takes queries in blocks of this many and sums in another order when a block has fewer
# than the minimum; such a block is filled up.
_QUERY_BLOCK = 32
_MIN_QUERY_BLOCK = 4


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some query tokens and the keys they read."""

    tokens: slice | torch.Tensor  # query tokens [rows * query_len]
    rows: int
    query_len: int
    num_keys: int  # keys a row, padding included
    slots: torch.Tensor  # [rows * num_keys] int64: where they lie
    mask: torch.Tensor  # additive, broadcasts to [rows, kv_heads, folded queries, num_keys]


@dataclass(frozen=True, slots=True)
class _Shape:
    """What pieces depend on besides the metadata; layers of one shape share them."""

    group: int  # query heads a KV head
    row_bytes: int  # K of one token
    dtype: torch.dtype
    window: int | None


class CpuAttention(UnfusedAttention):
    """See the file's docstring. Keeps a scratch buffer, nothing else, between passes."""

    name = "cpu"

    def __init__(self) -> None:
        self._scratch: dict[torch.dtype, tuple[torch.Tensor, torch.Tensor]] = {}

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Start with no pieces; the first layer of each shape cuts them."""
        metadata.prepared = {}

    def attend_heads(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        heads: HeadShape,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """See ``UnfusedAttention.attend_heads``."""
        kv_heads, head_dim = keys.shape[1:]
        scale = heads.scale
        window = heads.sliding_window
        if window is not None and window >= metadata.max_seq_len:
            window = None
        shape = _Shape(
            query.shape[1] // kv_heads, kv_heads * head_dim * keys.itemsize, query.dtype, window
        )
        pieces: list[_Piece] | None = metadata.prepared.get(shape)
        if pieces is None:
            pieces = metadata.prepared[shape] = _cut(metadata, shape)
        if len(pieces) == 1 and isinstance(pieces[0].tokens, slice):
            piece = pieces[0]
            if piece.rows * piece.query_len == query.shape[0]:
                return self._attend(piece, query, keys, values, scale)
        out = torch.zeros_like(query)
        for piece in pieces:
            part = self._attend(piece, query, keys, values, scale)
            out[piece.tokens] = part
        return out

    def _attend(
        self,
        piece: _Piece,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Output of one piece's tokens, [rows * query_len, num_heads, head_dim]."""
        q = query[piece.tokens]
        rows, query_len = piece.rows, piece.query_len
        num_heads, head_dim = q.shape[1:]
        kv_heads = keys.shape[1]
        group = num_heads // kv_heads
        k, v = self._gather(piece.slots, keys, values)
        folded = q.view(rows, query_len, kv_heads, group, head_dim)
        if query_len == 1:
            folded = folded[:, 0]  # [rows, kv_heads, group, head_dim]
        else:
            folded = folded.transpose(1, 2).reshape(rows, kv_heads, query_len * group, head_dim)
        filler = _filler(query_len * group)
        if filler:
            folded = F.pad(folded, (0, 0, 0, filler))
        out = F.scaled_dot_product_attention(
            folded,
            k.view(rows, piece.num_keys, kv_heads, head_dim).transpose(1, 2),
            v.view(rows, piece.num_keys, kv_heads, head_dim).transpose(1, 2),
            attn_mask=piece.mask,
            scale=scale,
        )
        if filler:
            out = out[:, :, :-filler]
        if query_len > 1:
            out = out.reshape(rows, kv_heads, query_len, group, head_dim).transpose(1, 2)
        return out.reshape(rows * query_len, num_heads, head_dim)

    def _gather(
        self, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> list[torch.Tensor]:
        """K and V at ``slots``, [len(slots), kv_heads * head_dim] each, until the next call."""
        caches = (keys.flatten(1), values.flatten(1))
        count, width = slots.shape[0], caches[0].shape[1]
        size = count * width
        if size * keys.itemsize > _SCRATCH_BYTES:
            return [cache.index_select(0, slots) for cache in caches]
        buffers = self._scratch.get(keys.dtype)
        if buffers is None or buffers[0].shape[0] < size:
            grown = 1 << (size - 1).bit_length()
            buffers = self._scratch[keys.dtype] = (keys.new_empty(grown), keys.new_empty(grown))
        gathered = [buffer[:size].view(count, width) for buffer in buffers]
        for cache, out in zip(caches, gathered, strict=True):
            torch.index_select(cache, 0, slots, out=out)
        return gathered


def _cut(metadata: AttentionMetadata, shape: _Shape) -> list[_Piece]:
    """All pieces of a pass, batched ones first."""
    pieces: list[_Piece] = []
    batched: list[tuple[int, int, int]] = []  # (query length, keys, sequence)
    starts: list[int] = []
    token = 0
    for sequence, query_len in enumerate(metadata.query_lens):
        starts.append(token)
        token += query_len
        if 0 < query_len <= _MAX_BATCHED_QUERY:
            length = metadata.seq_lens_list[sequence]
            first = _first_key(length, query_len, shape.window)
            batched.append((query_len, length - first, sequence))
    for group in _batches(batched, shape):
        pieces.append(_batched_piece(metadata, shape, starts, group))
    for sequence, query_len in enumerate(metadata.query_lens):
        if query_len > _MAX_BATCHED_QUERY:
            pieces.extend(_long_pieces(metadata, shape, starts[sequence], sequence))
    return pieces


def _round_keys(keys: int) -> int:
    """The number of keys a piece computes for ``keys`` that matter."""
    rounded = -(-keys // _KEY_ALIGNMENT) * _KEY_ALIGNMENT
    last = rounded % _KEY_BLOCK
    return rounded + _KEY_SPLIT[1] - last if _KEY_SPLIT[0] < last < _KEY_SPLIT[1] else rounded


def _filler(queries: int) -> int:
    """Folded queries to add so that the kernel's last block is not below its minimum."""
    last = queries % _QUERY_BLOCK
    return _MIN_QUERY_BLOCK - last if 0 < last < _MIN_QUERY_BLOCK else 0


def _first_key(length: int, query_len: int, window: int | None) -> int:
    """First position to gather for the last ``query_len`` of ``length`` tokens.

    Rounded down to the kernel's key blocks, so that these are the same whatever the query length.
    """
    if window is None:
        return 0
    return max(0, length - query_len - window + 1) // _KEY_BLOCK * _KEY_BLOCK


def _batches(batched: list[tuple[int, int, int]], shape: _Shape) -> list[list[int]]:
    """Sequences that share a piece: one query length, similar key counts, bounded memory.

    Rows are padded to the longest of their piece, so a piece ends where a row would more than
    double the keys of the shortest.
    """
    limit = _GATHER_BYTES * torch.get_num_threads()
    groups: list[list[int]] = []
    current: tuple[int, int] | None = None  # (query length, fewest keys) of the last group
    for query_len, keys, sequence in sorted(batched):
        if current is not None and current[0] == query_len and keys <= 2 * current[1] + 64:
            padded = (len(groups[-1]) + 1) * _round_keys(keys)
            small = padded * shape.row_bytes <= limit
            if small and padded * query_len * shape.group <= _MASK_ELEMENTS:
                groups[-1].append(sequence)
                continue
        current = (query_len, keys)
        groups.append([sequence])
    return [sorted(group) for group in groups]


def _batched_piece(
    metadata: AttentionMetadata, shape: _Shape, starts: list[int], sequences: list[int]
) -> _Piece:
    """The piece of sequences that have the same number of query tokens."""
    device = metadata.slot_mapping.device
    query_len = metadata.query_lens[sequences[0]]
    rows = len(sequences)
    first_token = starts[sequences[0]]
    together = starts[sequences[-1]] - first_token == (rows - 1) * query_len
    tokens: slice | torch.Tensor
    if together:
        tokens = slice(first_token, first_token + rows * query_len)
    else:
        firsts = torch.tensor([starts[s] for s in sequences], device=device)
        tokens = (firsts[:, None] + torch.arange(query_len, device=device)).flatten()
    lengths = [metadata.seq_lens_list[s] for s in sequences]
    padding: torch.Tensor | None = None
    if query_len > 1:  # tokens sent to the null block are padding: K and V at their place are stale
        slots = metadata.slot_mapping[tokens].view(rows, query_len)
        padding = (slots < metadata.block_size).sum(dim=1)
    if rows == metadata.block_table.shape[0]:
        table = metadata.block_table
    else:
        table = metadata.block_table[torch.tensor(sequences, device=device)]
    return _paged_piece(tokens, query_len, lengths, padding, table, metadata.block_size, shape)


def _long_pieces(
    metadata: AttentionMetadata, shape: _Shape, first_token: int, sequence: int
) -> list[_Piece]:
    """Tiles of one sequence's queries, each with the keys up to its own last position."""
    query_len = metadata.query_lens[sequence]
    length = metadata.seq_lens_list[sequence]
    table = metadata.block_table[sequence : sequence + 1]
    fitting = _MASK_ELEMENTS // (shape.group * length)
    tile = min(_QUERY_TILE, max(_MAX_BATCHED_QUERY, fitting))
    pieces = []
    for start in range(0, query_len, tile):
        end = min(start + tile, query_len)
        tokens = slice(first_token + start, first_token + end)
        lengths = [length - query_len + end]
        pieces.append(
            _paged_piece(tokens, end - start, lengths, None, table, metadata.block_size, shape)
        )
    return pieces


def _paged_piece(
    tokens: slice | torch.Tensor,
    query_len: int,
    lengths: list[int],  # [rows] positions up to here, the queries' own included
    padding: torch.Tensor | None,  # [rows] how many of the last positions hold nothing
    table: torch.Tensor,  # [rows, blocks]
    block_size: int,
    shape: _Shape,
) -> _Piece:
    """Slots to gather and mask to add, for rows of ``query_len`` queries each."""
    device = table.device
    firsts = [_first_key(length, query_len, shape.window) for length in lengths]
    longest = max(length - first for length, first in zip(lengths, firsts, strict=True))
    num_keys = _round_keys(longest)
    first = torch.tensor(firsts, device=device)
    end = torch.tensor(lengths, device=device)
    positions = first[:, None] + torch.arange(num_keys, device=device)  # [rows, num_keys]
    last = end - 1 if padding is None else end - 1 - padding
    safe = torch.minimum(positions, last[:, None]).clamp_(min=0)
    blocks = table.long().gather(1, safe // block_size)
    slots = (blocks * block_size + safe % block_size).flatten()
    own = (end - query_len)[:, None] + torch.arange(query_len, device=device)  # query positions
    hidden = positions[:, None, :] > own[:, :, None]  # [rows, query_len, num_keys]
    if shape.window is not None:
        hidden |= positions[:, None, :] <= own[:, :, None] - shape.window
    mask = torch.zeros(hidden.shape, dtype=shape.dtype, device=device)
    mask.masked_fill_(hidden, float("-inf"))
    if query_len > 1:  # each query once for every head of its group, as the heads are folded
        mask = F.pad(
            mask.repeat_interleave(shape.group, dim=1), (0, 0, 0, _filler(query_len * shape.group))
        )
    mask = mask[:, None]  # [rows, 1, 1 or query_len * group, num_keys]
    return _Piece(tokens, len(lengths), query_len, num_keys, slots, mask)
