#!/usr/bin/env python3
"""Train the demo pair: a small, deep Qwen2 target and a shallow drafter that imitates it.

    python tools/train_demo_pair.py --out OUT --minutes 8        # one data-centre GPU
    python tools/train_demo_pair.py --out OUT --toy              # the whole path in a minute, CPU

Both learn the Python standard library's sources: those of the running interpreter, or of the
directories given with ``--source``. Writes ``OUT/demo`` and ``OUT/demo-draft`` (bfloat16
safetensors, one tokenizer), ``OUT/report.json`` and ``OUT/MODEL_CARD.md``. Needs torch,
transformers, tokenizers and safetensors; no network, and nothing of Paceline.

In four phases that share the time given:

1. The target, by next-token loss: warm-up, a constant learning rate until the time is short or the
   validation loss stands still, then a decay to zero. The best moving average of the weights wins.
2. Texts sampled from the target (greedy, temperature 1, and one after the other), because a drafter
   is only ever asked about text that the target wrote.
3. The drafter, by distillation on those texts and on the corpus: forward KL (Hinton et al., 2015)
   plus the cross-entropy of the target's own choice, as in DistillSpec (Zhou et al., 2024).
4. Acceptance on files that neither has seen, in float32 with the rounded weights, as it is used.

Files are held out whole, by a hash of their path: one part chooses weights, the other is reported.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import hashlib
import itertools
import json
import math
import os
import platform
import random
import sys
import sysconfig
import textwrap
import time
import tokenize
import unicodedata
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from torch import nn

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)  # ids 0, 1, 2
END_ID = 0

# How the Qwen2 family splits text before merging; transformers puts exactly this in place for a
# Qwen2 model, whatever tokenizer.json says. Indentation stays in one piece, less its last space.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"
)

MAX_POSITIONS = 2048
ROPE_THETA = 10000.0
NORM_EPS = 1e-6
MAX_PAIR_BYTES = 15_500_000
MIN_COST_RATIO = 5.0
ROUND_LENGTHS = (1, 3, 5, 8)


@dataclass(frozen=True)
class Shape:
    """Dimensions of a Qwen2 with tied embeddings; heads have hidden / heads dimensions."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def matrix_weights(self, vocab: int) -> int:
        """Multiplications of a one-row forward, head included (attention over the cache is not)."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        return self.layers * (attention + 3 * self.hidden * self.inner) + vocab * self.hidden


@dataclass(frozen=True)
class Recipe:
    """Every size and rate of a run; ``--toy`` is another instance."""

    target: Shape = Shape(layers=16, hidden=192, heads=6, kv_heads=2, inner=448)
    drafter: Shape = Shape(layers=2, hidden=160, heads=5, kv_heads=1, inner=384)
    vocab: int = 4096
    max_files: int | None = None
    batch_tokens: int = 32_768
    lengths: tuple[int, ...] = (1024, 1024, 1024, 2048)  # sequence lengths, in turn
    target_lr: float = 3e-3
    target_decay: float = 0.3
    drafter_lr: float = 3e-3
    drafter_decay: float = 0.05
    warmup: int = 200
    ema: float = 0.998
    evaluations: int = 60
    validation_windows: int = 128
    patience: int = 10  # evaluations of the constant phase without progress
    pool_rows: int = 4096
    pool_length: int = 512
    pool_batches: int = 24
    pool_prompts: tuple[int, ...] = (128, 64, 256, 32)
    pool_share: float = 0.7  # of the drafter's steps; the corpus has the rest
    prompt_length: int = 128
    continuation: int = 128
    test_prompts: int = 512
    validation_prompts: int = 128
    target_until: float = 0.6  # shares of the whole time
    pool_until: float = 0.69
    drafter_until: float = 0.94


TOY = Recipe(
    target=Shape(layers=5, hidden=64, heads=2, kv_heads=1, inner=128),
    drafter=Shape(layers=1, hidden=32, heads=1, kv_heads=1, inner=32),
    vocab=512,
    max_files=20,
    batch_tokens=512,
    lengths=(128, 128, 256),
    warmup=10,
    evaluations=4,
    validation_windows=16,
    pool_rows=8,
    pool_length=96,
    pool_batches=3,
    pool_prompts=(32, 16),
    prompt_length=32,
    continuation=32,
    test_prompts=8,
    validation_prompts=4,
)


@dataclass
class Run:
    """What the phases share: arguments, clock, device, and the report that they fill."""

    recipe: Recipe
    out: Path
    seed: int
    seconds: float
    device: torch.device
    compile: bool = False
    dropout: float | None = None
    target_steps: int | None = None
    drafter_steps: int | None = None
    report: dict[str, Any] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    def elapsed(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.monotonic() - self.started

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.started:6.1f}s] {text}", flush=True)

    def generator(self, stream: int) -> torch.Generator:
        """A random stream of its own for each purpose."""
        return torch.Generator(self.device).manual_seed(self.seed * 1000 + stream)

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(
            self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda"
        )

    def save_report(self) -> None:
        text = json.dumps(self.report, indent=2) + "\n"
        (self.out / "report.json").write_text(text, encoding="utf-8")


# ---- data ----------------------------------------------------------------------------------------

SKIPPED_DIRECTORIES = {"site-packages", "dist-packages", "__pycache__", "pydoc_data"}
# Written by a build or an administrator: they hold that machine's paths and settings.
SKIPPED_PREFIXES = ("_sysconfigdata", "sitecustomize", "usercustomize")
GENERATED_MARKS = ("gencodec.py",)  # character tables: a megabyte of hexadecimal numbers


@dataclass
class Corpus:
    """Texts by part, ``train``, ``validation`` and ``test``: (relative path, text), sorted."""

    parts: dict[str, list[tuple[str, str]]]

    def texts(self, part: str) -> list[str]:
        return [text for _, text in self.parts[part]]

    def bytes(self, part: str) -> int:
        return sum(len(text.encode()) for text in self.texts(part))


def read_source(path: Path) -> str | None:
    """The text of a Python file in its declared encoding; None if it has none or is no use."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with tokenize.open(path) as file:
                text = file.read()
    except (OSError, SyntaxError, UnicodeError, LookupError):
        return None
    head = text[:2000]
    usable = len(text) >= 64 and "\0" not in text and not any(m in head for m in GENERATED_MARKS)
    return text if usable and not any(token in text for token in SPECIAL_TOKENS) else None


