"""C++ built on the machine that runs it, for the processor it has.

The compiler is asked once per source, flags and processor; the library is kept in the user's
cache. There is no wheel to match and no dispatch at run time: what the compiler knows of this
processor is what is used, and any processor that it can compile for will do.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import platformdirs
import structlog

from model_worker.errors import NativeBuildError

log = structlog.get_logger()

FOLDER = Path(__file__).parent
# -ffp-contract is GCC's default made plain: the same binary gives the same bits everywhere in it.
FLAGS = (
    *("-O3", "-march=native", "-std=c++17", "-pthread", "-fPIC", "-shared"),
    *("-fno-math-errno", "-ffp-contract=fast", "-Wall", "-Wextra"),
)
BUILD_TIMEOUT_S = 300


@cache
def load_library() -> ctypes.CDLL:
    """The built library; built first when this machine has not seen it.

    Raises NativeBuildError.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    path = _cached_path(compiler or "")
    if not path.is_file():
        if compiler is None:
            raise NativeBuildError(
                f"no C++ compiler: there is no {os.environ.get('CXX', 'g++')} on the PATH. Install"
                " one (apt-get install g++, dnf install gcc-c++) or name one in CXX;"
                " --attention reference --batch-invariant off do without"
            )
        _build(compiler, path)
    return ctypes.CDLL(str(path))


def _cached_path(compiler: str) -> Path:
    key = hashlib.blake2b(digest_size=8)
    texts = (path.read_text() for path in sorted((*FOLDER.glob("*.cpp"), *FOLDER.glob("*.h"))))
    for part in (*texts, *FLAGS, compiler, _processor()):
        key.update(part.encode() + b"\0")
    root = os.environ.get("OCTAVO_CACHE") or platformdirs.user_cache_dir("octavo")
    return Path(root) / "native" / f"octavo-{key.hexdigest()}.so"


def _processor() -> str:
    """What the compiler would look at: the processor's features where the system tells them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _build(compiler: str, path: Path) -> None:
    """Compile aside and rename, so that two processes at once leave nothing half."""
    log.info("compiling the kernels, once for this processor", compiler=compiler)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        built = Path(scratch) / path.name
        command = [compiler, *FLAGS, "-o", str(built), *map(str, sorted(FOLDER.glob("*.cpp")))]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise NativeBuildError(
                f"{compiler} took more than {BUILD_TIMEOUT_S} s for {FOLDER.name}/*.cpp"
            ) from error
        if done.returncode:
            raise NativeBuildError(
                f"{compiler} refused {FOLDER.name}/*.cpp; --attention reference --batch-invariant"
                f" off do without:\n"
                f"{done.stderr[-2000:]}"
            )
        built.replace(path)
