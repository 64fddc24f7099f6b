"""vLLM's side of `benchmarks.kvmem`: `vllm_side.py` in a process of vLLM's interpreter."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import kvmem_workload as w

SCRIPT = Path(__file__).with_name("vllm_side.py")
# Importing vLLM takes most of the first, a pool of 1M blocks of the others.
ANSWER_TIMEOUT_S = 300
MAX_LINE_BYTES = 64 * 1024 * 1024
STOP_TIMEOUT_S = 10


class VllmSide:
    """Speaks to the script, a line each way."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def command(self, name: str, **arguments: Any) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps({"command": name, **arguments}).encode() + b"\n")
        await stdin.drain()
        line = await asyncio.wait_for(stdout.readline(), ANSWER_TIMEOUT_S)
        if not line:
            raise RuntimeError(f"vLLM's side ended at {name!r}: see what it wrote above")
        return json.loads(line)

    async def single_ops(self, prompts: Sequence[w.Tokens]) -> dict[str, w.Timings]:
        samples = await self.command("single", prompts=[prompt.tolist() for prompt in prompts])
        return {kind: w.Timings(samples_ns) for kind, samples_ns in samples.items()}


class VllmDecoding:
    """Running sequences of vLLM's, as `kvmem_sides.OctavoDecoding`."""

    def __init__(self, side: VllmSide) -> None:
        self.side = side

    async def start(self, prompts: Sequence[w.Tokens]) -> None:
        await self.side.command("start", prompts=[prompt.tolist() for prompt in prompts])
        await self.steps(w.random_tokens(1, 1, len(prompts)))

    async def steps(self, tokens: w.Tokens) -> list[int]:
        return (await self.side.command("decode", steps=tokens.tolist()))["samples_ns"]


@contextlib.asynccontextmanager
async def vllm_side(python: str) -> AsyncIterator[VllmSide]:
    """The script under that interpreter; it ends with the context."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        python, str(SCRIPT), stdin=pipe, stdout=pipe, limit=MAX_LINE_BYTES
    )
    try:
        side = VllmSide(process)
        await side.command("setup", block_size=w.BLOCK_SIZE, max_model_len=w.MAX_MODEL_LEN)
        yield side
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
