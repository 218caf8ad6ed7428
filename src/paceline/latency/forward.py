"""One forward of few rows as one launch: from token ids in the rows' histories to logits.

    forward = LatencyForward(model, kv_caches, found, max_tokens=16)
    forward.run(history, rows, num_tokens, active, block_table, 1, -1, logits)

Everything is enqueued on the current stream and nothing is read back, so a launch can be captured
in a CUDA graph. All thread blocks must be resident at once: the launch is cooperative, and fails
rather than waits when something else holds a multiprocessor of the card for good.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from paceline.errors import ConfigError, EngineError
from paceline.latency.build import KERNEL, bindings, build, checked
from paceline.latency.pack import PackedWeights
from paceline.latency.plan import MAX_TOKENS, LatencyPlan
from paceline.models.decoder import DecoderLayer, DecoderModel

KVCache = tuple[torch.Tensor, torch.Tensor]  # K and V of one layer
_STATE = 3  # launches; blocks that have finished; whether a reader gave up

_POINTERS = [
    *("layers", "embedding", "final_norm", "weights", "streams", "frequencies"),
    *("history", "rows", "num_tokens", "active", "block_table"),
]
_NUMBERS = [
    ("history_stride", ctypes.c_longlong),
    ("table_stride", ctypes.c_longlong),
    ("history_len", ctypes.c_int),
    ("table_len", ctypes.c_int),
    ("query_len", ctypes.c_int),
    ("offset", ctypes.c_int),
]
_BUFFERS = [
    *("exchange", "partials", "partial_weights", "partial_flags"),
    *("state", "logits", "trace"),
]


class _Params(ctypes.Structure):
    """``Params`` of ``cuda/common.cuh``."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *_NUMBERS,
        *((name, ctypes.c_void_p) for name in _BUFFERS),
    ]


