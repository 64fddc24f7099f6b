"""What `octavo up` tells its services."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.cli.stack import StackOptions, service_specs
from octavo.cli.state import SERVICES

ADDRESSES = {name: f"unix:/run/{name}.sock" for name in SERVICES}


def commands(options: StackOptions) -> dict[str, list[str]]:
    specs = service_specs(options, "/models/tiny", ADDRESSES, Path("/state/journal"))
    return {spec.name: list(spec.command) for spec in specs}


def test_the_keys_are_for_the_scheduler_alone_wherever_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = commands(StackOptions(api_keys=Path("keys")))
    assert told["scheduler"][-2:] == ["--api-keys", str(tmp_path / "keys")]
    assert all("--api-keys" not in told[name] for name in SERVICES if name != "scheduler")


def test_what_was_not_said_is_left_to_the_services() -> None:
    told = commands(StackOptions())
    assert told["kvmem"][3:] == ["--address", ADDRESSES["kvmem"], "--journal", "/state/journal"]
    assert not any("--api-keys" in command for command in told.values())
