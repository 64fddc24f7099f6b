"""The C++ linear layer: torch's within rounding, and the same bits however many rows there are."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model_worker.linear import DTYPES, NativeLinear

# Of bfloat16 one rounding of the result, 2^-9 of it; of float32 some of each step of the sum.
RTOL = {torch.float32: 1e-5, torch.bfloat16: 2**-8}


def make_linear(
    in_features: int, out_features: int, dtype: torch.dtype, bias: bool = True, seed: int = 0
) -> torch.nn.Linear:
    torch.manual_seed(seed)
    return torch.nn.Linear(in_features, out_features, bias=bias).to(dtype)


def exact(linear: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """In float64, which is as good as exact here."""
    bias = None if linear.bias is None else linear.bias.double()
    return torch.nn.functional.linear(x.double(), linear.weight.double(), bias)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=RTOL[dtype], atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    in_features=st.sampled_from([1, 2, 15, 31, 32, 33, 64, 100, 576]),
    out_features=st.sampled_from([1, 15, 31, 32, 33, 47, 48, 49, 97, 200]),
    num_rows=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
    bias=st.booleans(),
    num_threads=st.integers(1, 3),
    seed=st.integers(0, 9),
)
@torch.inference_mode()
def test_b28_equals_torch_and_each_row_has_the_bits_it_has_alone(
    in_features: int,
    out_features: int,
    num_rows: int,
    dtype: torch.dtype,
    bias: bool,
    num_threads: int,
    seed: int,
) -> None:
    linear = make_linear(in_features, out_features, dtype, bias, seed)
    native = NativeLinear(linear)
    x = torch.randn(num_rows, in_features).to(dtype)
    alone = torch.cat([native(x[i : i + 1]) for i in range(num_rows)])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads)
        together = native(x)
    finally:
        torch.set_num_threads(before)
    assert together.shape == (num_rows, out_features)
    assert together.dtype == dtype
    assert_close(together, exact(linear, x), dtype)
    assert torch.equal(together, alone)


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_rows_may_lie_apart_or_across_and_have_more_dimensions(dtype: torch.dtype) -> None:
    linear = make_linear(64, 48, dtype)
    native = NativeLinear(linear)
    wide = torch.randn(10, 200).to(dtype)
    apart = wide[::2, 70:134]
    across = torch.randn(64, 10).to(dtype).T
    assert apart.stride() == (400, 1)
    assert across.stride(0) == 1
    for x in (apart, across):
        assert torch.equal(native(x), native(x.contiguous()))
        assert_close(native(x), exact(linear, x), dtype)
    deep = torch.randn(2, 3, 5, 64).to(dtype)
    assert torch.equal(native(deep), native(deep.view(30, 64)).view(2, 3, 5, 48))
    assert native(deep[:0]).shape == (0, 3, 5, 48)


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_several_side_by_side_have_the_bits_that_each_has(dtype: torch.dtype) -> None:
    linears = [make_linear(100, n, dtype, bias=n != 7, seed=n) for n in (50, 7, 33)]
    x = torch.randn(9, 100).to(dtype)
    expected = torch.cat([NativeLinear(linear)(x) for linear in linears], dim=-1)
    assert torch.equal(NativeLinear(*linears)(x), expected)


@torch.inference_mode()
def test_inputs_of_another_dtype_are_converted_and_back() -> None:
    native = NativeLinear(make_linear(64, 48, torch.bfloat16))
    x = torch.randn(3, 64)
    assert native(x).dtype == torch.float32
    assert torch.equal(native(x), native(x.bfloat16()).float())


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_infinity_and_nan_stay_in_their_row(dtype: torch.dtype) -> None:
    native = NativeLinear(make_linear(64, 48, dtype))
    x = torch.randn(20, 64).to(dtype)
    expected = native(x)
    x[3, 5], x[17, 0] = torch.nan, torch.inf
    actual = native(x)
    assert actual[3].isnan().all()
    assert (~actual[17].isfinite()).all()
    others = [i for i in range(20) if i not in (3, 17)]
    assert torch.equal(actual[others], expected[others])


def test_the_plain_weight_is_not_kept() -> None:
    linear = make_linear(640, 480, torch.float32)
    plain = weakref.ref(linear.weight)
    native = NativeLinear(linear)
    del linear
    gc.collect()
    assert plain() is None
    assert native(torch.ones(1, 640)).shape == (1, 480)
