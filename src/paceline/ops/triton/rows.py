# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""Where the tokens of a decode pass stand, read from the state of their rows.

A decode pass has ``QUERY_LEN`` tokens for each entry of a batch, entry by entry. ``rows`` says
which row an entry is; its first token stands at position ``num_tokens[row] + offset``. That
position is negative when a row of one token is asked for its last two: such a token counts as at
position 0, and its K and V go to the null block. So do those of inactive rows, and those of
positions that the block table does not reach.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def token_row(token, rows, num_tokens, offset, QUERY_LEN: tl.constexpr):
    """Row and position of a token; the position may be negative."""
    row = tl.load(rows + token // QUERY_LEN)
    return row, tl.load(num_tokens + row) + offset + token % QUERY_LEN


@triton.jit
def token_slot(
    row, position, active, block_table, table_stride, max_blocks, BLOCK_SIZE: tl.constexpr
):
    """The KV slot of a position, int64; one of the null block where nothing may be written."""
    safe = tl.maximum(position, 0)
    index = safe // BLOCK_SIZE
    known = (position >= 0) & (index < max_blocks) & (tl.load(active + row) != 0)
    block = tl.load(block_table + row.to(tl.int64) * table_stride + index, mask=known, other=0)
    return block.to(tl.int64) * BLOCK_SIZE + safe % BLOCK_SIZE