def python_files(root: Path) -> Iterator[tuple[str, Path]]:
    """(relative path, path) of the sources below a standard library, sorted."""
    for directory, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name not in SKIPPED_DIRECTORIES)
        relative = Path(directory).relative_to(root)
        if relative.parts[:2] == ("lib2to3", "tests"):
            names.clear()
            continue
        for name in sorted(files):
            if name.endswith(".py") and not name.startswith(SKIPPED_PREFIXES):
                yield (relative / name).as_posix(), Path(directory) / name


def part_of(relative: str) -> str:
    """3 % of the paths are for the report, 2 % choose among weights; the same everywhere."""
    bucket = int.from_bytes(hashlib.sha256(relative.encode()).digest()[:4], "big") % 1000
    return "test" if bucket < 30 else "validation" if bucket < 50 else "train"


def load_corpus(run: Run, roots: list[Path]) -> Corpus:
    """Read, split and deduplicate the sources; a copy of a held-out file never trains."""
    found: dict[str, list[tuple[str, str]]] = {"test": [], "validation": [], "train": []}
    unreadable = 0
    for root in roots:
        for relative, path in python_files(root):
            text = read_source(path)
            if text is None:
                unreadable += 1
            else:
                found[part_of(relative)].append((relative, text))
    seen: set[bytes] = set()
    for part, files in found.items():  # held-out parts first
        files.sort()
        if run.recipe.max_files is not None:
            del files[run.recipe.max_files if part == "train" else 6 :]
        unique = []
        for relative, text in files:
            digest = hashlib.sha256(text.encode()).digest()
            if digest not in seen:
                seen.add(digest)
                unique.append((relative, text))
        found[part] = unique
    if not all(found.values()):
        raise SystemExit(f"no Python sources found below {', '.join(map(str, roots))}")
    corpus = Corpus(found)
    counts = {part: {"files": len(found[part]), "bytes": corpus.bytes(part)} for part in found}
    run.say(f"corpus: {counts}, {unreadable} files left out as unreadable, tiny or generated")
    run.report["corpus"] = {
        **counts,
        "digest": hashlib.sha256(b"".join(sorted(seen))).hexdigest(),
        "test_files": [relative for relative, _ in found["test"]],
        "validation_files": [relative for relative, _ in found["validation"]],
    }
    return corpus


