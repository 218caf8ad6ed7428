# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""Matrix products of few rows, with the norm before or the sum after them in the same launch.

With few rows a product takes as long as its weights take to arrive, and in a small model less than
a launch: what counts is the number of launches and how soon the weights are asked for. A layer of a
small model is four of these beside attention: ``norm_linear`` for q, k and v, ``linear_add``,
``norm_linear_silu_mul``, ``linear_add``.

The warps of a program divide the inputs (K), each with its own tensor-core products, and the
sums of all warps are added at the end: a three-dimensional ``tl.dot`` with a slice a warp. Every
sum is taken in an order that does not depend on how many rows there are, so a row has the same bits
alone and among others. Values are rounded where ``ops.reference`` rounds them, but for
``linear_add``, which rounds once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from paceline.ops.triton.card import Card, card_of

# Inputs of which a gated product keeps all normed rows beside its weights.
WHOLE_INPUTS = 1024

# Weights of one product, in bytes: what was faster than the library for up to 16 and 8 rows.
_SMALL_WEIGHTS = 10_000_000
_MEDIUM_WEIGHTS = 20_000_000


@dataclass(frozen=True, slots=True)
class Tile:
    """How much of the weight one program multiplies at a time, and with what."""

    outputs: int  # rows of the weight; of a gated product half are gate and half up
    warps: int
    depth: int  # inputs a warp
    stages: int  # tiles in flight


def skinny_applies(
    rows: int, in_features: int, out_features: int, dtype: torch.dtype, card: Card
) -> bool:
    """Whether these kernels are expected to beat the library's product and what surrounds it.

    out_features: gate and up together for a gated product. A rule from measurements on an H200 with
    the products of a 0.5B model; on cards that nobody measured the library is taken.
    """
    if card.capability != (9, 0) or dtype not in (torch.bfloat16, torch.float16):
        return False
    size = 2 * in_features * out_features
    if size <= _SMALL_WEIGHTS:
        return rows <= 16
    return rows <= 8 and in_features <= WHOLE_INPUTS and size <= _MEDIUM_WEIGHTS


