"""The README's ten lines run as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.system.stack import REPOSITORY, Stack


@pytest.mark.model
def test_the_quick_start_runs(demo: Stack) -> None:
    readme = (REPOSITORY / "README.md").read_text()
    (code,) = re.findall(r"<!-- quick start -->\n```python\n(.*?)```", readme, re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "OCTAVO_ADDRESS": demo.addresses["scheduler"]},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"\n\[0\] .+ \(\w+\)\n+\[1\] .+ \(\w+\)\n", done.stdout, re.DOTALL)
