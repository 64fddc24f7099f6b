"""The state folder: its lock, its sockets, and what it says of a running stack."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from octavo.cli.state import RunningStack, StateDir, StateError
from octavo.service.server import MAX_UNIX_PATH_BYTES, check_address


def stack(pid: int, created_at: float) -> RunningStack:
    return RunningStack(
        pid=pid,
        created_at=created_at,
        model="m",
        addresses={"scheduler": "unix:/s", "worker": "unix:/w", "kvmem": "unix:/k"},
        listen="127.0.0.1:50051",
        service_pids={"worker": 7},
    )


def this_process() -> RunningStack:
    return stack(os.getpid(), psutil.Process().create_time())


def test_only_its_owner_can_look_into_a_state_folder(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "a" / "b")
    assert stat.S_IMODE(state.path.stat().st_mode) == 0o700


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StateError, match="cannot use the state folder"):
        StateDir(tmp_path / "file" / "state")


def test_what_is_written_is_found_while_its_process_lives(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    with state.lock():
        state.write(this_process())
        assert state.running() == this_process()
        assert state.running().scheduler == "unix:/s"
    with pytest.raises(StateError, match="octavo up"):
        state.running()


@pytest.mark.parametrize("age_s", [1.0, -1.0])
def test_a_later_process_of_the_same_pid_is_not_taken_for_it(tmp_path: Path, age_s: float) -> None:
    state = StateDir(tmp_path)
    state.write(stack(os.getpid(), psutil.Process().create_time() + age_s))
    with pytest.raises(StateError, match="no Octavo is running"):
        state.running()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 1}'])
def test_a_damaged_state_file_is_nothing_running(tmp_path: Path, content: str) -> None:
    (tmp_path / "state.json").write_text(content)
    with pytest.raises(StateError, match="no Octavo is running"):
        StateDir(tmp_path).running()


def test_the_second_holder_of_the_lock_is_told_of_the_first(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    with state.lock():
        state.write(this_process())
        with (
            pytest.raises(StateError, match=rf"already running on .* \(pid {os.getpid()}\)"),
            StateDir(tmp_path).lock(),
        ):
            pass
    with StateDir(tmp_path).lock():
        pass


HOLD = """
import sys, time
from pathlib import Path
from octavo.cli.state import StateDir
with StateDir(Path(sys.argv[1])).lock():
    print("held", flush=True)
    time.sleep(600)
"""


def test_the_lock_of_a_killed_process_is_free_again(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(StateError), StateDir(tmp_path).lock():
            pass
        holder.kill()
    with StateDir(tmp_path).lock():
        pass


def test_sockets_stand_in_the_state_folder_when_the_path_is_short(socket_dir: Path) -> None:
    assert StateDir(socket_dir).addresses() == {
        service: f"unix:{socket_dir}/{service}.sock" for service in ("scheduler", "worker", "kvmem")
    }


def test_a_long_state_path_gets_a_short_folder_of_its_own(
    tmp_path: Path, socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(socket_dir))
    one, other = (StateDir(tmp_path / (name * 100)) for name in ("x", "y"))
    for address in one.addresses().values():
        check_address(address)
        assert address.startswith(f"unix:{socket_dir}/")
        folder = Path(address.removeprefix("unix:")).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert one.addresses() == one.addresses()
    assert not set(one.addresses().values()) & set(other.addresses().values())
    folder = Path(one.addresses()["kvmem"].removeprefix("unix:")).parent
    (folder / "kvmem.sock").touch()
    one.discard_short_folder()
    assert folder.exists()
    (folder / "kvmem.sock").unlink()
    one.discard_short_folder()
    assert not folder.exists()


def test_no_folder_short_enough_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long_tmp = tmp_path / ("t" * MAX_UNIX_PATH_BYTES)
    long_tmp.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long_tmp))
    with pytest.raises(StateError, match=f"at most {MAX_UNIX_PATH_BYTES} bytes"):
        StateDir(tmp_path / ("x" * 120)).addresses()


@pytest.mark.parametrize("trap", ["symlink", "open to all"])
def test_a_short_folder_that_somebody_else_could_write_is_refused(
    tmp_path: Path, socket_dir: Path, monkeypatch: pytest.MonkeyPatch, trap: str
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(socket_dir))
    place = socket_dir / f"octavo-{os.getuid()}"
    if trap == "symlink":
        (socket_dir / "elsewhere").mkdir(mode=0o700)
        place.symlink_to(socket_dir / "elsewhere")
    else:
        place.mkdir()
        place.chmod(0o777)
    with pytest.raises(StateError, match="not a folder of yours alone"):
        StateDir(tmp_path / ("x" * 120)).addresses()
