"""Which models take the latency path, and layouts that cover every weight once."""

from __future__ import annotations

import dataclasses
import json
import re
from importlib import resources

import pytest

from latency.latency_models import H200, SMALL, planned, small_arch
from paceline.config import ModelArch
from paceline.latency import forward
from paceline.latency.build import SOURCES
from paceline.latency.plan import MAX_TOKENS, CardLimits, Refusal, plan
from paceline.models.hf_config import parse_hf_config
from paceline.models.weights import count_parameters
from paceline.synth.shapes import SHAPES

PUBLISHED = [
    name
    for name in SHAPES
    if name.startswith(("qwen2.5", "qwen3", "llama")) and name != "qwen2.5-32b"
]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes_need_next_to_no_padding(name: str) -> None:
    arch = SHAPES[name].arch()
    found = planned(arch, arch.max_position_embeddings + 32)
    even = name == "qwen2.5-0.5b"  # its 896 hidden units are 112 times 8
    assert found.blocks == (112 if even else 128)
    weights = count_parameters(arch)
    if not arch.tie_word_embeddings:
        weights -= arch.vocab_size * arch.hidden_size  # the embedding stays as it is
    weights -= (2 * arch.num_layers + 1) * arch.hidden_size  # norms
    if arch.qkv_bias:
        weights -= arch.num_layers * found.qkv_dim
    if arch.qk_norm:
        weights -= arch.num_layers * 2 * arch.head_dim
    whole_chunks = found.blocks * found.warps * 2048
    padded = 2 * weights * (1.02 if even else 1.0)
    assert 2 * weights <= found.packed_bytes <= padded + whole_chunks
    assert found.token_counts == (*range(1, 9), 10, 12, 14, 16)
    for tokens in found.token_counts:
        assert found.shared_bytes(tokens) <= H200.shared_memory
        assert found.depth(tokens) >= 4


@pytest.mark.parametrize("name", ["demo", "demo-draft"])
def test_demo_pair_fits(name: str) -> None:
    config = json.loads((resources.files("paceline.assets") / name / "config.json").read_text())
    assert planned(parse_hf_config(config, name)).packed_bytes < 32e6


@pytest.mark.parametrize("arch", SMALL.values(), ids=SMALL.keys())
def test_slices_and_rows_cover_everything_once(arch: ModelArch) -> None:
    found = planned(arch)
    for _, inputs, _ in found.products():
        covered = [i for first, count in found.slices(inputs) for i in range(first, first + count)]
        assert covered == list(range(inputs // 32))
    rows = [row for block in found.qkv_rows() for row in block]
    assert {len(block) for block in found.qkv_rows()} == {found.qkv_outputs}
    assert sorted(row for row in rows if row >= 0) == list(range(found.qkv_dim))


def test_bits_depend_on_nothing_that_differs_between_numbers_of_tokens() -> None:
    found = planned(SHAPES["qwen2.5-7b"].arch())
    options = [found.options(tokens) for tokens in range(1, MAX_TOKENS + 1)]
    differing = {name for name in options[0] if len({str(o[name]) for o in options}) > 1}
    assert "TOKENS" in differing
    assert differing <= {"TOKENS", "GROUP", "DEPTH", "SMEM"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"capability": (8, 9)}, "compute capability 9.0, this is 8.9"),
        ({"num_sms": 16}, "16 multiprocessors"),
        ({"shared_memory": 48_000}, "48000 bytes of shared memory"),
        ({"dtype": "float16"}, "not in float16"),
        ({"tp_size": 2}, "not on 2"),
        ({"block_size": 8}, "block_size (8)"),
        ({"sliding_window": (None, 64)}, "sliding-window"),
        ({"o_bias": True}, "biases"),
        ({"head_dim": 80}, "head_dim (80)"),
        ({"qk_norm": True}, "head norms"),
        ({"num_attention_heads": 9}, "9 query heads"),
        ({"hidden_size": 8192}, "8192 inputs exceed 5120"),
        ({"hidden_size": 168}, "not multiples of 32"),
    ],
)
def test_refusals_say_why(change: dict[str, object], words: str) -> None:
    arch, card = small_arch(), H200
    how: dict[str, object] = {"dtype": "bfloat16", "block_size": 16, "max_positions": 512}
    for name, value in change.items():
        if name in how or name == "tp_size":
            how[name] = value
        elif name in CardLimits.__dataclass_fields__:
            card = dataclasses.replace(card, **{name: value})  # type: ignore[arg-type]
        else:
            arch = dataclasses.replace(arch, **{name: value})  # type: ignore[arg-type]
    found = plan(arch, card, **how)  # type: ignore[arg-type]
    assert isinstance(found, Refusal)
    assert words in found.reason


def test_parameters_are_laid_out_as_in_the_source() -> None:
    source = (SOURCES / "common.cuh").read_text()
    body = source.split("struct Params {")[1].split("};")[0]
    body = re.sub(r"//[^\n]*", "", body)
    names = [
        name.strip(" *\n")
        for declaration in body.split(";")
        if declaration.strip()
        for name in re.sub(r"^\s*(const )?\w+\s?", "", declaration).split(",")
    ]
    assert names == [field[0] for field in forward._Params._fields_]


def test_every_option_is_used_by_the_source() -> None:
    sources = "".join(file.read_text() for file in SOURCES.glob("*.cu*"))
    code = re.sub(r"//[^\n]*", "", sources)
    for name in planned(small_arch()).options(1):
        assert re.search(rf"\b{name}\b", code), name
