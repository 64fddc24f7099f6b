"""Every service settles how gRPC works before gRPC looks at its environment."""

from __future__ import annotations

import subprocess
import sys

import pytest

TIMEOUT_S = 120
CODE = """
import os
import {service}.__main__
from octavo.service import transport
print(transport.IN_TIME, os.environ["GRPC_EXPERIMENTS"])
"""


def run(code: str, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT_S,
        env=environment,
    )
    return done.stdout.split()


@pytest.mark.parametrize("service", ["kvmem_svc", "scheduler_svc", "model_worker"])
def test_before_grpc_is_imported(service: str) -> None:
    in_time, experiments = run(CODE.format(service=service))
    assert in_time == "True"
    assert experiments == "-event_engine_client,-event_engine_listener"


def test_what_the_environment_says_counts_more() -> None:
    code = CODE.format(service="kvmem_svc")
    assert run(code, GRPC_EXPERIMENTS="tcp_frame_size_tuning")[1] == "tcp_frame_size_tuning"
