"""Whether a model can take the latency path on a card, and how its kernel is laid out.

The kernel (``cuda/forward.cu``) is compiled for one model shape and one number of tokens in the
pass. What is decided here: how many thread blocks and warps, how the keys of a long context are
split, how much shared memory each part gets. Standard library only; ``paceline check`` asks too.

    found = plan(arch, card, dtype="bfloat16", block_size=16, max_positions=4096)
    found.packed_bytes if isinstance(found, LatencyPlan) else found.reason
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from paceline.config import ModelArch

MAX_TOKENS = 16  # two panels of the 8 columns of the matrix instruction
MIN_CAPABILITY = (9, 0)  # bulk copies into shared memory
PIECE = 32  # inputs that four lanes hold, 16 bytes each
PANEL = 8  # tokens that one matrix instruction takes
TILE = 16  # outputs, or keys, of one matrix instruction
CHUNK = 2048  # bytes of a bulk copy
HEAD_DIMS = (32, 64, 128)

_BLOCKS = (128, 112, 96, 64, 48, 32)  # thread blocks; most published shapes divide by the first
_MAX_WASTE = 1.10  # of padded weights, over what they hold
# With two more, 14 warps leave 128 registers a thread and 10 leave 168, which large heads need.
_WARPS_SMALL_HEADS, _WARPS_LARGE_HEADS = 14, 10
_MAX_INPUTS = (
    5120  # of qkv, output and head: 16 pieces a lane with 10 warps, and their norm weights
)
_SPLIT_KEYS = 512  # about; a split is whole rounds of all warps
_SMALL_HIDDEN = 1024  # models bound by waits rather than by bytes
_WARM_BYTES = 8 << 20  # of a layer's K and V, fetched into L2 ahead; it holds some 50 MB
_SPIN_LIMIT = 1 << 22  # polls, some seconds
_MIN_DEPTH, _MAX_DEPTH = 4, 32


@dataclass(frozen=True)
class CardLimits:
    """What the layout depends on."""

    capability: tuple[int, int]
    num_sms: int
    shared_memory: int  # bytes that one thread block may use


@dataclass(frozen=True)
class Refusal:
    """Why the latency path does not apply, in one sentence."""

    reason: str


@dataclass(frozen=True)
class LatencyPlan:
    """The layout of one model's kernel. Everything that bits depend on is the same for any tokens.

    blocks, warps: thread blocks, and warps of each that multiply. split_keys: keys of an attention
    split. max_positions: longest context. small: bound by waits, not by bytes.
    """

    arch: ModelArch
    card: CardLimits
    block_size: int
    max_positions: int
    blocks: int
    warps: int
    split_keys: int
    small: bool

    @property
    def q_dim(self) -> int:
        return self.arch.num_attention_heads * self.arch.head_dim

    @property
    def kv_dim(self) -> int:
        return self.arch.num_kv_heads * self.arch.head_dim

    @property
    def qkv_dim(self) -> int:
        return self.q_dim + 2 * self.kv_dim

    @property
    def max_splits(self) -> int:
        return _ceil(self.max_positions, self.split_keys)

    def outputs(self, size: int) -> int:
        """Outputs of a product of ``size`` outputs that one thread block computes, padded."""
        return _ceil(size, self.blocks)

    @property
    def qkv_outputs(self) -> int:
        """The same of qkv: pairs of dimensions that rotate together stay together."""
        return 2 * self.outputs((self.q_dim + self.kv_dim) // 2) + self.outputs(self.kv_dim)

    def qkv_rows(self) -> list[list[int]]:
        """Rows of the fused qkv matrix by block, in the order of its outputs; -1 is padding."""
        half, turned = self.arch.head_dim // 2, (self.q_dim + self.kv_dim) // 2
        pairs, values = self.outputs(turned), self.outputs(self.kv_dim)
        blocks = []
        for block in range(self.blocks):
            rows = []
            for pair in range(block * pairs, (block + 1) * pairs):
                row = pair // half * 2 * half + pair % half
                rows += [row, row + half] if pair < turned else [-1, -1]
            for value in range(block * values, (block + 1) * values):
                rows.append(2 * turned + value if value < self.kv_dim else -1)
            blocks.append(rows)
        return blocks

    def slices(self, inputs: int) -> list[tuple[int, int]]:
        """First piece and number of pieces of 32 inputs of each warp."""
        each, more = divmod(inputs // PIECE, self.warps)
        return [(w * each + min(w, more), each + (w < more)) for w in range(self.warps)]

    def products(self) -> list[tuple[str, int, int]]:
        """A layer's products in the order of the stream: name, inputs, outputs of one block."""
        arch = self.arch
        return [
            ("qkv", arch.hidden_size, self.qkv_outputs),
            ("output", self.q_dim, self.outputs(arch.hidden_size)),
            ("gate_up", arch.hidden_size, 2 * self.outputs(arch.intermediate_size)),
            ("down", arch.intermediate_size, self.outputs(arch.hidden_size)),
        ]

    @cached_property
    def layer_bytes(self) -> list[int]:
        """Bytes of a layer in one block's stream of each warp."""
        parts = [
            [pieces * PIECE * 2 * outputs for _, pieces in self.slices(inputs)]
            for _, inputs, outputs in self.products()
        ]
        return [sum(of_warp) for of_warp in zip(*parts, strict=True)]

    @cached_property
    def head_bytes(self) -> list[int]:
        """The same of the output head."""
        outputs = self.outputs(self.arch.vocab_size)
        return [pieces * PIECE * 2 * outputs for _, pieces in self.slices(self.arch.hidden_size)]

    @cached_property
    def stream_bytes(self) -> list[int]:
        """Bytes of one block's whole stream of each warp, in whole chunks."""
        layers = self.arch.num_layers
        pairs = zip(self.layer_bytes, self.head_bytes, strict=True)
        return [_ceil(layer * layers + head, CHUNK) * CHUNK for layer, head in pairs]

    @property
    def packed_bytes(self) -> int:
        """Device memory of the packed weights, a copy beside the model's own."""
        return self.blocks * sum(self.stream_bytes)

    def exchange_elements(self, tokens: int) -> int:
        """bfloat16 elements of one of the two exchange buffers."""
        arch = self.arch
        each = self.qkv_dim + self.q_dim + 2 * arch.hidden_size + arch.intermediate_size
        return tokens * each

    def partial_heads(self, tokens: int) -> int:
        """Heads times splits that leave partial results; 0 when no context is split."""
        return tokens * self.arch.num_attention_heads * self.max_splits

    def workspace_bytes(self, tokens: int) -> int:
        """Device memory besides the packed weights, for passes of up to ``tokens``."""
        partial = self.partial_heads(tokens) * (self.arch.head_dim + 2) * 4
        return 4 * self.exchange_elements(tokens) + partial

    def group(self, tokens: int) -> int:
        """Tiles that are summed over the warps at once."""
        down = _ceil(self.outputs(self.arch.hidden_size), TILE)
        return max(5 if tokens <= 2 else 3 if tokens <= PANEL else 2, down)

    def fixed_shared_bytes(self, tokens: int) -> int:
        """Shared memory without the rings and their barriers; ``layout.cuh`` says what is in it."""
        arch, warps = self.arch, self.warps
        threads = warps * 32
        sums = 2 * warps * self.group(tokens) * TILE * tokens
        heads = arch.num_attention_heads // arch.num_kv_heads
        merge = max(warps * heads * (arch.head_dim + 3), 2 * self.max_splits + threads)
        units = _ceil(tokens * arch.num_kv_heads * self.max_splits, self.blocks)
        parts = [
            warps * 4,
            max(sums, merge) * 4,
            heads * warps * 4,
            2 * warps * _ceil(tokens, PANEL) * PANEL * 4,
            self.outputs(arch.hidden_size) * tokens * 4,
            tokens * arch.head_dim // 2 * 8,
            arch.num_layers * 48,
            arch.qkv_bias * arch.num_layers * self.qkv_outputs * 2,
            tokens * 40,
            (units + 1) * 48 + 4 + (_ceil(self.split_keys, self.block_size) + 1) * 4,
            warps * 40,
        ]
        return sum(_ceil(part, 16) * 16 for part in parts)

    def depth(self, tokens: int) -> int:
        """Chunks of a warp's ring: all shared memory that is left."""
        left = self.card.shared_memory - self.fixed_shared_bytes(tokens) - 16
        return min(_MAX_DEPTH, left // (self.warps * (CHUNK + 8)))

    def shared_bytes(self, tokens: int) -> int:
        """Shared memory of one thread block."""
        rings = self.depth(tokens) * self.warps * (CHUNK + 8)
        return self.fixed_shared_bytes(tokens) + 16 + rings

    @property
    def threads(self) -> int:
        """Of a thread block: those that multiply, a service warp and a copying warp."""
        return (self.warps + 2) * 32

    @cached_property
    def token_counts(self) -> tuple[int, ...]:
        """Tokens of the passes that there are kernels for; odd numbers above 8 are left out."""
        counts = (*range(1, PANEL + 1), *range(PANEL + 2, MAX_TOKENS + 1, 2))
        return tuple(count for count in counts if self.depth(count) >= _MIN_DEPTH)

    def options(self, tokens: int) -> dict[str, int | str]:
        """Names that the kernel is compiled with, for passes of exactly ``tokens``."""
        arch = self.arch
        # A chunk a warp at a time, so that all blocks together take about 4.5 TB/s at 2 GHz.
        pace = self.warps * CHUNK * 10 // 179 if self.small else 0
        return {
            "HIDDEN": arch.hidden_size,
            "HEADS": arch.num_attention_heads,
            "KV_HEADS": arch.num_kv_heads,
            "HEAD_DIM": arch.head_dim,
            "INNER": arch.intermediate_size,
            "VOCAB": arch.vocab_size,
            "LAYERS": arch.num_layers,
            "QK_NORM": int(arch.qk_norm),
            "QKV_BIAS": int(arch.qkv_bias),
            "EPS": f"{arch.rms_norm_eps!r}f",
            "TOKENS": tokens,
            "KV_BLOCK": self.block_size,
            "SPLIT": self.split_keys,
            "MAX_SPLITS": self.max_splits,
            "CTAS": self.blocks,
            "WARPS": self.warps,
            "DEPTH": self.depth(tokens),
            "CHUNK": CHUNK,
            "FLIGHT": 2 if self.small else 4,
            "PACE": pace,
            "GROUP": self.group(tokens),
            "WARM_BYTES": _WARM_BYTES,
            "SPIN_LIMIT": _SPIN_LIMIT,
            "TRACE": 0,
            "SMEM": self.shared_bytes(tokens),
        }


def plan(
    arch: ModelArch,
    card: CardLimits,
    *,
    dtype: str,
    block_size: int,
    max_positions: int,
    tp_size: int = 1,
) -> LatencyPlan | Refusal:
    """The layout for a model on a card, or why there is none.

    dtype: of weights and KV; block_size: tokens of a KV block; max_positions: tokens of the longest
    sequence, drafts included; tp_size: tensor parallel degree.
    """
    refusal = _refuse(arch, card, dtype, block_size, tp_size)
    if refusal is not None:
        return Refusal(refusal)
    warps = _WARPS_SMALL_HEADS if arch.head_dim <= 64 else _WARPS_LARGE_HEADS
    round_keys = warps * TILE
    found = LatencyPlan(
        arch=arch,
        card=card,
        block_size=block_size,
        max_positions=max_positions,
        blocks=_choose_blocks(arch, card.num_sms),
        warps=warps,
        split_keys=max(1, round(_SPLIT_KEYS / round_keys)) * round_keys,
        small=arch.hidden_size <= _SMALL_HIDDEN,
    )
    depth = found.depth(PANEL)
    if depth < _MIN_DEPTH:
        return Refusal(
            f"{card.shared_memory} bytes of shared memory leave {max(depth, 0)} chunks a warp for "
            f"weights, and {_MIN_DEPTH} are needed"
        )
    return found


def _refuse(
    arch: ModelArch, card: CardLimits, dtype: str, block_size: int, tp_size: int
) -> str | None:
    """The first thing that the kernel cannot do."""
    group = arch.num_attention_heads // arch.num_kv_heads
    have, need = (".".join(map(str, x)) for x in (card.capability, MIN_CAPABILITY))
    hidden, inner, query = arch.hidden_size, arch.intermediate_size, group * arch.num_kv_heads
    query *= arch.head_dim
    faults = [
        (card.capability < MIN_CAPABILITY, f"it needs compute capability {need}, this is {have}"),
        (
            card.num_sms < _BLOCKS[-1],
            f"{card.num_sms} multiprocessors are fewer than {_BLOCKS[-1]}",
        ),
        (dtype != "bfloat16", f"it computes in bfloat16, not in {dtype}"),
        (tp_size > 1, f"it runs on one card, not on {tp_size}"),
        (any(arch.sliding_window), "the model has sliding-window layers"),
        (arch.o_bias or arch.mlp_bias, "the model has biases outside q, k and v"),
        (arch.head_dim not in HEAD_DIMS, f"head_dim ({arch.head_dim}) is not among {HEAD_DIMS}"),
        (arch.qk_norm and arch.head_dim == 32, "head norms need a head_dim of 64 or 128"),
        (group > 8, f"{group} query heads share a KV head, and 8 may"),
        (max(hidden, query) > _MAX_INPUTS, f"{max(hidden, query)} inputs exceed {_MAX_INPUTS}"),
        (
            hidden % PIECE > 0 or inner % PIECE > 0,
            f"hidden and intermediate size ({hidden}, {inner}) are not multiples of {PIECE}",
        ),
        (block_size % TILE > 0, f"block_size ({block_size}) is not a multiple of {TILE}"),
    ]
    return next((reason for wrong, reason in faults if wrong), None)


def _choose_blocks(arch: ModelArch, num_sms: int) -> int:
    """Most thread blocks that pad little; all of them must be resident at once."""
    query = arch.num_attention_heads * arch.head_dim
    key = arch.num_kv_heads * arch.head_dim
    hidden, inner = arch.hidden_size, arch.intermediate_size
    sizes = [  # parts, outputs in each, inputs
        (2, (query + key) // 2, hidden),
        (1, key, hidden),
        (1, hidden, query),
        (2, inner, hidden),
        (1, hidden, inner),
    ]

    def waste(blocks: int) -> float:
        padded = sum(n * _ceil(outputs, blocks) * blocks * inputs for n, outputs, inputs in sizes)
        return padded / sum(n * outputs * inputs for n, outputs, inputs in sizes)

    possible = [blocks for blocks in _BLOCKS if blocks <= num_sms]
    good = [blocks for blocks in possible if waste(blocks) <= _MAX_WASTE]
    if not good:
        return min(possible, key=waste)
    # Where waits count more than bytes, an eighth fewer blocks are better if each then computes
    # whole eights of outputs, as lanes do (Qwen2.5-0.5B: 2 to 8% by tokens).
    even = [n for n in good if 8 * n >= 7 * good[0] and hidden % (8 * n) == 0]
    return even[0] if even and hidden <= _SMALL_HIDDEN else good[0]


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
