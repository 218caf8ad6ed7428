"""The sampler, which is also the verifier: logits in, one token id a position out.

Whether a position is an ordinary decode step or one of the k + 1 of a verification makes no
difference here: same processing of the same context, same noise, same token. Greedy rows cost one
argmax; only flagged rows pay for their feature. This file must not know requests or drafters.

    sampler = Sampler(vocab_limit=tokenizer.vocab_size)
    token_ids = sampler.sample(logits, rows, positions, state)
"""

from __future__ import annotations

import numpy as np
import torch

from paceline.arrays import Int32Array, Int64Array
from paceline.sample import rows as row_flags
from paceline.sample.choose import Choice, argmax, choose_full, choose_pruned
from paceline.sample.noise import noise_keys, token_mix
from paceline.sample.processing import mask_disallowed, process_logits
from paceline.sample.rows import SamplingRows


def nonfinite_rows(logits: torch.Tensor) -> torch.Tensor:
    """Which rows of [M, V] cannot be sampled: NaN or +inf in them, or nothing above -inf.

    Returns:
        [M] bool. One pass over the logits; call it before ``sample``, which may change them.
    """
    return ~logits.amax(-1).isfinite()


class Sampler:
    """Samples the next token of any set of positions.

    vocab_limit: ids from here on are never sampled (a padded vocabulary), None for no limit.
    prune: skip noise that cannot matter; the ids are the same without.
    """

    def __init__(self, vocab_limit: int | None = None, *, prune: bool = True) -> None:
        self.vocab_limit = vocab_limit
        self.prune = prune
        self._mix: torch.Tensor | None = None

    def sample(
        self,
        logits: torch.Tensor,
        rows: Int64Array | torch.Tensor,
        positions: Int64Array | torch.Tensor,
        state: SamplingRows,
        *,
        truncate: bool = True,
        allowed: tuple[Int64Array, Int32Array] | None = None,
    ) -> torch.Tensor:
        """Sample one token for each of M positions.

        Args:
            logits: [M, V] float32; may be changed in place.
            rows: [M] the row of each. A row may come several times (its verify positions), rows may
                come in any order.
            positions: [M] absolute position p of the token to sample: its context is
                ``history[row, :p]``.
            truncate: False leaves out top_k, top_p and min_p (for a drafter).
            allowed: which of the M have a mask, and the masks (see ``mask_disallowed``).

        Returns:
            [M] int64 token ids. Rows with NaN or +inf get some id and harm no other row; see
            ``nonfinite_rows``.
        """
        row_array = _to_host(rows)
        position_array = _to_host(positions)
        if self.vocab_limit is not None and self.vocab_limit < logits.shape[1]:
            logits[:, self.vocab_limit :] = -torch.inf
        if allowed is not None:
            mask_disallowed(logits, *allowed)
        flags = state.flags[row_array]
        if (flags & row_flags.PROCESSED).any():
            process_logits(logits, row_array, position_array, state)
        best = argmax(logits)
        sampled = np.flatnonzero(flags & row_flags.SAMPLED)
        if not sampled.size:
            return best
        picked = row_array[sampled]
        choice = Choice(
            keys=noise_keys(
                state.row_keys[picked], position_array[sampled] - state.prompt_len[picked]
            ),
            temperature=state.temperature[picked],
            top_k=state.top_k[picked],
            top_p=state.top_p[picked],
            min_p=state.min_p[picked],
            truncated=(flags[sampled] & row_flags.TRUNCATED).astype(bool) & truncate,
        )
        mix = self._token_mix(logits)
        index = torch.from_numpy(sampled).to(logits.device)
        if self.prune and logits.device.type == "cpu":
            tokens = choose_pruned(logits, sampled, best.numpy()[sampled], choice, mix)
            best[index] = torch.from_numpy(tokens)
        else:
            best[index] = choose_full(logits[index], choice, mix)
        return best

    def _token_mix(self, logits: torch.Tensor) -> torch.Tensor:
        """The token part of the noise hash, kept from call to call."""
        vocab, mix = logits.shape[1], self._mix
        if mix is None or mix.shape[0] < vocab or mix.device != logits.device:
            mix = self._mix = token_mix(vocab, logits.device)
        return mix[:vocab]


def _to_host(values: Int64Array | torch.Tensor) -> Int64Array:
    array = values.cpu().numpy() if isinstance(values, torch.Tensor) else values
    return array.astype(np.int64, copy=False)
