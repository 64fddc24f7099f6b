"""What `octavo up` passes on to which service."""

from __future__ import annotations

from pathlib import Path

from octavo.cli.stack import StackOptions, service_specs

ADDRESSES = {name: f"unix:/x/{name}" for name in ("scheduler", "worker", "kvmem")}


def commands(options: StackOptions) -> dict[str, list[str]]:
    specs = service_specs(options, "/model", ADDRESSES, Path("/x/journal"))
    return {spec.name: list(spec.command) for spec in specs}


def test_memory_is_the_workers() -> None:
    given = commands(StackOptions(kv_memory="2GiB", swap_space="1GiB"))
    worker = given.pop("worker")
    assert worker[worker.index("--kv-memory") + 1] == "2GiB"
    assert worker[worker.index("--swap-space") + 1] == "1GiB"
    assert not [option for command in given.values() for option in command if "swap" in option]


def test_what_is_not_said_is_left_to_the_service() -> None:
    assert "--swap-space" not in commands(StackOptions())["worker"]