def train_tokenizer(texts: list[str], vocab: int) -> Tokenizer:
    """Byte-level BPE with the pipeline of the Qwen2 family."""
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocab,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode_part(run: Run, corpus: Corpus, part: str, tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of each file, closed by the end token."""
    encoded = tokenizer.encode_batch(corpus.texts(part), add_special_tokens=False)
    files = [[*encoding.ids, END_ID] for encoding in encoded]
    run.report["corpus"][part]["tokens"] = sum(map(len, files))
    return files


def pack(files: list[list[int]], seed: int, device: torch.device) -> torch.Tensor:
    """All files in random order as one stream, int32 [tokens]; it begins with the end token."""
    order = random.Random(seed).sample(files, len(files))
    stream = itertools.chain([END_ID], *order)
    return torch.tensor(list(stream), dtype=torch.int32, device=device)


def windows(
    stream: torch.Tensor, rows: int, length: int, generator: torch.Generator
) -> torch.Tensor:
    """Random pieces of the stream, int64 [rows, length]."""
    starts = torch.randint(
        0, stream.numel() - length + 1, (rows, 1), generator=generator, device=stream.device
    )
    return stream[starts + torch.arange(length, device=stream.device)].long()


# ---- model ---------------------------------------------------------------------------------------

KVCache = list[tuple[torch.Tensor, torch.Tensor]]  # a layer: K, V [rows, kv heads, length, dim]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of half-split heads, x [rows, heads, length, head_dim]; in float32."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal grouped-query attention; a single query row sees every key."""
    rows, heads, length, dim = query.shape
    kv_heads, keys = key.shape[1:3]
    group = heads // kv_heads
    if length == 1:  # the queries of a group become the rows of one product: no copies of K and V
        grouped = query.reshape(rows, kv_heads, group, dim)
        return F.scaled_dot_product_attention(grouped, key, value).reshape(query.shape)
    key, value = (
        x[:, :, None].expand(-1, -1, group, -1, -1).reshape(rows, heads, keys, dim)
        for x in (key, value)
    )
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class Block(nn.Module):
    """Pre-norm attention and gated feed-forward, with fused projections."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.shape = shape
        self.dropout = dropout
        width = shape.heads * shape.head_dim
        self.attention_norm = nn.Parameter(torch.ones(shape.hidden))
        self.qkv = nn.Linear(shape.hidden, width + 2 * shape.kv_heads * shape.head_dim)
        self.output = nn.Linear(width, shape.hidden, bias=False)
        self.mlp_norm = nn.Parameter(torch.ones(shape.hidden))
        self.gate_up = nn.Linear(shape.hidden, 2 * shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor] | None,
        start: int,
    ) -> torch.Tensor:
        """x [rows, length, hidden] at positions ``start`` and after."""
        shape, (rows, length, hidden) = self.shape, x.shape
        normed = F.rms_norm(x, (hidden,), self.attention_norm, NORM_EPS)
        fused = self.qkv(normed).view(rows, length, -1, shape.head_dim).transpose(1, 2)
        query, key, value = fused.split((shape.heads, shape.kv_heads, shape.kv_heads), dim=1)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        if cache is not None:
            cache[0][:, :, start : start + length] = key
            cache[1][:, :, start : start + length] = value
            key, value = (kept[:, :, : start + length] for kept in cache)
        attended = attend(query, key, value).transpose(1, 2).reshape(rows, length, -1)
        x = x + F.dropout(self.output(attended), self.dropout, self.training)
        normed = F.rms_norm(x, (hidden,), self.mlp_norm, NORM_EPS)
        gate, up = self.gate_up(normed).chunk(2, dim=-1)
        return x + F.dropout(self.down(F.silu(gate) * up), self.dropout, self.training)


class Decoder(nn.Module):
    """Qwen2 with tied embeddings, as transformers computes it."""

    def __init__(self, shape: Shape, vocab: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape = shape
        self.dropout = dropout
        self.embedding = nn.Parameter(torch.empty(vocab, shape.hidden))
        self.blocks = nn.ModuleList(Block(shape, dropout) for _ in range(shape.layers))
        self.norm = nn.Parameter(torch.ones(shape.hidden))
        half = torch.arange(0, shape.head_dim, 2).double() / shape.head_dim
        angles = torch.outer(torch.arange(MAX_POSITIONS).double(), ROPE_THETA**-half)
        self.angles: torch.Tensor
        self.register_buffer("angles", torch.stack((angles.cos(), angles.sin())).float(), False)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                residual = name.endswith(("output.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * shape.layers) ** (0.5 * residual))

    def hidden(
        self, ids: torch.Tensor, cache: KVCache | None = None, start: int = 0
    ) -> torch.Tensor:
        """ids [rows, length] int64 -> normalised hidden states [rows, length, hidden]."""
        cos, sin = self.angles[:, start : start + ids.shape[1]].float()
        x = F.dropout(F.embedding(ids, self.embedding), self.dropout, self.training)
        for index, block in enumerate(self.blocks):
            x = block(x, cos, sin, None if cache is None else cache[index], start)
        return F.rms_norm(x, (self.shape.hidden,), self.norm, NORM_EPS)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The tied head in float32, [..., vocab]: in bfloat16 the best tokens would often tie."""
        return F.linear(hidden.float(), self.embedding.float())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [rows, length] -> logits [rows, length, vocab]."""
        return self.logits(self.hidden(ids))

    def new_cache(self, rows: int, length: int) -> KVCache:
        size = (rows, self.shape.kv_heads, length, self.shape.head_dim)
        return [
            (self.embedding.new_empty(size), self.embedding.new_empty(size)) for _ in self.blocks
        ]


def frozen(model: Decoder, dtype: torch.dtype) -> Decoder:
    """A copy for inference; its rotary angles stay exact."""
    twin = copy.deepcopy(model).eval().requires_grad_(False).to(dtype)
    twin.angles = model.angles.clone()
    return twin


def rounded(model: Decoder) -> Decoder:
    """A float32 copy with weights rounded to bfloat16: the model that is shipped."""
    return frozen(frozen(model, torch.bfloat16), torch.float32)


# ---- optimisation --------------------------------------------------------------------------------


class Average:
    """Exponential moving average of a model's weights, and the best of it so far."""

    def __init__(self, model: Decoder, decay: float) -> None:
        self.source = list(model.parameters())
        self.model = frozen(model, torch.float32)
        self.weights = list(self.model.parameters())
        self.decay = decay
        self.updates = 0
        self.best_score = -math.inf
        self.best_step = 0
        self.best = copy.deepcopy(self.model.state_dict())

    @torch.no_grad()
    def update(self) -> None:
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        torch._foreach_lerp_(self.weights, [p.detach() for p in self.source], 1 - decay)

    def keep_if_best(self, score: float, step: int) -> None:
        if score > self.best_score:
            self.best_score, self.best_step = score, step
            self.best = copy.deepcopy(self.model.state_dict())

    def best_model(self) -> Decoder:
        """The best weights; the latest if time ran out before the first evaluation."""
        if self.best_step:
            self.model.load_state_dict(self.best)
        return self.model


def make_optimizer(model: Decoder, lr: float, decay: float) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter, 2019); norms and biases do not decay."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    fused = model.embedding.device.type == "cuda"
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8, fused=fused)


def apply_step(
    model: Decoder, optimizer: torch.optim.Optimizer, loss: torch.Tensor, lr: float
) -> None:
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


