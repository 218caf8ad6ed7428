# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""The keyed noise of ``sample/noise.py`` inside kernels: the same integers, the same formula.

``noise_of`` is within a few units in the last place of the CPU's. ``rough_noise_of`` costs half as
much and is off by less than ROUGH_ERROR, enough to tell which token may win.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.sample.triton.row_tensors import KEY_HIGH, KEY_LOW, column_of

_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_A = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_B = tl.constexpr(0x94D049BB133111EB)
_HASH_A = tl.constexpr(0x7FEB352D)
_HASH_B = tl.constexpr(0x846CA68B)
_SCALE = tl.constexpr(2.0**-32)
_BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
_LN_LN_2 = tl.constexpr(-0.36651292058166435)
_SMALL = tl.constexpr(2.0**-7)
# At w = _SMALL, where it is largest: the card's log2 is off by at most 2^-22, 1 - w by 2^-24, and
# both are divided by E in units of log2, 2^-6.5. That is 2^-15.2; the second log2 adds 2^-17.
ROUGH_ERROR = tl.constexpr(2.0**-14)


@triton.jit
def noise_halves(columns, stride, row, position):
    """Low half, and high half made odd, of the noise key of a row's output position: uint32."""
    low = column_of(columns, stride, row, KEY_LOW).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = column_of(columns, stride, row, KEY_HIGH).to(tl.uint32, bitcast=True).to(tl.uint64)
    counter = (position + 1).to(tl.int64).to(tl.uint64, bitcast=True)
    value = ((high << 32) | low) + counter * _GAMMA
    value = (value ^ (value >> 30)) * _MIX_A
    value = (value ^ (value >> 27)) * _MIX_B
    value = value ^ (value >> 31)
    return value.to(tl.uint32), (value >> 32).to(tl.uint32) | 1


@triton.jit
def _rounds(values):
    values = (values ^ (values >> 16)) * _HASH_A
    values = (values ^ (values >> 15)) * _HASH_B
    return values ^ (values >> 16)


@triton.jit
def _uniform(low, high, ids):
    """w in (0, 1) of each token id."""
    hashes = _rounds((_rounds(ids.to(tl.uint32)) ^ low) * high)
    return tl.minimum((hashes.to(tl.float32) + 0.5) * _SCALE, _BELOW_ONE)


@triton.jit
def noise_of(low, high, ids):
    """-log E with E = -log1p(-w), float32, of each token id; low and high of ``noise_halves``.

    log1p by way of log (Kahan): log(y) w / (1 - y) with y the rounded 1 - w, whose error cancels.
    """
    w = _uniform(low, high, ids)
    y = 1.0 - w
    exponential = tl.where(y == 1.0, w, tl.math.div_rn(-tl.log(y) * w, 1.0 - y))
    return -tl.log(exponential)


@triton.jit
def _rough_log2(x, INTERPRETED: tl.constexpr):
    if INTERPRETED:
        return tl.log2(x)
    else:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def rough_noise_of(low, high, ids, INTERPRETED: tl.constexpr):
    """``noise_of`` to within ROUGH_ERROR, by the card's own logarithm.

    INTERPRETED: the interpreter has no such instruction and takes an exact logarithm.
    """
    w = _uniform(low, high, ids)
    # In units of log2. Near 0 the logarithm of 1 - w loses its digits and a series takes over.
    series = w * (1.0 + w * (0.5 + w * (1.0 / 3.0))) * _LOG2_E
    exponential = tl.where(w < _SMALL, series, -_rough_log2(1.0 - w, INTERPRETED))
    return -(_rough_log2(exponential, INTERPRETED) * _LN_2 + _LN_LN_2)
