"""The tensors of a synthetic model: random matrices around a fixed map from id to next id.

Place t on the cycle of N ids has the feature vector f(t), H wide:

    f(t) = [A, A, √2 cos(ω₁t + φ₁), …, √2 cos(ω_P t + φ_P), √2 sin(ω₁t + φ₁), …]

with P = H/2 − 1 frequencies ω = 2πm/N for different random integers m. Two places have nearly
orthogonal features, as random vectors would, and the step from f(t) to f(t + 1) is a rotation R.

The embedding of an id is its feature. All layers are random, of the usual scale; together they move
the residual stream by a tenth to a fifth, so what it holds at the end is still recognisable. What
is left is to step from t to t + 1:

- with a head of its own, the head's row of an id is the feature of the place before its place,
- with a tied head, the last feed-forward part adds (R − 1) f. silu(z) − silu(−z) = z makes a linear
  map out of pairs of its gates: z = Qx with a random orthogonal Q, and the two constant coordinates
  of f set the factor beside them near 1.

The final norm scales the logits, so that the right one stands out at any usual temperature, and
drops the constant coordinates. Ids without a place get half the feature of a stand-in: they are
continued as it would be, and never win against it.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch

from paceline.arrays import Int64Array
from paceline.config import ModelArch
from paceline.synth.chain import places

_CONSTANT = 4.0  # A
_EMBEDDING_RMS = 4.0  # the features are stored this much larger than what the layers add
_LOGIT = 80.0  # about what the right id gets; others get about ± _LOGIT / √H
_ROWS_AT_ONCE = 8192


class SyntheticWeights:
    """Makes the tensors of one model by name, in any order and from any thread.

    cycle: [N] ids; stand_ins: [rows] ids (see ``chain``). Values depend on the seed, the kind of
    device and nothing else. Held between calls: the places, and for a tied head Q, [H, H] float32.
    """

    def __init__(
        self,
        arch: ModelArch,
        cycle: Int64Array,
        stand_ins: Int64Array,
        seed: str,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        self._arch = arch
        self._seed = seed
        self._dtype = dtype
        self._device = device
        self._cycle_length = len(cycle)
        hidden = arch.hidden_size
        pairs = hidden // 2 - 1
        rng = np.random.default_rng(self.key(seed, "features"))
        steps = 1 + rng.choice((len(cycle) - 1) // 2, pairs, replace=False)
        self._steps = torch.from_numpy(steps).to(device)  # m of each pair
        self._phases = torch.from_numpy(rng.integers(0, len(cycle), pairs)).to(device)
        self._places = torch.from_numpy(places(cycle, stand_ins)).to(device)
        own = torch.from_numpy(stand_ins == np.arange(len(stand_ins))).to(device)
        self._row_scale = torch.where(own, 1.0, 0.5)
        self._feature_rms = math.sqrt((2 * _CONSTANT**2 + 2 * pairs) / hidden)
        self._mixing: torch.Tensor | None = None
        if arch.tie_word_embeddings:
            if arch.intermediate_size < 2 * hidden:
                raise ValueError("a tied head needs intermediate_size >= 2 * hidden_size")
            self._mixing = torch.linalg.qr(self._normal("mixing", (hidden, hidden), 1.0))[0]

    def make(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor of this checkpoint name, on the device, in the model's dtype."""
        last = f"model.layers.{self._arch.num_layers - 1}.mlp."
        if name == "model.embed_tokens.weight":
            return self._feature_rows(0, _EMBEDDING_RMS)
        if name == "lm_head.weight":
            return self._feature_rows(-1, _LOGIT / shape[1])
        if name == "model.norm.weight":
            return self._final_norm(name, shape)
        if name.endswith("norm.weight"):
            return (1.0 + self._normal(name, shape, 0.05)).to(self._dtype)
        if name.endswith(".bias"):
            return self._normal(name, shape, 0.1).to(self._dtype)
        # Unit variance in, unit variance out; what goes into the residual stream is scaled so that
        # all layers together add about unit variance.
        std = shape[1] ** -0.5
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            std *= (2 * self._arch.num_layers) ** -0.5
        if self._mixing is None or not name.startswith(last):
            return self._normal(name, shape, std, self._dtype)
        return self._stepping(name, self._normal(name, shape, std)).to(self._dtype)

    def _final_norm(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        weight = 1.0 + self._normal(name, shape, 0.05)
        if self._mixing is not None:  # with a head of its own, the head has the scale
            weight *= _LOGIT / (_EMBEDDING_RMS * shape[0])
        weight[:2] = 0.0
        return weight.to(self._dtype)

    def _feature_rows(self, shift: int, scale: float) -> torch.Tensor:
        """scale × f(place + shift) of every id, [rows, H]."""
        pairs = len(self._steps)
        rows = torch.empty(
            len(self._places), self._arch.hidden_size, dtype=self._dtype, device=self._device
        )
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            part = slice(start, start + _ROWS_AT_ONCE)
            turns = (self._places[part, None] + shift) * self._steps + self._phases
            # Whole turns are dropped as integers, where it costs no precision.
            angle = (turns % self._cycle_length).float() * (2 * math.pi / self._cycle_length)
            size = scale * self._row_scale[part, None]
            rows[part, :2] = _CONSTANT * size
            rows[part, 2 : 2 + pairs] = angle.cos() * (math.sqrt(2) * size)
            rows[part, 2 + pairs :] = angle.sin() * (math.sqrt(2) * size)
        return rows

    def _stepping(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """The last layer's gate, up or down matrix [2H of I neurons changed], float32."""
        assert self._mixing is not None
        hidden = self._arch.hidden_size
        pairs = hidden // 2 - 1
        if name.endswith("gate_proj.weight"):
            weight[:hidden] = self._mixing
            weight[hidden : 2 * hidden] = -self._mixing
        elif name.endswith("up_proj.weight"):
            weight[: 2 * hidden] *= 0.2  # noise of a fifth around a factor of 1
            weight[: 2 * hidden, :2] = self._feature_rms / (2 * _CONSTANT)
        else:
            angle = self._steps.float() * (2 * math.pi / self._cycle_length)
            cos, sin = (angle.cos() - 1.0)[:, None], angle.sin()[:, None]
            back = self._mixing.T
            of_cos, of_sin = back[2 : 2 + pairs], back[2 + pairs :]
            step = weight[:, :hidden].clone()  # to become (R − 1) Qᵀ; R keeps the constant rows
            step[2 : 2 + pairs] = cos * of_cos - sin * of_sin
            step[2 + pairs :] = sin * of_cos + cos * of_sin
            step[2:] *= _EMBEDDING_RMS * self._feature_rms  # the norm before divided by this
            weight[:, :hidden] = step
            weight[:, hidden : 2 * hidden] = -step
        return weight

    def _normal(
        self,
        name: str,
        shape: tuple[int, ...],
        std: float,
        dtype: torch.dtype = torch.float32,
    ) -> torch.Tensor:
        generator = torch.Generator(self._device).manual_seed(self.key(self._seed, name))
        empty = torch.empty(shape, dtype=dtype, device=self._device)
        return empty.normal_(0.0, std, generator=generator)

    @staticmethod
    def key(seed: str, name: str) -> int:
        """The 63-bit seed of one tensor."""
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1