@dataclass
class Schedule:
    """Warm-up, constant, then a linear decay to zero over the last quarter of all steps.

    Its length comes from the clock, and is planned anew until the decay begins, unless
    ``fixed_steps`` says how many there are.
    """

    run: Run
    until: float  # seconds from the start of the run
    fixed_steps: int | None
    step: int = 0
    total: int = 0  # 0 while the first steps are timed
    decay_from: int = 0
    _timed_from: int = 10  # the first steps warm up the device
    _clock: float = 0.0

    def plan(self) -> bool:
        """Called before every step; False when training is over."""
        if self.fixed_steps is not None:
            if self.total == 0:
                self._set_total(self.fixed_steps)
            return self.step < self.total
        if self.step == self._timed_from:
            self._clock = self.run.elapsed()
        elif self.step > self._timed_from and self.step % 30 == 0:
            now = self.run.elapsed()
            if now > self.until:  # slower than planned, in the decay
                self.run.say("out of time")
                return False
            if self.total == 0 or self.step < self.decay_from:
                cost = (now - self._clock) / (self.step - self._timed_from)
                if self.total == 0:
                    self.run.say(f"{cost * 1000:.1f} ms a step")
                self._set_total(self.step + int((self.until - now) * 0.97 / cost))
        return self.total == 0 or self.step < self.total

    def _set_total(self, total: int) -> None:
        self.total = max(1, total)
        self.decay_from = self.total - self.total // 4

    def decay_now(self) -> None:
        """Begin the decay at this step; it takes a third of the steps made."""
        self.decay_from = self.step
        self.total = min(self.total, self.step + max(1, self.step // 3))

    def factor(self) -> float:
        """Of the peak learning rate, for this step."""
        warmup = min(1.0, (self.step + 1) / self.run.recipe.warmup)
        if self.total == 0 or self.step < self.decay_from:
            return warmup
        return warmup * (self.total - self.step) / (self.total - self.decay_from)

    def evaluation_due(self) -> bool:
        """Evenly through the run, and after the last step (called after ``step`` was raised)."""
        every = max(1, self.total // self.run.recipe.evaluations)
        return self.total > 0 and (self.step % every == 0 or self.step == self.total)


# ---- phase 1: the target -------------------------------------------------------------------------


@torch.no_grad()
def corpus_loss(run: Run, model: Decoder, stream: torch.Tensor, limit: int | None = None) -> float:
    """Mean next-token loss (nats a token) over consecutive windows of the stream."""
    length = min(run.recipe.lengths[0], stream.numel() - 1)
    count = (stream.numel() - 1) // length
    count = count if limit is None else min(count, limit)
    rows = stream[: count * length + 1].unfold(0, length + 1, length).long()
    total = 0.0
    for batch in rows.split(32):
        with run.autocast():
            logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        total += loss.item() * len(batch)
    return total / count


def train_target(run: Run, train: torch.Tensor, validation: torch.Tensor) -> Decoder:
    """Phase 1; returns the best averaged weights in float32."""
    recipe = run.recipe
    # A small model sees a small corpus dozens of times: without noise it would learn it by heart.
    dropout = 0.1 if run.dropout is None else run.dropout
    torch.manual_seed(run.seed)
    model = Decoder(recipe.target, recipe.vocab, dropout).to(run.device)
    forward = torch.compile(model) if run.compile else model
    optimizer = make_optimizer(model, recipe.target_lr, recipe.target_decay)
    average = Average(model, recipe.ema)
    schedule = Schedule(run, run.seconds * recipe.target_until, run.target_steps)
    generator = run.generator(1)
    begun, tokens, curve, stale = run.elapsed(), 0, [], 0
    while schedule.plan():
        length = recipe.lengths[schedule.step % len(recipe.lengths)]
        batch = windows(train, max(1, recipe.batch_tokens // length), length + 1, generator)
        with run.autocast():
            logits = forward(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        apply_step(model, optimizer, loss, recipe.target_lr * schedule.factor())
        average.update()
        tokens += batch.shape[0] * length
        schedule.step += 1
        if not schedule.evaluation_due():
            continue
        held_out = corpus_loss(run, average.model, validation, recipe.validation_windows)
        progress = held_out < -average.best_score - 0.001
        average.keep_if_best(-held_out, schedule.step)
        curve.append({"step": schedule.step, "train": loss.item(), "validation": held_out})
        run.say(
            f"target step {schedule.step}/{schedule.total}: loss {loss.item():.4f}, "
            f"validation {held_out:.4f}, epoch {tokens / train.numel():.1f}"
        )
        stale = 0 if progress else stale + 1
        if stale >= recipe.patience and schedule.step < schedule.decay_from:
            run.say("no more progress at this learning rate: decaying")
            schedule.decay_now()
    run.report["target_training"] = {
        "steps": schedule.step,
        "tokens": tokens,
        "epochs": tokens / train.numel(),
        "tokens_per_second": tokens / (run.elapsed() - begun),
        "dropout": dropout,
        "best_step": average.best_step,
        "validation_loss": -average.best_score,
        "curve": curve,
    }
    return average.best_model()


# ---- phase 2: text by the target -----------------------------------------------------------------


def gumbel(generator: torch.Generator, rows: int, vocab: int, device: torch.device) -> torch.Tensor:
    """Standard Gumbel noise, float32 [rows, vocab]: argmax(logits + noise) samples the softmax."""
    exponential = torch.empty(rows, vocab, device=device).exponential_(generator=generator)
    return -exponential.clamp_min_(1e-30).log_()


@torch.no_grad()
def continue_text(
    model: Decoder,
    prompts: torch.Tensor,  # [rows, prompt] int64
    count: int,
    sampled_steps: torch.Tensor,  # [rows]: so many first tokens at temperature 1, then greedy
    generator: torch.Generator | None,  # None: all rows are greedy
) -> torch.Tensor:
    """Prompts and ``count`` more tokens each, int64 [rows, prompt + count]; nothing stops early."""
    rows, prompt = prompts.shape
    text = F.pad(prompts, (0, count))
    cache = model.new_cache(rows, prompt + count)
    hidden = model.hidden(prompts, cache)
    for step in range(count):
        scores = model.logits(hidden[:, -1])
        if generator is not None:
            noise = gumbel(generator, rows, scores.shape[1], scores.device)
            scores += torch.where((step < sampled_steps)[:, None], noise, 0.0)
        text[:, prompt + step] = scores.argmax(dim=-1)
        if step + 1 < count:
            at = prompt + step
            hidden = model.hidden(text[:, at : at + 1], cache, at)
    return text


def sample_pool(run: Run, target: Decoder, train: torch.Tensor) -> torch.Tensor:
    """Phase 2: rows of target text, int32 [rows, pool_length].

    Prompts come from training files. A third of the rows is greedy, a third sampled, and a third
    sampled for a while and then greedy, which brings greedy text to places no file has.
    """
    recipe = run.recipe
    writer = frozen(target, torch.bfloat16 if run.device.type == "cuda" else torch.float32)
    generator = run.generator(2)
    rows, length, pool = recipe.pool_rows, recipe.pool_length, []
    third = torch.arange(rows, device=run.device) % 3
    for index in range(recipe.pool_batches):
        prompt = recipe.pool_prompts[index % len(recipe.pool_prompts)]
        count = length - prompt
        sampled = torch.tensor([0, count, min(64, count // 2)], device=run.device)[third]
        prompts = windows(train, rows, prompt, generator)
        pool.append(continue_text(writer, prompts, count, sampled, generator).int())
        if run.elapsed() > run.seconds * recipe.pool_until:
            break
    texts = torch.cat(pool)
    run.say(f"pool: {texts.shape[0]} texts, {texts.numel()} tokens")
    run.report["pool"] = {"texts": texts.shape[0], "tokens": texts.numel()}
    return texts


# ---- phase 3: the drafter ------------------------------------------------------------------------


def distillation_loss(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """KL(teacher || student) plus cross-entropy of the teacher's argmax; logits [N, vocab]."""
    student_log = F.log_softmax(student.float(), dim=-1)
    teacher_log = F.log_softmax(teacher.float(), dim=-1)
    divergence = F.kl_div(student_log, teacher_log, reduction="batchmean", log_target=True)
    return divergence + F.nll_loss(student_log, teacher.argmax(dim=-1))


def train_drafter(
    run: Run, target: Decoder, train: torch.Tensor, pool: torch.Tensor, check: Continuations
) -> Decoder:
    """Phase 3; ``check`` holds the target's texts on validation files, which choose the weights."""
    recipe = run.recipe
    torch.manual_seed(run.seed + 1)
    model = Decoder(recipe.drafter, recipe.vocab).to(run.device)
    forward = torch.compile(model) if run.compile else model
    optimizer = make_optimizer(model, recipe.drafter_lr, recipe.drafter_decay)
    average = Average(model, recipe.ema)
    schedule = Schedule(run, run.seconds * recipe.drafter_until, run.drafter_steps)
    generator, coin, curve = run.generator(3), random.Random(run.seed), []
    while schedule.plan():
        if coin.random() < recipe.pool_share:
            rows = max(1, recipe.batch_tokens // recipe.pool_length)
            picked = torch.randint(len(pool), (rows,), generator=generator, device=generator.device)
            batch = pool[picked].long()
        else:
            length = recipe.lengths[schedule.step % len(recipe.lengths)]
            batch = windows(train, max(1, recipe.batch_tokens // length), length, generator)
        with torch.no_grad():
            with run.autocast():
                hidden = target.hidden(batch)
            wanted = target.logits(hidden)
        with run.autocast():
            logits = forward(batch)
        loss = distillation_loss(logits.flatten(0, 1), wanted.flatten(0, 1))
        apply_step(model, optimizer, loss, recipe.drafter_lr * schedule.factor())
        average.update()
        schedule.step += 1
        if schedule.evaluation_due():
            greedy, sampled = (
                agreement(average.model, texts).double().mean().item()
                for texts in (check.greedy, check.sampled)
            )
            average.keep_if_best(greedy + sampled, schedule.step)
            curve.append({"step": schedule.step, "greedy": greedy, "temperature_1": sampled})
            run.say(
                f"drafter step {schedule.step}/{schedule.total}: loss {loss.item():.4f}, "
                f"validation agreement greedy {greedy:.4f}, temperature 1 {sampled:.4f}"
            )
    run.report["drafter_training"] = {
        "steps": schedule.step,
        "best_step": average.best_step,
        "curve": curve,
    }
    return average.best_model()


# ---- phase 4: acceptance -------------------------------------------------------------------------


@dataclass
class Texts:
    """What the target wrote after prompts: tokens [rows, prompt + count], and how it chose them."""

    tokens: torch.Tensor
    prompt: int
    noise: torch.Generator | None  # in the state before the first token; None: greedy


@dataclass
class Continuations:
    """The target's texts after the same prompts, greedy and at temperature 1."""

    greedy: Texts
    sampled: Texts


def cut_prompts(files: list[list[int]], count: int, length: int, seed: int) -> torch.Tensor:
    """Up to ``count`` pieces of ``length`` tokens that do not overlap, from all files in turn."""
    pieces = [
        file[start : start + length]
        for file in files
        for start in range(0, len(file) - length, length)
    ]
    if not pieces:
        raise SystemExit("the held-out files are too short for one prompt")
    return torch.tensor(random.Random(seed).sample(pieces, min(count, len(pieces))))


def write_continuations(
    run: Run, target: Decoder, files: list[list[int]], count: int
) -> Continuations:
    """The target's texts after prompts cut from ``files``, in float32."""
    recipe = run.recipe
    prompts = cut_prompts(files, count, recipe.prompt_length, run.seed).to(run.device)
    texts = []
    for steps, stream in ((0, None), (recipe.continuation, 4)):
        sampled = torch.full((len(prompts),), steps, device=run.device)
        generator, before = (
            (None, None) if stream is None else (run.generator(stream), run.generator(stream))
        )
        tokens = continue_text(target, prompts, recipe.continuation, sampled, generator)
        texts.append(Texts(tokens, recipe.prompt_length, before))
    return Continuations(*texts)


@torch.no_grad()
def agreement(drafter: Decoder, texts: Texts) -> torch.Tensor:
    """Whether the drafter, given the target's text so far, chooses its next token; bool [rows, n].

    At temperature 1 both add the same Gumbel noise to their logits, as the engine does.
    """
    rows = len(texts.tokens)
    count = texts.tokens.shape[1] - texts.prompt
    hidden = drafter.hidden(texts.tokens)[:, texts.prompt - 1 : -1]
    noise = None
    if texts.noise is not None:
        noise = torch.Generator(texts.tokens.device)
        noise.set_state(texts.noise.get_state())
    agreed = []
    for step in range(count):
        scores = drafter.logits(hidden[:, step])
        if noise is not None:
            scores += gumbel(noise, rows, scores.shape[1], scores.device)
        agreed.append(scores.argmax(dim=-1) == texts.tokens[:, texts.prompt + step])
    return torch.stack(agreed, dim=1)


def text_lengths(texts: Texts) -> list[int]:
    """Tokens of each continuation up to its end token, which counts."""
    lengths = []
    for row in texts.tokens[:, texts.prompt :].tolist():
        lengths.append(row.index(END_ID) + 1 if END_ID in row else len(row))
    return lengths


def is_repetitive(row: list[int], tail: int = 48, longest: int = 16) -> bool:
    """Whether the last tokens go round in a short circle, where drafting is easy."""
    end = row[-tail:]
    return any(end[period:] == end[:-period] for period in range(1, longest + 1))


def simulate_rounds(agreed: list[list[bool]], k: int) -> dict[str, Any]:
    """Speculative rounds of ``k`` drafts over texts; a first token comes from the prompt's pass.

    A draft counts at its place in the round if all before it were accepted; so the shares are
    conditional on being reached, and the drafter's context is the target's text.
    """
    reached, accepted, rounds, tokens = [0] * k, [0] * k, 0, 0
    for row in agreed:
        at = 1
        while at < len(row):
            rounds += 1
            place = 0
            while place < k and at + place < len(row):
                reached[place] += 1
                if not row[at + place]:
                    break
                accepted[place] += 1
                place += 1
            step = min(place + 1, len(row) - at)
            tokens += step
            at += step
    return {
        "k": k,
        "conditional": sum(accepted) / max(1, sum(reached)),
        "by_position": [a / max(1, r) for a, r in zip(accepted, reached, strict=True)],
        "tokens_per_round": tokens / max(1, rounds),
    }


def measure_acceptance(drafter: Decoder, texts: Texts) -> dict[str, Any]:
    """Agreement overall, without repetitive texts, and by place in rounds."""
    lengths = text_lengths(texts)
    rows = [r[:n] for r, n in zip(agreement(drafter, texts).tolist(), lengths, strict=True)]
    written = texts.tokens[:, texts.prompt :].tolist()
    varied = [row for row, text in zip(rows, written, strict=True) if not is_repetitive(text)]

    def share(some: list[list[bool]]) -> float | None:
        return sum(map(sum, some)) / sum(map(len, some)) if some else None

    return {
        "texts": len(rows),
        "tokens": sum(lengths),
        "agreement": share(rows),
        "repetitive_texts": 1 - len(varied) / len(rows),
        "agreement_in_other_texts": share(varied),
        "rounds": [simulate_rounds(rows, k) for k in ROUND_LENGTHS],
    }


# ---- files ---------------------------------------------------------------------------------------


def export_weights(model: Decoder) -> dict[str, torch.Tensor]:
    """Tensors by their Hugging Face names in bfloat16."""
    shape = model.shape
    sizes = [heads * shape.head_dim for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]
    weights = {"model.embed_tokens.weight": model.embedding, "model.norm.weight": model.norm}
    for index, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        prefix = f"model.layers.{index}."
        for leaf in ("weight", "bias"):
            parts = getattr(block.qkv, leaf).split(sizes)
            for name, part in zip("qkv", parts, strict=True):
                weights[f"{prefix}self_attn.{name}_proj.{leaf}"] = part
        gate, up = block.gate_up.weight.chunk(2)
        weights |= {
            f"{prefix}self_attn.o_proj.weight": block.output.weight,
            f"{prefix}mlp.gate_proj.weight": gate,
            f"{prefix}mlp.up_proj.weight": up,
            f"{prefix}mlp.down_proj.weight": block.down.weight,
            f"{prefix}input_layernorm.weight": block.attention_norm,
            f"{prefix}post_attention_layernorm.weight": block.mlp_norm,
        }
    return {
        name: value.detach().to("cpu", torch.bfloat16, copy=True).contiguous()
        for name, value in weights.items()
    }


def write_model(path: Path, model: Decoder, tokenizer: Tokenizer) -> int:
    """Write a model directory; returns the bytes of its weights."""
    path.mkdir(parents=True, exist_ok=True)
    shape = model.shape
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": model.embedding.shape[0],
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": NORM_EPS,
        "rope_theta": ROPE_THETA,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "bos_token_id": END_ID,
        "eos_token_id": END_ID,
        "pad_token_id": END_ID,
        "dtype": "bfloat16",
    }
    generation_config = {
        "bos_token_id": END_ID,
        "eos_token_id": [END_ID, tokenizer.token_to_id(IM_END)],
        "pad_token_id": END_ID,
    }
    tokenizer_config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "bos_token": None,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
        "chat_template": CHAT_TEMPLATE,
    }
    files = {
        "config.json": config,
        "generation_config.json": generation_config,
        "tokenizer_config.json": tokenizer_config,
    }
    for name, content in files.items():
        (path / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    tokenizer.save(str(path / "tokenizer.json"), pretty=False)
    weights = path / "model.safetensors"
    save_file(export_weights(model), weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors leaves it readable by its owner only
    return weights.stat().st_size


def check_files(run: Run, path: Path, model: Decoder, text: str) -> dict[str, Any]:
    """Load the directory with transformers on the CPU and compare logits and token ids."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    same = ids == Tokenizer.from_file(str(path / "tokenizer.json")).encode(text).ids
    same = same and tokenizer.decode(ids) == unicodedata.normalize("NFC", text)
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    batch = torch.tensor([ids[: run.recipe.lengths[0]]])
    with torch.no_grad():
        theirs = loaded(batch).logits
        ours = copy.deepcopy(model).cpu()(batch)
    difference = (theirs - ours).abs().max().item()
    run.say(f"transformers loads {path.name}: logits differ by {difference:.1e}, same ids: {same}")
    if not same or difference > 1e-2:
        run.say(f"WARNING: {path.name} does not read back as it was trained")
    return {"largest_logit_difference": difference, "same_token_ids": same}


CARD = """\
# The Paceline demo pair

Two language models that show speculative decoding on any machine: `demo` (the target) and
`demo-draft` (its drafter). They complete Python code as well as {total_mb:.1f} MB can; they are
made for demonstrations and tests, and answer no questions. Context: {positions} tokens.

| | target | drafter |
| --- | --- | --- |
| architecture | {target_shape} | {drafter_shape} |
| parameters | {target_parameters:,} | {drafter_parameters:,} |
| bfloat16 weights | {target_bytes:,} bytes | {drafter_bytes:,} bytes |
| multiplications of a one-row forward | {target_macs:,} | {drafter_macs:,} |

The drafter costs 1/{cost_ratio:.1f} of the target by multiplications. Both are Qwen2 models with
tied embeddings and share one byte-level BPE tokenizer of {vocab:,} entries.

## Data

The `.py` sources of the standard library of {source} (PSF-2.0; a few files carry notices of their
own), without third-party packages and generated character tables; {train_files} files,
{train_bytes:,} bytes, {train_tokens:,} tokens. Whole files were held out by a hash of their path:
{validation_files} chose among weights, {test_files} ({test_tokens:,} tokens) give the figures
below; `report.json` lists them.

## Training

`python tools/train_demo_pair.py` with torch {torch}, transformers {transformers} and tokenizers
{tokenizers} on {device}, seed {seed}, {minutes:.1f} minutes in all. The target saw {epochs:.1f}
epochs ({target_steps} steps), the drafter {drafter_steps} steps of distillation on the corpus and
on {pool_tokens:,} tokens of text by the target.

| loss of the target | nats a token | bits a byte |
| --- | --- | --- |
| validation files | {validation_loss:.3f} | |
| test files | {test_loss:.3f} | {test_bits:.3f} |

## Acceptance on the held-out test files

Prompts of {prompt} tokens, continued by the target for up to {continuation}; computed in float32
with the shipped weights. A share counts drafts whose predecessors in the round were all accepted.

| | greedy | temperature 1, shared noise |
| --- | --- | --- |
| next token agrees | {greedy[agreement]:.3f} | {sampled[agreement]:.3f} |
{round_rows}
| texts that end in a short repetition | {greedy[repetitive_texts]:.2f} | \
{sampled[repetitive_texts]:.2f} |
| next token agrees in the other texts | {greedy_other} | {sampled_other} |
"""


def describe(shape: Shape) -> str:
    return (
        f"{shape.layers} layers of {shape.hidden}, {shape.heads} heads, "
        f"{shape.kv_heads} KV heads, feed-forward {shape.inner}"
    )


def write_card(run: Run) -> None:
    """``MODEL_CARD.md`` from the report."""
    recipe, report = run.recipe, run.report
    corpus, acceptance = report["corpus"], report["acceptance"]
    greedy, sampled = acceptance["greedy"], acceptance["temperature_1"]
    rows = []
    for left, right in zip(greedy["rounds"], sampled["rounds"], strict=True):
        k = left["k"]
        for label, key in (("accepted share", "conditional"), ("tokens a round", None)):
            values = [r[key] if key else r["tokens_per_round"] for r in (left, right)]
            rows.append(f"| k = {k}: {label} | {values[0]:.3f} | {values[1]:.3f} |")
        if k == 5:
            places = [", ".join(f"{x:.2f}" for x in r["by_position"]) for r in (left, right)]
            rows.append(f"| k = {k}: accepted share by position | {places[0]} | {places[1]} |")

    def other(measured: dict[str, Any]) -> str:
        share = measured["agreement_in_other_texts"]
        return "none" if share is None else f"{share:.3f}"

    text = CARD.format(
        **report["sizes"],
        **report["versions"],
        vocab=recipe.vocab,
        positions=MAX_POSITIONS,
        prompt=recipe.prompt_length,
        continuation=recipe.continuation,
        target_shape=describe(recipe.target),
        drafter_shape=describe(recipe.drafter),
        train_files=corpus["train"]["files"],
        train_bytes=corpus["train"]["bytes"],
        train_tokens=corpus["train"]["tokens"],
        validation_files=corpus["validation"]["files"],
        test_files=corpus["test"]["files"],
        test_tokens=corpus["test"]["tokens"],
        seed=run.seed,
        minutes=report["minutes"],
        epochs=report["target_training"]["epochs"],
        target_steps=report["target_training"]["steps"],
        drafter_steps=report["drafter_training"]["steps"],
        pool_tokens=report["pool"]["tokens"],
        validation_loss=report["target_training"]["validation_loss"],
        test_loss=report["test_loss"],
        test_bits=report["test_bits_per_byte"],
        greedy=greedy,
        sampled=sampled,
        greedy_other=other(greedy),
        sampled_other=other(sampled),
        round_rows="\n".join(rows),
    )
    paragraphs = [
        part if part[0] in "#|" else textwrap.fill(part, 100, break_on_hyphens=False)
        for part in text.strip().split("\n\n")
    ]
    card = "\n\n".join(paragraphs) + "\n"
    (run.out / "MODEL_CARD.md").write_text(card, encoding="utf-8")


# ---- the run -------------------------------------------------------------------------------------


def record_sizes(run: Run) -> None:
    """Sizes and cost of the pair; stops a recipe that breaks the limits before it is trained."""
    recipe = run.recipe
    parameters = [
        sum(p.numel() for p in Decoder(shape, recipe.vocab).parameters())
        for shape in (recipe.target, recipe.drafter)
    ]
    macs = [s.matrix_weights(recipe.vocab) for s in (recipe.target, recipe.drafter)]
    ratio = macs[0] / macs[1]
    run.report["sizes"] = {
        "target_parameters": parameters[0],
        "drafter_parameters": parameters[1],
        "target_macs": macs[0],
        "drafter_macs": macs[1],
        "cost_ratio": ratio,
        "total_mb": 2 * sum(parameters) / 1e6,
    }
    run.say(f"sizes: {run.report['sizes']}")
    if 2 * sum(parameters) > MAX_PAIR_BYTES - 50_000:  # less the files' headers
        raise SystemExit(f"the pair would exceed {MAX_PAIR_BYTES} bytes")
    if ratio < MIN_COST_RATIO:
        raise SystemExit(f"the drafter costs more than 1/{MIN_COST_RATIO:g} of the target")


def record_versions(run: Run, source: str) -> None:
    import tokenizers
    import transformers

    cuda = run.device.type == "cuda"
    run.report["versions"] = {
        "source": source,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "device": f"one {torch.cuda.get_device_name()}" if cuda else "a CPU",
    }
    run.report["seed"] = run.seed
    run.report["recipe"] = dataclasses.asdict(run.recipe)


def evaluate(
    run: Run, target: Decoder, drafter: Decoder, test_files: list[list[int]]
) -> dict[str, Any]:
    """Phase 4: acceptance on the test files, printed and returned."""
    texts = write_continuations(run, target, test_files, run.recipe.test_prompts)
    measured = {
        "greedy": measure_acceptance(drafter, texts.greedy),
        "temperature_1": measure_acceptance(drafter, texts.sampled),
    }
    for name, result in measured.items():
        run.say(
            f"ACCEPTANCE {name}: next token {result['agreement']:.4f}; "
            f"repetitive texts {result['repetitive_texts']:.3f}, "
            f"elsewhere {result['agreement_in_other_texts']}"
        )
        for entry in result["rounds"]:
            places = " ".join(f"{share:.3f}" for share in entry["by_position"])
            run.say(
                f"  k={entry['k']}: conditional {entry['conditional']:.4f}, "
                f"{entry['tokens_per_round']:.3f} tokens a round, by position {places}"
            )
    return measured


def show_sample(run: Run, target: Decoder, tokenizer: Tokenizer) -> None:
    """Print one greedy completion, for the eye."""
    prompt = '<|endoftext|>"""Count words."""\n\nimport re\n\n\ndef count_words(text):\n'
    ids = torch.tensor([tokenizer.encode(prompt).ids], device=run.device)
    steps = torch.zeros(1, device=run.device)
    text = continue_text(target, ids, run.recipe.continuation, steps, None)[0]
    run.say("a greedy completion:\n" + tokenizer.decode(text.tolist(), skip_special_tokens=True))


def train_pair(run: Run, roots: list[Path]) -> None:
    """All phases; each writes what it made before the next begins."""
    record_sizes(run)
    corpus = load_corpus(run, roots)
    tokenizer = train_tokenizer(corpus.texts("train"), run.recipe.vocab)
    if tokenizer.get_vocab_size() != run.recipe.vocab:
        raise SystemExit(f"the corpus gives only {tokenizer.get_vocab_size()} tokens")
    files = {part: encode_part(run, corpus, part, tokenizer) for part in corpus.parts}
    streams = {part: pack(files[part], run.seed, run.device) for part in files}
    run.say("tokens: " + ", ".join(f"{part} {len(s)}" for part, s in streams.items()))

    target = rounded(train_target(run, streams["train"], streams["validation"]))
    run.report["sizes"]["target_bytes"] = write_model(run.out / "demo", target, tokenizer)
    nats = run.report["test_loss"] = corpus_loss(run, target, streams["test"])
    per_byte = corpus.bytes("test") / len(streams["test"])
    run.report["test_bits_per_byte"] = nats / math.log(2) / per_byte
    run.say(f"TARGET: test loss {nats:.4f}, {run.report['test_bits_per_byte']:.4f} bits a byte")
    show_sample(run, target, tokenizer)
    run.save_report()

    pool = sample_pool(run, target, streams["train"])
    check = write_continuations(run, target, files["validation"], run.recipe.validation_prompts)
    drafter = rounded(train_drafter(run, target, streams["train"], pool, check))
    run.report["sizes"]["drafter_bytes"] = write_model(run.out / "demo-draft", drafter, tokenizer)
    run.save_report()

    run.report["acceptance"] = evaluate(run, target, drafter, files["test"])
    total = run.report["sizes"]["target_bytes"] + run.report["sizes"]["drafter_bytes"]
    run.say(f"weights of the pair: {total} bytes")
    assert total <= MAX_PAIR_BYTES, f"{total} bytes exceed {MAX_PAIR_BYTES}"
    run.report["minutes"] = run.elapsed() / 60
    run.save_report()
    write_card(run)
    text = corpus.texts("test")[0][:6000]
    run.report["transformers_check"] = {
        name: check_files(run, run.out / name, model, text)
        for name, model in (("demo", target), ("demo-draft", drafter))
    }
    run.save_report()
    run.say(f"done: {run.out}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="where the pair is written")
    parser.add_argument("--minutes", type=float, default=8.0, help="time for everything")
    parser.add_argument(
        "--source",
        type=Path,
        action="append",
        help="a standard library's directory, repeatable (default: this interpreter's)",
    )
    parser.add_argument("--source-name", help="what the card calls it, such as 'CPython 3.13.1'")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dropout", type=float, help="of the target, 0.1 unless given")
    parser.add_argument("--target-lr", type=float, help="peak learning rate of the target")
    parser.add_argument("--target-decay", type=float, help="weight decay of the target")
    parser.add_argument("--target-steps", type=int, help="instead of as many as time allows")
    parser.add_argument("--drafter-steps", type=int, help="instead of as many as time allows")
    parser.add_argument("--compile", action="store_true", help="torch.compile the training steps")
    parser.add_argument("--toy", action="store_true", help="tiny sizes, for a test of the path")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    recipe = TOY if arguments.toy else Recipe()
    chosen = {"target_lr": arguments.target_lr, "target_decay": arguments.target_decay}
    recipe = dataclasses.replace(recipe, **{k: v for k, v in chosen.items() if v is not None})
    if arguments.source and not arguments.source_name:
        raise SystemExit("--source needs --source-name: the card must say what was trained on")
    roots = arguments.source or [Path(sysconfig.get_paths()["stdlib"])]
    run = Run(
        recipe=recipe,
        out=arguments.out,
        seed=arguments.seed,
        seconds=60 * arguments.minutes,
        device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        compile=arguments.compile,
        dropout=arguments.dropout,
        target_steps=arguments.target_steps or (30 if arguments.toy else None),
        drafter_steps=arguments.drafter_steps or (30 if arguments.toy else None),
    )
    run.out.mkdir(parents=True, exist_ok=True)
    record_versions(run, arguments.source_name or f"CPython {platform.python_version()}")
    run.say(f"{run.report['versions']}, Python {sys.version.split()[0]}")
    train_pair(run, roots)


if __name__ == "__main__":
    main()
