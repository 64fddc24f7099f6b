"""The C++ built for a processor with neither AVX-512 nor AMX: as right, and as invariant."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from model_worker import linear, native, native_modules
from model_worker.attention import LayerSpec
from model_worker.attention.cpu import CpuAttention
from model_worker.attention.reference import ReferenceAttention
from model_worker.linear import DTYPES, NativeLinear
from tests.attention.cases import build, draw_tokens

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="builds for x86-64-v3")

CACHES = (native.load_library, linear._library, native_modules._library)


@pytest.fixture(scope="module", autouse=True)
def built_for_less(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder: Path = tmp_path_factory.mktemp("native")
    flags = tuple(flag.replace("-march=native", "-march=x86-64-v3") for flag in native.FLAGS)
    assert flags != native.FLAGS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "FLAGS", flags)
        patch.setenv("OCTAVO_CACHE", str(folder))
        for cached in CACHES:
            cached.cache_clear()
        yield
    assert list(folder.glob("native/*.so"))
    for cached in CACHES:
        cached.cache_clear()


def test_there_is_no_amx_in_it() -> None:
    assert native.load_library().octavo_has_amx() == 0


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_b28_linear_layers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plain = torch.nn.Linear(100, 70).to(dtype)
    layer = NativeLinear(plain)
    x = torch.randn(19, 100).to(dtype)
    together = layer(x)
    assert torch.equal(together, torch.cat([layer(x[i : i + 1]) for i in range(19)]))
    tolerance = 1e-5 if dtype is torch.float32 else 2**-8
    torch.testing.assert_close(together, plain(x), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_b28_attention(dtype: torch.dtype) -> None:
    spec = LayerSpec(6, 2, 80, 80, 80**-0.5)
    tokens = draw_tokens(spec, 300, dtype, 0)
    case = build(spec, [(tokens, 300, 37), (draw_tokens(spec, 20, dtype, 1), 20, 1)], 16)
    actual, _ = case.run(CpuAttention())
    expected, _ = case.run(ReferenceAttention())
    tolerance = 2e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    alone, _ = build(spec, [(tokens, 300, 1)], 8).run(CpuAttention())
    assert torch.equal(actual[36], alone[0])
