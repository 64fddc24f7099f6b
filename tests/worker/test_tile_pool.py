"""The threads that share out an operation's tiles: `model_worker/native/tile_pool.h`."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from model_worker import native

SOURCE = Path(__file__).with_name("tile_pool_stress.cpp")


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_every_tile_is_done_once_and_in_time(tmp_path, sanitizer):
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    assert compiler is not None, "the kernels need a compiler as well"
    program = tmp_path / "stress"
    subprocess.run(
        [
            *(compiler, "-std=c++17", "-O1", "-g", "-pthread", f"-fsanitize={sanitizer}"),
            *("-Wall", "-Wextra", "-I", str(native.FOLDER), "-o", str(program), str(SOURCE)),
        ],
        check=True,
        timeout=120,
    )
    # Where the system chooses addresses that the sanitizer does not expect, it gives up.
    fixed = ["setarch", "-R"] if shutil.which("setarch") else []
    done = subprocess.run(
        [*fixed, str(program)], check=False, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
