"""The C++ attention: right, blind to what it must not see, and the same bits in any company."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model_worker.attention import LayerSpec, create_backend
from model_worker.attention.cpu import HEAD_DIMS
from model_worker.errors import UnsupportedModelError
from tests.attention.cases import Case, Tokens, build, draw_tokens

CPU = create_backend("cpu")
REFERENCE = create_backend("reference")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def spec_of(
    heads: int = 6, kv_heads: int = 2, head_dim: int = 64, window: int | None = None, cap: float = 0
) -> LayerSpec:
    return LayerSpec(heads, kv_heads, head_dim, head_dim, head_dim**-0.5, window, cap or None)


def assert_same(case: Case) -> None:
    """Output and pool equal the reference's; NaN anywhere it may not be read shows."""
    expected, expected_layer = case.run(REFERENCE)
    actual, layer = case.run(CPU)
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(
        actual, expected, rtol=TOLERANCE[actual.dtype], atol=TOLERANCE[actual.dtype]
    )
    for mine, theirs in ((layer.keys, expected_layer.keys), (layer.values, expected_layer.values)):
        assert torch.equal(mine.nan_to_num(7.0), theirs.nan_to_num(7.0))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_b46_equals_the_reference(data: st.DataObject) -> None:
    kv_heads = data.draw(st.sampled_from([1, 2, 3]))
    spec = spec_of(
        kv_heads * data.draw(st.integers(1, 9)),
        kv_heads,
        data.draw(st.sampled_from(HEAD_DIMS)),
        data.draw(st.sampled_from([None, None, 1, 15, 16, 17, 255, 256, 257])),
        data.draw(st.sampled_from([0, 0, 30.0])),
    )
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    sequences = []
    for seed in range(data.draw(st.integers(1, 4))):
        context = data.draw(st.integers(1, 700))
        rows = data.draw(st.integers(1, min(context, 40)))
        sequences.append((draw_tokens(spec, context, dtype, seed), context, rows))
    assert_same(build(spec, sequences, data.draw(st.sampled_from([1, 8, 16, 24, 128]))))


@pytest.mark.parametrize("length", [1, 15, 16, 17, 255, 256, 257, 511, 512, 513])
def test_lengths_around_every_border(length: int) -> None:
    spec = spec_of()
    tokens = draw_tokens(spec, length, torch.float32, 3)
    assert_same(build(spec, [(tokens, length, 1)], 16))
    assert_same(build(spec, [(tokens, length, min(length, 20))], 16))


def decode_bits(
    spec: LayerSpec, tokens: Tokens, position: int, block_size: int = 16
) -> torch.Tensor:
    """The output of one position, computed alone as a decode."""
    output, _ = build(spec, [(tokens, position + 1, 1)], block_size, seed=position).run(CPU)
    return output[0]


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_b28_one_position_has_the_same_bits_in_any_company(
    window: int | None, dtype: torch.dtype
) -> None:
    """Alone, in a batch, in a prefill chunk of any length, in blocks of any size."""
    spec = spec_of(window=window)
    tokens = draw_tokens(spec, 600, dtype, 1)
    others = [(draw_tokens(spec, 90 + i, dtype, 10 + i), 90 + i, 1 + i) for i in range(3)]
    for position in (0, 15, 16, 255, 256, 300, 512, 599):
        alone = decode_bits(spec, tokens, position)
        for block_size in (8, 128):
            assert torch.equal(decode_bits(spec, tokens, position, block_size), alone)
        in_batch, _ = build(spec, [*others, (tokens, position + 1, 1)], 16).run(CPU)
        assert torch.equal(in_batch[-1], alone)
        for rows in {min(position + 1, n) for n in (2, 17, 64, 600)}:
            chunk, _ = build(spec, [(tokens, position + 1, rows), *others], 16).run(CPU)
            assert torch.equal(chunk[rows - 1], alone), (position, rows)


def test_b28_the_number_of_threads_changes_no_bit() -> None:
    spec = spec_of(heads=9, kv_heads=3)
    case = build(spec, [(draw_tokens(spec, 700, torch.float32, i), 700, 1) for i in range(3)], 16)
    threads = torch.get_num_threads()
    outputs = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            outputs.append(case.run(CPU)[0])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(output, outputs[0]) for output in outputs)


def test_scores_far_apart_do_not_overflow() -> None:
    spec = LayerSpec(2, 1, 64, 64, 30.0)
    tokens = draw_tokens(spec, 300, torch.float32, 5)
    assert_same(build(spec, [(tokens, 300, 3)], 16))


def test_strided_rows_as_a_model_hands_them_over() -> None:
    """Heads first in memory, as transformers lays them out."""
    spec = spec_of()
    case = build(spec, [(draw_tokens(spec, 40, torch.float32, 2), 40, 12)], 16)
    strided = Case(
        case.layer,
        case.batch,
        *(
            rows.transpose(0, 1).contiguous().transpose(0, 1)
            for rows in (case.query, case.key, case.value)
        ),
    )
    assert not strided.query.is_contiguous()
    assert torch.equal(strided.run(CPU)[0], case.run(CPU)[0])


def test_b48_what_it_cannot_compute_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="no heads of 72"):
        CPU.check(spec_of(head_dim=72), 16, torch.float32)
    with pytest.raises(UnsupportedModelError, match="float16"):
        CPU.check(spec_of(), 16, torch.float16)
    with pytest.raises(UnsupportedModelError, match="5 query heads"):
        CPU.check(spec_of(heads=5), 16, torch.float32)
