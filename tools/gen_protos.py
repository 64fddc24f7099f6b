"""Generate `octavo/v1` from `proto/octavo/v1`, or check that it is what it should be.

python tools/gen_protos.py          write the stubs
python tools/gen_protos.py --check  exit 1 and name each stub that differs
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTO_DIR = ROOT / "proto"
STUB_DIR = ROOT / "octavo" / "v1"


def generate(out_dir: Path) -> None:
    """Write the stubs of every .proto under `out_dir`. Raises SystemExit when protoc fails."""
    sources = sorted(str(path) for path in (PROTO_DIR / "octavo" / "v1").glob("*.proto"))
    code = protoc.main(
        [
            "protoc",
            f"-I{PROTO_DIR}",
            f"--python_out={out_dir}",
            f"--pyi_out={out_dir}",
            f"--grpc_python_out={out_dir}",
            *sources,
        ]
    )
    if code:
        raise SystemExit(f"protoc failed with exit code {code}")


def stubs_under(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*_pb2*.py*"))}


def check() -> int:
    """Regenerate aside and compare byte by byte; 0 when nothing differs."""
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh = stubs_under(Path(scratch) / "octavo" / "v1")
    committed = stubs_under(STUB_DIR)
    stale = sorted(
        name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name)
    )
    for name in stale:
        print(f"octavo/v1/{name} is not what proto/ generates: run python tools/gen_protos.py")
    return 1 if stale else 0


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        sys.exit(check())
    generate(ROOT)
