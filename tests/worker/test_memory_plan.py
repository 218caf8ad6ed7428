"""The arithmetic of a GPU's memory: what is left for KV, and what would fit where that is short."""

from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import CapacityError
from paceline.worker.memory_plan import GIB, Limits, MemoryParts, count_blocks, out_of_memory

MIB = 1024**2
# A 24 GiB card with a 7B model and a 0.5B drafter in bfloat16.
PARTS = MemoryParts(
    total=24 * GIB,
    elsewhere=GIB // 2,
    target=int(14.2 * GIB),
    drafter=int(0.93 * GIB),
    state=200 * MIB,
    activations=1200 * MIB,
    graphs=600 * MIB,
    spare=512 * MIB,
)
LIMITS = Limits(
    gpu_memory_utilization=0.9,
    max_model_len=8192,
    max_num_batched_tokens=8192,
    max_num_seqs=256,
    block_size=16,
)
BLOCK = 16 * 68 * 1024


def test_what_is_left_becomes_blocks() -> None:
    count = count_blocks(PARTS, LIMITS, BLOCK)
    pool = (count + 1) * BLOCK
    room = int(0.9 * PARTS.total)
    assert 0 <= room - PARTS.used - pool < BLOCK
    assert PARTS.used == sum(
        getattr(PARTS, f.name) for f in dataclasses.fields(PARTS) if f.name != "total"
    )
    # A sequence of full length fits exactly, one token more does not.
    longest = dataclasses.replace(LIMITS, max_model_len=count * 16 + 1)
    assert count_blocks(PARTS, longest, BLOCK) == count
    with pytest.raises(CapacityError, match=rf"lower max_model_len to {count * 16 + 1} or"):
        count_blocks(PARTS, dataclasses.replace(longest, max_model_len=count * 16 + 2), BLOCK)


def test_the_message_names_every_part() -> None:
    limits = dataclasses.replace(LIMITS, max_model_len=131072)
    with pytest.raises(CapacityError) as caught:
        count_blocks(PARTS, limits, BLOCK)
    text = str(caught.value)
    for part in (
        "fewer than one sequence of max_model_len (131072)",
        "21.60 of 24.00 may be used",
        "gpu_memory_utilization=0.9",
        "target weights 14.20",
        "drafter weights 0.93",
        "activations 1.17",
        "graphs and logits 0.59",
        "rows and scratch 0.20",
        "other processes and driver 0.50",
        "spare 0.50",
    ):
        assert part in text


def test_weights_that_do_not_fit() -> None:
    big = dataclasses.replace(PARTS, target=30 * GIB, drafter=0)
    with pytest.raises(CapacityError, match=r"^the weights do not fit the GPU") as caught:
        count_blocks(big, LIMITS, BLOCK)
    assert "drafter" not in str(caught.value)
    assert re.search(
        r"hint: choose a model that is at least 11.\d\d GiB smaller", str(caught.value)
    )


def test_full_without_a_pool() -> None:
    wide = dataclasses.replace(PARTS, activations=8 * GIB)
    with pytest.raises(CapacityError, match=r"^the GPU's memory leaves no room") as found:
        count_blocks(wide, LIMITS, BLOCK)
    assert "lower max_num_batched_tokens to" in str(found.value)
    assert "max_model_len" not in str(found.value)


def test_a_card_that_others_use() -> None:
    shared = dataclasses.replace(PARTS, elsewhere=9 * GIB)
    with pytest.raises(CapacityError, match="end other processes on the GPU"):
        count_blocks(shared, LIMITS, BLOCK)


SETTINGS = {
    "max_model_len": r"lower max_model_len to (\d+)",
    "max_num_batched_tokens": r"lower max_num_batched_tokens to (\d+)",
    "max_num_seqs": r"lower max_num_seqs to (\d+)",
    "gpu_memory_utilization": r"raise gpu_memory_utilization to ([\d.]+)",
}


@given(
    target=st.integers(1, 22 * 1024),
    drafter=st.integers(0, 2048),
    state=st.integers(0, 4096),
    activations=st.integers(1, 8192),
    graphs=st.integers(0, 2048),
    length=st.integers(2, 200_000),
    share=st.sampled_from([0.3, 0.9, 1.0]),
)
def test_every_way_out_is_enough(
    target: int,
    drafter: int,
    state: int,
    activations: int,
    graphs: int,
    length: int,
    share: float,
) -> None:
    parts = MemoryParts(
        24 * GIB,
        GIB // 2,
        target * MIB,
        drafter * MIB,
        state * MIB,
        activations * MIB,
        graphs * MIB,
    )
    limits = dataclasses.replace(LIMITS, max_model_len=length, gpu_memory_utilization=share)
    try:
        assert count_blocks(parts, limits, BLOCK) >= limits.blocks_needed
    except CapacityError as error:
        text = str(error)
    else:
        return
    assert "hint: " in text
    for name, pattern in SETTINGS.items():
        found = re.search(pattern, text)
        if found is None:
            continue
        value = float(found[1])
        ratio = value / getattr(limits, name)
        changed = dataclasses.replace(
            limits, **{name: value if name == "gpu_memory_utilization" else int(value)}
        )
        less = parts
        if name == "max_num_batched_tokens":
            less = dataclasses.replace(parts, activations=int(parts.activations * ratio))
        elif name == "max_num_seqs":
            less = dataclasses.replace(parts, state=int(parts.state * ratio))
        assert count_blocks(less, changed, BLOCK) >= changed.blocks_needed
    if "leave out the drafter" in text:
        assert count_blocks(dataclasses.replace(parts, drafter=0), limits, BLOCK)


def test_out_of_memory() -> None:
    error = out_of_memory("loading x", "choose less", GIB // 4, 24 * GIB, 20 * GIB)
    assert isinstance(error, CapacityError)
    assert str(error) == (
        "out of GPU memory while loading x: this process holds 20.00 GiB, 0.25 of 24.00 GiB are "
        "free. hint: choose less"
    )