class LatencyForward:
    """Packed weights, exchange buffers and compiled kernels of one model.

    Launches of one object must be ordered, one after another: they share the buffers.
    """

    def __init__(
        self,
        model: DecoderModel,
        kv_caches: list[KVCache],
        plan: LatencyPlan,
        max_tokens: int = MAX_TOKENS,
        packed: PackedWeights | None = None,
    ) -> None:
        """kv_caches: one (K, V) a layer, [num_blocks + 1, block_size, kv_heads, head_dim].

        packed: weights of the same model and plan, when they are there already.

        Raises:
            ConfigError: max_tokens is out of range.
            LatencyUnavailable: no kernel for this card can be had.
        """
        if not 1 <= max_tokens <= MAX_TOKENS:
            raise ConfigError(
                f"a latency pass has 1 to {MAX_TOKENS} tokens, not {max_tokens}. "
                f"hint: use the throughput path for more"
            )
        self.plan = plan
        self.max_tokens = max_tokens
        self.vocab_size = plan.arch.vocab_size
        self.packed = packed or PackedWeights(model, plan)
        self._model = model
        device = model.embedding.weight.device
        self._driver = bindings("driver")
        self._kernels: dict[int, Any] = {}

        def zeros(count: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(max(count, 1), dtype=dtype, device=device)

        heads = plan.partial_heads(max_tokens)
        self._partials = zeros(heads * plan.arch.head_dim, torch.float32)
        self._partial_weights = zeros(heads * 2, torch.float32)
        # Each number of tokens has a state, flags and an exchange of its own: what a launch leaves
        # in them, the next one of the same number knows how to clear.
        self._state = zeros((max_tokens + 1) * _STATE, torch.int32).view(-1, _STATE)
        self._flags: dict[int, torch.Tensor] = {}
        self._exchange: dict[int, torch.Tensor] = {}
        # [blocks, layers, 16] int64 for kernels that were built with TRACE.
        self.trace: torch.Tensor | None = None
        self._layers, self._kept = self._layer_table(kv_caches, device)
        self._params = self._fixed_params()

    def prepare(self, tokens: int) -> None:
        """Compile and load the kernel for passes of ``tokens``, which a capture cannot do.

        Raises LatencyUnavailable with the reason.
        """
        if tokens in self._kernels:
            return
        self.load(tokens, build(self.plan.options(tokens), self.plan.card.capability))

    def load(self, tokens: int, cubin: bytes) -> None:
        """Take a kernel that ``build`` made from ``plan.options(tokens)``."""
        driver = self._driver
        module = checked(driver.cuModuleLoadData(cubin), "loading the latency kernel")
        function = checked(driver.cuModuleGetFunction(module, KERNEL.encode()), "its entry")
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        size = self.plan.shared_bytes(tokens)
        checked(driver.cuFuncSetAttribute(function, limit, size), f"{size} bytes of shared memory")
        elements, flags = 2 * self.plan.exchange_elements(tokens), self.plan.partial_heads(tokens)
        device = self.packed.data.device
        self._exchange[tokens] = torch.full((elements,), -1, dtype=torch.int16, device=device)
        self._flags[tokens] = torch.zeros(flags, dtype=torch.int32, device=device)
        self._kernels[tokens] = function

    def run(
        self,
        history: torch.Tensor,
        rows: torch.Tensor,
        num_tokens: torch.Tensor,
        active: torch.Tensor,
        block_table: torch.Tensor,
        query_len: int,
        offset: int,
        logits: torch.Tensor,
    ) -> None:
        """Enqueue one pass of ``query_len`` tokens for each of B rows.

        history: [R, L] int32 token ids; rows: [B] int32; num_tokens, active: [R] int32;
        block_table: [R, max_blocks] int32. The first token of a row stands at ``num_tokens[row] +
        offset``; its K and V, and those of the tokens after it, go to the row's blocks. Rows that
        are not active, and positions before the first, write no K and V and get logits that mean
        nothing. logits: [B * query_len, vocab_size] float32, contiguous, all written.

        Raises ConfigError for a pass of more than ``max_tokens``. B * query_len is one of the
        plan's ``token_counts``.
        """
        tokens = rows.shape[0] * query_len
        if tokens > self.max_tokens:
            raise ConfigError(
                f"a latency pass of {tokens} tokens exceeds max_tokens ({self.max_tokens}). "
                f"hint: use the throughput path for it"
            )
        self.prepare(tokens)
        params = self._params
        for name, tensor in (
            ("history", history),
            ("rows", rows),
            ("num_tokens", num_tokens),
            ("active", active),
            ("block_table", block_table),
            ("exchange", self._exchange[tokens]),
            ("partial_flags", self._flags[tokens]),
            ("state", self._state[tokens]),
            ("logits", logits),
        ):
            setattr(params, name, tensor.data_ptr())
        params.history_stride, params.history_len = history.stride(0), history.shape[1]
        params.table_stride, params.table_len = block_table.stride(0), block_table.shape[1]
        params.query_len, params.offset = query_len, offset
        params.trace = None if self.trace is None else self.trace.data_ptr()
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        checked(
            self._driver.cuLaunchCooperativeKernel(
                self._kernels[tokens],
                *(self.plan.blocks, 1, 1),
                *(self.plan.threads, 1, 1),
                self.plan.shared_bytes(tokens),
                torch.cuda.current_stream().cuda_stream,
                ctypes.addressof(arguments),
            ),
            "launching the latency kernel",
        )

    @property
    def failed(self) -> torch.Tensor:
        """int32 on the device, not all 0 once a pass gave up waiting; its logits are NaN."""
        return self._state[:, _STATE - 1]

    def check(self) -> None:
        """Wait for the device; raises EngineError when a pass gave up."""
        if bool(self.failed.any()):
            raise EngineError(
                "the latency kernel gave up: a thread block waited for another for seconds. "
                "hint: nothing else may run on the card meanwhile; or turn the latency path off"
            )

    def reset(self) -> None:
        """Make the buffers as new, after a pass that gave up."""
        self._state.zero_()
        for flags in self._flags.values():
            flags.zero_()
        for buffer in self._exchange.values():
            buffer.fill_(-1)

    def _layer_table(
        self, kv_caches: list[KVCache], device: torch.device
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Pointers of every layer as ``LayerPointers``, and the tensors behind them."""
        table, kept = [], []
        for layer, (keys, values) in zip(self._model.layers, kv_caches, strict=True):
            assert isinstance(layer, DecoderLayer)
            bias, head_norm = layer.attention.qkv.bias, layer.attention.head_norm
            norms = layer.input_norm.weight, layer.mlp_norm.weight
            tensors: list[torch.Tensor | None] = [*norms, bias, head_norm, keys, values]
            table.append([0 if tensor is None else tensor.data_ptr() for tensor in tensors])
            kept += [tensor for tensor in tensors if tensor is not None]
        return torch.tensor(table, dtype=torch.int64, device=device), kept

    def _fixed_params(self) -> _Params:
        """What is the same in every launch."""
        model = self._model
        self._frequencies = model.rotary.frequencies.contiguous()
        return _Params(
            layers=self._layers.data_ptr(),
            embedding=model.embedding.weight.data_ptr(),
            final_norm=model.norm.weight.data_ptr(),
            weights=self.packed.data.data_ptr(),
            streams=self.packed.starts.data_ptr(),
            frequencies=self._frequencies.data_ptr(),
            partials=self._partials.data_ptr(),
            partial_weights=self._partial_weights.data_ptr(),
        )