@triton.jit
def _add_slices(values, STEPS: tl.constexpr):
    """Sum over the first dimension, of 2 ** STEPS, by halves: [S, ROWS] -> [ROWS].

    Each step adds two numbers, so that no layout can change the order.
    """
    for _ in tl.static_range(STEPS):
        values = tl.sum(tl.reshape(values, [2, values.shape[0] // 2, values.shape[1]]), 0)
    return tl.reshape(values, [values.shape[1]])


@triton.jit
def _stream_rows(x, residual, x_places, residual_places, inside):
    """The residual stream: x, or x added to the residual and rounded."""
    value = tl.load(x + x_places, mask=inside, other=0.0)
    if residual is not None:
        before = tl.load(residual + residual_places, mask=inside, other=0.0)
        value = (value.to(tl.float32) + before.to(tl.float32)).to(value.dtype)
    return value


@triton.jit
def _normed(value, scale, norm):
    """Rounded after the scale and after the weight, as in ``ops.reference``."""
    scaled = (value.to(tl.float32) * scale).to(value.dtype)
    return (scaled.to(tl.float32) * norm.to(tl.float32)).to(value.dtype)


@triton.jit
def _weight_rows(first, OUT: tl.constexpr, GATED: tl.constexpr, OUTPUTS: tl.constexpr):
    """The tile's rows of the weight and which exist; gate rows come before their up rows."""
    rows = tl.arange(0, OUTPUTS)
    if GATED:
        outs = first + rows % (OUTPUTS // 2)
        return outs + rows // (OUTPUTS // 2) * OUT, outs < OUT
    return first + rows, first + rows < OUT


@triton.jit
def _load_weight(weight, places, inside, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(weight + places, mask=inside, other=0.0)
    return tl.load(weight + places)


@triton.jit
def _store_outputs(
    acc,  # [WARPS, OUTPUTS, ROWS] float32
    bias,
    out,
    first,
    first_row,
    rows,
    OUT: tl.constexpr,
    GATED: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Add the warps' sums and the bias, gate if asked, and store."""
    dtype = out.dtype.element_ty
    result = tl.sum(acc, 0)
    if bias is not None:
        places, inside = _weight_rows(first, OUT, GATED, OUTPUTS)
        result += tl.load(bias + places, mask=inside, other=0.0).to(tl.float32)[:, None]
    outs = first + tl.arange(0, OUTPUTS)
    if GATED:  # rounded as if gate and up had been stored between
        halves = tl.reshape(result, [2, OUTPUTS // 2, ROWS])
        gate, up = tl.split(tl.permute(halves, [1, 2, 0]))
        gate = gate.to(dtype).to(tl.float32)
        activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
        result = activated * up.to(dtype).to(tl.float32)
        outs = first + tl.arange(0, OUTPUTS // 2)
    row = first_row + tl.arange(0, ROWS)
    target = out + row[None, :] * OUT + outs[:, None]
    tl.store(target, result.to(dtype), mask=(row < rows)[None, :] & (outs < OUT)[:, None])


@triton.jit(do_not_specialize=["rows"])
def _norm_linear_kernel(
    x,
    residual,
    stream,
    norm,
    weight,
    bias,
    out,
    rows,
    x_stride,
    residual_stride,
    eps,
    SIZE: tl.constexpr,
    OUT: tl.constexpr,
    GATED: tl.constexpr,
    OUTPUTS: tl.constexpr,
    WARPS: tl.constexpr,
    LOG_WARPS: tl.constexpr,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One tile of outputs; passes over the rows twice, first for their scales."""
    STEP: tl.constexpr = WARPS * DEPTH
    TILE_OUT: tl.constexpr = OUTPUTS // 2 if GATED else OUTPUTS
    MASKED: tl.constexpr = SIZE % STEP != 0 or OUT % TILE_OUT != 0
    first = tl.program_id(0) * TILE_OUT
    first_row = tl.program_id(1) * ROWS
    slices = tl.arange(0, WARPS)[:, None, None] * DEPTH
    x_in = slices + tl.arange(0, DEPTH)[None, :, None]  # [WARPS, DEPTH, 1]
    w_in = slices + tl.arange(0, DEPTH)[None, None, :]  # [WARPS, 1, DEPTH]
    row = first_row + tl.arange(0, ROWS)[None, None, :]
    squares = tl.zeros([WARPS, DEPTH, ROWS], tl.float32)
    for k in tl.static_range(0, SIZE, STEP):
        inside = (x_in + k < SIZE) & (row < rows)
        early = _stream_rows(
            x, residual, row * x_stride + x_in + k, row * residual_stride + x_in + k, inside
        )
        if residual is not None and tl.program_id(0) == 0:
            tl.store(stream + row * SIZE + x_in + k, early, mask=inside)
        squares += early.to(tl.float32) * early.to(tl.float32)
    total = _add_slices(tl.sum(squares, 1), LOG_WARPS)
    scale = tl.rsqrt(total / SIZE + eps)[None, None, :]
    places, exists = _weight_rows(first, OUT, GATED, OUTPUTS)
    offsets = places.to(tl.int64)[None, :, None] * SIZE + w_in
    exists = exists[None, :, None]
    acc = tl.zeros([WARPS, OUTPUTS, ROWS], tl.float32)
    for k in tl.range(0, SIZE, STEP, num_stages=STAGES):
        matrix = _load_weight(weight, offsets + k, (w_in + k < SIZE) & exists, MASKED)
        scales = tl.load(norm + x_in + k, mask=x_in + k < SIZE, other=0.0)
        inside = (x_in + k < SIZE) & (row < rows)
        value = _stream_rows(
            x, residual, row * x_stride + x_in + k, row * residual_stride + x_in + k, inside
        )
        acc = tl.dot(matrix, _normed(value, scale, scales), acc, input_precision="ieee")
    _store_outputs(acc, bias, out, first, first_row, rows, OUT, GATED, OUTPUTS, ROWS)


@triton.jit(do_not_specialize=["rows"])
def _norm_gate_up_kernel(
    x,
    residual,
    stream,
    norm,
    weight,
    bias,
    out,
    rows,
    x_stride,
    residual_stride,
    eps,
    SIZE: tl.constexpr,
    OUT: tl.constexpr,
    OUTPUTS: tl.constexpr,
    WARPS: tl.constexpr,
    LOG_WARPS: tl.constexpr,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Every so many tiles of a gated product: all inputs of the rows are normed once and kept."""
    TILE_OUT: tl.constexpr = OUTPUTS // 2
    MASKED: tl.constexpr = SIZE % (WARPS * DEPTH) != 0 or OUT % TILE_OUT != 0
    first_row = tl.program_id(1) * ROWS
    slices = tl.arange(0, WARPS)[:, None, None] * DEPTH
    x_in = slices + tl.arange(0, DEPTH)[None, :, None]  # [WARPS, DEPTH, 1]
    w_in = slices + tl.arange(0, DEPTH)[None, None, :]  # [WARPS, 1, DEPTH]
    row = first_row + tl.arange(0, ROWS)[None, None, :]
    scales = tl.load(norm + x_in, mask=x_in < SIZE, other=0.0)
    inside = (x_in < SIZE) & (row < rows)
    value = _stream_rows(x, residual, row * x_stride + x_in, row * residual_stride + x_in, inside)
    if residual is not None and tl.program_id(0) == 0:
        tl.store(stream + row * SIZE + x_in, value, mask=inside)
    wide = value.to(tl.float32)
    total = _add_slices(tl.sum(wide * wide, 1), LOG_WARPS)
    value = _normed(value, tl.rsqrt(total / SIZE + eps)[None, None, :], scales)
    tiles = (OUT + TILE_OUT - 1) // TILE_OUT
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        first = tile * TILE_OUT
        places, exists = _weight_rows(first, OUT, True, OUTPUTS)
        offsets = places.to(tl.int64)[None, :, None] * SIZE + w_in
        matrix = _load_weight(weight, offsets, (w_in < SIZE) & exists[None, :, None], MASKED)
        acc = tl.dot(matrix, value, input_precision="ieee")
        _store_outputs(acc, bias, out, first, first_row, rows, OUT, True, OUTPUTS, ROWS)


@triton.jit(do_not_specialize=["rows"])
def _linear_add_kernel(
    x,
    weight,
    bias,
    residual,
    rows,
    x_stride,
    residual_stride,
    SIZE: tl.constexpr,
    OUT: tl.constexpr,
    OUTPUTS: tl.constexpr,
    WARPS: tl.constexpr,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One tile of outputs. The rows are the tensor cores' 16, so that the tile may be 8 wide.

    That makes twice as many programs of a narrow matrix, and none has to wait for another's sums.
    """
    STEP: tl.constexpr = WARPS * DEPTH
    MASKED: tl.constexpr = SIZE % STEP != 0 or OUT % OUTPUTS != 0
    slices = tl.arange(0, WARPS)[:, None, None] * DEPTH
    x_in = slices + tl.arange(0, DEPTH)[None, None, :]  # [WARPS, 1, DEPTH]
    w_in = slices + tl.arange(0, DEPTH)[None, :, None]  # [WARPS, DEPTH, 1]
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    outs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    exists = outs < OUT
    x_offsets = row[None, :, None] * x_stride + x_in
    w_offsets = outs.to(tl.int64)[None, None, :] * SIZE + w_in
    acc = tl.zeros([WARPS, ROWS, OUTPUTS], tl.float32)
    for k in tl.range(0, SIZE, STEP, num_stages=STAGES):
        inside = (w_in + k < SIZE) & exists[None, None, :]
        matrix = _load_weight(weight, w_offsets + k, inside, MASKED)
        inside = (x_in + k < SIZE) & (row < rows)[None, :, None]
        value = tl.load(x + x_offsets + k, mask=inside, other=0.0)
        acc = tl.dot(value, matrix, acc, input_precision="ieee")
    result = tl.sum(acc, 0)
    if bias is not None:
        result += tl.load(bias + outs, mask=exists, other=0.0).to(tl.float32)[None, :]
    target = residual + row[:, None] * residual_stride + outs[None, :]
    inside = (row < rows)[:, None] & exists[None, :]
    before = tl.load(target, mask=inside, other=0.0)
    tl.store(target, (result + before.to(tl.float32)).to(before.dtype), mask=inside)


def norm_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    tile: Tile | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS norm of x, or of x + residual, times ``weight`` transposed, plus the bias.

    x, residual: [M, K] of one dtype, rows contiguous; norm_weight: [K]; weight: [N, K] contiguous;
    bias: [N]. Made for M up to 32, right for any. Returns ([M, N], the residual stream): the stream
    is x itself, or a new [M, K] with the sum (programs still read the old one when it is written).
    """
    return _norm_linear(x, norm_weight, eps, weight, bias, residual, tile, gated=False)


def norm_linear_silu_mul(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    tile: Tile | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``norm_linear``, then SiLU of the outputs' first half times the second half.

    weight: [2 * I, K], the gate's rows before up's; bias: [2 * I]. Returns ([M, I], the stream).
    """
    return _norm_linear(x, norm_weight, eps, weight, bias, residual, tile, gated=True)


def _norm_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    tile: Tile | None,
    *,
    gated: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, size = x.shape
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    out = x.new_empty(rows, outputs)
    stream = None if residual is None else x.new_empty(rows, size)
    card = card_of(x.device)
    whole = gated and size <= WHOLE_INPUTS and x.element_size() == 2
    if tile is None:
        tile = _whole_tile(size, card) if whole else _step_tile(x.element_size())
    tiles = triton.cdiv(outputs, tile.outputs // 2 if gated else tile.outputs)
    row_tile = 8 if rows <= 8 else 16
    stride = 0 if residual is None else residual.stride(0)
    tensors = (x, residual, stream, norm_weight, weight, bias, out)
    sizes = (rows, x.stride(0), stride, eps, size, outputs)
    log_warps = tile.warps.bit_length() - 1
    shape = (tile.outputs, tile.warps, log_warps, tile.depth, row_tile, tile.stages)
    options = {"num_warps": tile.warps, "enable_fp_fusion": True}
    row_tiles = triton.cdiv(rows, row_tile)
    if whole and tile.warps * tile.depth >= size:
        grid = (min(card.num_sms, tiles), row_tiles)
        _norm_gate_up_kernel[grid](*tensors, *sizes, *shape, **options)
    else:
        _norm_linear_kernel[(tiles, row_tiles)](*tensors, *sizes, gated, *shape, **options)
    return out, x if stream is None else stream


def linear_add(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Add x times ``weight`` transposed, and the bias, to the residual in place, rounding once.

    x: [M, K], residual: [M, N], both of one dtype with contiguous rows; weight: [N, K] contiguous;
    bias: [N]. Made for M up to 32, right for any. Returns the residual, which must not overlap x.
    """
    rows, size = x.shape
    outputs = weight.shape[0]
    if tile is None:
        tile = _add_tile(size, x.element_size())
    row_tile = 16
    _linear_add_kernel[(triton.cdiv(outputs, tile.outputs), triton.cdiv(rows, row_tile))](
        x,
        weight,
        bias,
        residual,
        rows,
        x.stride(0),
        residual.stride(0),
        size,
        outputs,
        tile.outputs,
        tile.warps,
        tile.depth,
        row_tile,
        tile.stages,
        num_warps=tile.warps,
        enable_fp_fusion=True,
    )
    return residual


# More than four warps are slower throughout: adding their sums costs more than they bring.


def _step_tile(itemsize: int) -> Tile:
    """For ``_norm_linear_kernel``."""
    return Tile(outputs=16, warps=4, depth=64, stages=4 if itemsize == 2 else 2)


def _whole_tile(size: int, card: Card) -> Tile:
    """For ``_norm_gate_up_kernel``: all inputs at once, 32 KB a stage at most."""
    depth = max(16, triton.next_power_of_2(size) // 4)
    return Tile(outputs=16, warps=4, depth=depth, stages=3 if card.shared_memory > 120_000 else 2)


def _add_tile(size: int, itemsize: int) -> Tile:
    """For ``_linear_add_kernel``."""
    return Tile(
        outputs=8, warps=4, depth=128 if size > 1024 else 64, stages=4 if itemsize == 2 else 2
    )
