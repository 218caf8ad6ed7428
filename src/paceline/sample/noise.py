"""Keyed noise: the only randomness in the engine, a pure function of four integers.

The noise of a token is fixed by (request seed, sample index, output position, token id), so the
same request gets the same tokens alone or in a batch, before or after a preemption, and with or
without speculation. This file must not know rows, requests or logits.

The chain, in integer operations that Triton has too (wraparound multiply, masked shift):

1. ``row_key`` (64 bits) from seed and sample index, ``noise_key`` (64 bits) from it and the output
   position, by the SplitMix64 generator (Steele, Lea and Flood, "Fast splittable pseudorandom
   number generators", 2014).
2. h (32 bits) from the key's halves and the token id, by a multiply-xorshift hash (the
   "lowbias32" constants of Wellons' hash prospector).
3. w = (h + 1/2) / 2^32 in (0, 1), E = -log1p(-w), standard exponential; the noise is -log E,
   standard Gumbel. Large noise decides who wins and comes from small w, where float32 is exact to
   a relative 2^-24. The usual -log(-log u) has it at u near 1, where float32 has steps of 2^-24
   and rounds to infinity once in 2^25 tokens.

    keys = torch.tensor([to_signed(noise_key(seed=7, sample_index=0, position=3))])
    (logits / temperature + neg_log_exponential(keys, vocab=logits.shape[-1])).argmax(-1)
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from paceline.arrays import Int64Array

UInt32Array = npt.NDArray[np.uint32]
UInt64Array = npt.NDArray[np.uint64]

# Bounds of -log E over all 2^32 hashes (22.874 and -2.812), with room for float32 rounding.
MAX_NOISE = 22.9
MIN_NOISE = -2.82
# A hash whose top COARSE_BITS bits are not all zero has noise below COARSE_NOISE (12 log 2 is
# 8.318).
COARSE_BITS = 12
COARSE_NOISE = 8.33

_MASK64 = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX_A = 0xBF58476D1CE4E5B9
_MIX_B = 0x94D049BB133111EB
_HASH_A = 0x7FEB352D
_HASH_B = 0x846CA68B - (1 << 32)  # as a signed 32-bit number
_BELOW_ONE = 1.0 - 2.0**-24  # the largest float32 below 1


def _mix64(value: int) -> int:
    """SplitMix64's finaliser on a 64-bit integer."""
    value = ((value ^ (value >> 30)) * _MIX_A) & _MASK64
    value = ((value ^ (value >> 27)) * _MIX_B) & _MASK64
    return value ^ (value >> 31)


def row_key(seed: int, sample_index: int) -> int:
    """64-bit key (unsigned) of one of a request's ``n`` sequences; any integer is a valid seed."""
    state = _mix64((seed + _GAMMA) & _MASK64)
    return _mix64((state + (sample_index + 1) * _GAMMA) & _MASK64)


def noise_key(seed: int, sample_index: int, position: int) -> int:
    """64-bit key (unsigned) of the token at an output position (0 is the first output token)."""
    return _mix64((row_key(seed, sample_index) + (position + 1) * _GAMMA) & _MASK64)


def to_signed(key: int) -> int:
    """The int64 with the bits of an unsigned 64-bit key."""
    return key - (1 << 64) if key >> 63 else key


def noise_keys(row_keys: UInt64Array, positions: Int64Array) -> Int64Array:
    """``noise_key`` of M tokens at once.

    Args:
        row_keys: [M] what ``row_key`` returned for the row of each.
        positions: [M] output positions.

    Returns:
        [M] keys as int64 bit patterns.
    """
    counters = positions.astype(np.int64).view(np.uint64) + np.uint64(1)
    value = row_keys + counters * np.uint64(_GAMMA)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(_MIX_A)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(_MIX_B)
    keys: Int64Array = (value ^ (value >> np.uint64(31))).view(np.int64)
    return keys


def _xor_shifted(values: torch.Tensor, bits: int) -> torch.Tensor:
    """``values ^= values >> bits`` with a logical shift, which int32 has only as shift and mask."""
    shifted = (values >> bits).bitwise_and_((1 << (32 - bits)) - 1)
    return values.bitwise_xor_(shifted)


def token_mix(vocab: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """[vocab] int32: the part of the hash that depends on the token id alone."""
    values = torch.arange(vocab, dtype=torch.int32, device=device)
    values = _xor_shifted(values, 16).mul_(_HASH_A)
    values = _xor_shifted(values, 15).mul_(_HASH_B)
    return _xor_shifted(values, 16)


def split_keys(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Low half, and high half made odd, of keys [M] int64: two [M] int32."""
    halves = keys.contiguous().view(torch.int32).view(-1, 2)  # little-endian on every device we run
    return halves[:, 0], halves[:, 1] | 1


def hash_rounds(low: torch.Tensor, high: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
    """The hash short of its last xorshift: its top 16 bits are final, see ``finish_hash``.

    Args:
        low, high: halves from ``split_keys``, broadcastable against ``mix``.
        mix: entries of ``token_mix``.
    """
    values = (mix ^ low).mul_(high)
    values = _xor_shifted(values, 16).mul_(_HASH_A)
    return _xor_shifted(values, 15).mul_(_HASH_B)


def hash_rounds_host(low: UInt32Array, high: UInt32Array, mix: UInt32Array) -> UInt32Array:
    """``hash_rounds`` in numpy: a logical shift is one pass, and no thread team is woken for it."""
    values = mix ^ low
    values *= high
    values ^= values >> np.uint32(16)
    values *= np.uint32(_HASH_A)
    values ^= values >> np.uint32(15)
    values *= np.uint32(_HASH_B & 0xFFFFFFFF)
    return values


def finish_hash(rounds: torch.Tensor) -> torch.Tensor:
    """h (int32 bit pattern), in place, from what ``hash_rounds`` returned."""
    return _xor_shifted(rounds, 16)


def hash_to_uniform(hashes: torch.Tensor) -> torch.Tensor:
    """w = (h + 1/2) / 2^32 as float32 in (0, 1), from int32 bit patterns."""
    values = hashes.view(torch.uint32).to(torch.float32)
    # Without the clamp the 128 largest hashes would round to 1 and their noise to -infinity.
    return values.add_(0.5).mul_(2.0**-32).clamp_(max=_BELOW_ONE)


def hash_to_noise(hashes: torch.Tensor) -> torch.Tensor:
    """-log E as float32, E = -log1p(-w), from int32 bit patterns of the same shape."""
    return hash_to_uniform(hashes).neg_().log1p_().neg_().log_().neg_()


def noise_at(keys: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
    """Noise of one token per key: keys [M] int64, mix [M] of ``token_mix`` -> [M] float32."""
    low, high = split_keys(keys)
    return hash_to_noise(finish_hash(hash_rounds(low, high, mix)))


def neg_log_exponential(
    keys: torch.Tensor, vocab: int, mix: torch.Tensor | None = None
) -> torch.Tensor:
    """Noise of every token: keys [M] int64 -> [M, vocab] float32, finite.

    Args:
        mix: ``token_mix(vocab)`` if the caller keeps it.
    """
    low, high = split_keys(keys)
    table = token_mix(vocab, keys.device) if mix is None else mix[:vocab]
    return hash_to_noise(finish_hash(hash_rounds(low[:, None], high[:, None], table)))
