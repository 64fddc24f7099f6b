"""The `octavo` command in a process of its own, against a scripted peer on a real socket."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import psutil
import pytest

from octavo.cli.state import RunningStack, StateDir
from octavo.service.errors import ServiceError
from octavo.v1 import inference_pb2 as pb
from octavo.v1 import types_pb2
from tests.sdk.scripted_peer import Hang, ScriptedPeer, accepted, delta, serve

STOP = types_pb2.FINISH_REASON_STOP
LENGTH = types_pb2.FINISH_REASON_LENGTH
SOON_S = 60.0

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def peer() -> ScriptedPeer:
    return ScriptedPeer()


@pytest.fixture
def address(peer: ScriptedPeer, socket_dir: Path) -> Iterator[str]:
    socket = socket_dir / "peer.sock"
    server = serve(peer, socket)
    yield f"unix:{socket}"
    server.stop(grace=0).wait()


@pytest.fixture
def env(socket_dir: Path) -> dict[str, str]:
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("OCTAVO_", "OTEL_"))}
    return {**plain, "OCTAVO_STATE_DIR": str(socket_dir / "state"), "COLUMNS": "80"}


@pytest.fixture
def octavo(env: dict[str, str]) -> Run:
    def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "octavo", *arguments],
            input=stdin,
            env=env,
            capture_output=True,
            text=True,
            timeout=SOON_S,
            check=False,
        )

    return run


def test_generate_prints_the_text_and_nothing_else(
    octavo: Run, peer: ScriptedPeer, address: str
) -> None:
    peer.script = [
        accepted(),
        delta(0, " in [Paris]", 1),
        delta(0, " :smile:", 2, finish_reason=LENGTH),
    ]
    done = octavo(
        *("generate", "The capital", "--address", address),
        *("--temperature", "0.5", "--top-k", "7", "--top-p", "0.9", "--min-p", "0.1"),
        *("--seed", "5", "--max-tokens", "9", "--min-tokens", "2", "--stop", "a", "--stop", "b"),
        "--ignore-eos",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, " in [Paris] :smile:\n", "")
    request = peer.calls[0].request
    assert request.prompt == "The capital"
    assert request.params == types_pb2.SamplingParams(
        temperature=0.5,
        top_k=7,
        top_p=0.9,
        min_p=0.1,
        seed=5,
        max_tokens=9,
        min_tokens=2,
        stop=["a", "b"],
        ignore_eos=True,
    )


def test_generate_reads_its_prompt_from_stdin(
    octavo: Run, peer: ScriptedPeer, address: str
) -> None:
    peer.script = [accepted(), delta(0, "x", 1, finish_reason=STOP)]
    octavo("generate", "-", "--address", address, stdin="line one\nline two")
    assert peer.calls[0].request.prompt == "line one\nline two"


def test_several_answers_stand_in_boxes_of_their_own(
    octavo: Run, peer: ScriptedPeer, address: str
) -> None:
    peer.script = [
        accepted(),
        delta(0, "red", 1),
        delta(1, "blue", 2),
        delta(0, "dish", 3, finish_reason=STOP),
        delta(1, "ish", 4, finish_reason=LENGTH),
    ]
    done = octavo("generate", "p", "--n", "2", "--address", address)
    assert done.returncode == 0
    assert peer.calls[0].request.params.n == 2
    a, b = done.stdout.split("answer B")
    assert "answer A" in a
    assert "reddish" in a
    assert "stop" in a
    assert "blueish" in b
    assert "length" in b


def test_json_is_one_object_with_everything(octavo: Run, peer: ScriptedPeer, address: str) -> None:
    answer = delta(0, "a\n[b]", 1, 2, finish_reason=STOP, stop_token_id=9, cumulative_logprob=-0.5)
    answer.num_cached_tokens = 4
    peer.script = [accepted("r1", seed=42, num_prompt_tokens=7), answer]
    done = octavo("generate", "p", "--json", "--address", address)
    assert json.loads(done.stdout) == {
        "request_id": "r1",
        "seed": 42,
        "num_prompt_tokens": 7,
        "num_cached_tokens": 4,
        "candidates": [
            {
                "index": 0,
                "text": "a\n[b]",
                "token_ids": [1, 2],
                "finish_reason": "stop",
                "matched_stop": 9,
                "cumulative_logprob": -0.5,
            }
        ],
    }
    assert done.stdout.count("\n") == 1


def test_one_question(octavo: Run, peer: ScriptedPeer, address: str) -> None:
    peer.script = [accepted(), delta(0, "Paris.", 1, finish_reason=STOP)]
    done = octavo("chat", "Capital?", "--system", "Be brief.", "--address", address)
    assert done.stdout == "Paris.\n"
    sent = [(m.role, m.content) for m in peer.calls[0].request.messages]
    assert sent == [("system", "Be brief."), ("user", "Capital?")]


def test_a_conversation_keeps_its_history(octavo: Run, peer: ScriptedPeer, address: str) -> None:
    peer.script = [accepted(), delta(0, "Answer", 1), delta(0, "!", 2, finish_reason=STOP)]
    done = octavo("chat", "--address", address, stdin="one\n\ntwo\n")
    assert done.returncode == 0
    assert [[(m.role, m.content) for m in call.request.messages] for call in peer.calls] == [
        [("user", "one")],
        [("user", "one"), ("assistant", "Answer!"), ("user", "two")],
    ]


def test_a_question_that_fails_is_not_part_of_the_history(
    octavo: Run, peer: ScriptedPeer, address: str
) -> None:
    peer.script = [ServiceError("PROMPT_TOO_LONG", "too long by 7")]
    done = octavo("chat", "--address", address, stdin="one\ntwo\n")
    assert done.returncode == 0
    assert done.stdout.count("error: too long by 7 [PROMPT_TOO_LONG]") == 2
    assert [len(call.request.messages) for call in peer.calls] == [1, 1]


def test_ctrl_c_stops_the_answer_and_not_the_conversation(
    env: dict[str, str], peer: ScriptedPeer, address: str
) -> None:
    peer.script = [accepted(), delta(0, "half an answer", 1), Hang()]
    command = [sys.executable, "-m", "octavo", "chat", "--address", address]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as process:
        assert process.stdin is not None
        process.stdin.write("one\n")
        process.stdin.flush()
        assert process.stdout is not None
        before = read_until(process.stdout, "half an answer")
        process.send_signal(signal.SIGINT)
        assert peer.calls[0].gone.wait(SOON_S)
        peer.script = [accepted(), delta(0, "whole answer", 1, finish_reason=STOP)]
        out, _ = process.communicate("two\n", timeout=SOON_S)
    assert process.returncode == 0
    assert "half an answer\n(stopped)" in before + out
    assert "whole answer" in out
    first, second = (call.request for call in peer.of("Chat"))
    assert [m.content for m in second.messages] == ["one", "half an answer", "two"]
    (abort,) = (call.request for call in peer.of("Abort"))
    assert abort.attach_secret == first.attachment.secret


def test_ctrl_c_ends_a_generate_without_a_traceback(
    env: dict[str, str], peer: ScriptedPeer, address: str
) -> None:
    peer.script = [accepted(), delta(0, "half", 1), Hang()]
    command = [sys.executable, "-m", "octavo", "generate", "p", "--address", address]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    ) as process:
        assert process.stdout is not None
        read_until(process.stdout, "half")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=SOON_S)
    assert (process.returncode, out, err) == (130, "\n", "")
    assert peer.calls[0].gone.wait(SOON_S)


def test_health_and_its_exit_status(octavo: Run, peer: ScriptedPeer, address: str) -> None:
    done = octavo("health", "--address", address)
    assert (done.returncode, done.stdout) == (0, "SERVING\n")
    peer.health.enter_graceful_shutdown()
    done = octavo("health", "--address", address)
    assert (done.returncode, done.stdout) == (1, "NOT_SERVING\n")


def test_model(octavo: Run, peer: ScriptedPeer, address: str) -> None:
    assert "64 blocks of 16 tokens, bfloat16" in octavo("model", "--address", address).stdout
    described = json.loads(octavo("model", "--json", "--address", address).stdout)
    assert described["name"] == "tiny"
    assert described["geometry"]["block_size"] == 16


@pytest.mark.parametrize(
    ("script", "status", "told"),
    [
        ([ServiceError("INVALID_PARAMETER", "n is 65; [1, 64]")], 2, "error: n is 65; [1, 64]\n"),
        (
            [accepted(), delta(0, "half", 1), ServiceError("INTERNAL", "a bug")],
            1,
            "error: a bug [INTERNAL]\n",
        ),
    ],
)
def test_an_error_is_one_line_on_stderr(
    octavo: Run,
    peer: ScriptedPeer,
    address: str,
    script: list[pb.GenerateReply],
    status: int,
    told: str,
) -> None:
    peer.script = list(script)
    done = octavo("generate", "p", "--address", address)
    assert (done.returncode, done.stderr) == (status, told)
    assert "Traceback" not in done.stdout


def test_a_value_that_cannot_be_sent_is_a_usage_error(octavo: Run, address: str) -> None:
    done = octavo("generate", "p", "--n", "-1", "--address", address)
    assert done.returncode == 2
    assert done.stderr.startswith("error: n is -1; it must be an integer in [0, ")


def test_nothing_running_says_how_to_start_it(octavo: Run) -> None:
    done = octavo("generate", "p")
    assert done.returncode == 1
    assert "no Octavo is running" in done.stderr
    assert "octavo up" in done.stderr
    assert done.stderr.count("\n") == 1


def test_nobody_at_the_address(octavo: Run, socket_dir: Path) -> None:
    done = octavo("health", "--address", f"unix:{socket_dir}/nobody.sock")
    assert done.returncode == 1
    assert f"no server can be reached at unix:{socket_dir}/nobody.sock" in done.stderr
    assert done.stderr.count("\n") == 1


def test_nobody_at_the_address_is_told_at_once(octavo: Run, socket_dir: Path) -> None:
    """Not after the time for which the SDK waits for a server to accept a request."""
    script = (
        "import sys, octavo._streams as s; s.ChunkStream.__init__ = None;"
        "from octavo.cli.app import main; sys.argv = ['octavo', *sys.argv[1:]]; main()"
    )
    address = f"unix:{socket_dir}/nobody.sock"
    for command in ("generate", "chat"):
        done = subprocess.run(
            [sys.executable, "-c", script, command, "p", "--address", address],
            capture_output=True,
            text=True,
            timeout=SOON_S,
            check=False,
        )
        assert done.returncode == 1
        assert f"no server can be reached at {address}" in done.stderr
        assert "Traceback" not in done.stderr


def test_key_and_salt_come_from_the_command_line_or_the_environment(
    octavo: Run, peer: ScriptedPeer, address: str, env: dict[str, str]
) -> None:
    peer.script = [accepted(), delta(0, "x", 1, finish_reason=STOP)]
    octavo("generate", "p", "--address", address, "--api-key", "one-key", "--cache-salt", "s")
    env["OCTAVO_API_KEY"] = "another-key"
    octavo("chat", "p", "--address", address, "--cache-salt", "t")
    octavo("model", "--address", address)
    keys = [call.metadata["authorization"] for call in peer.calls]
    assert keys == ["Bearer one-key", "Bearer another-key", "Bearer another-key"]
    assert [call.request.cache_salt for call in peer.of("Generate", "Chat")] == ["s", "t"]
    assert "another-key" not in octavo("generate", "--help").stdout


def test_a_new_key_and_the_line_for_the_file(octavo: Run) -> None:
    key, line = octavo("new-key", "acme").stdout.splitlines()
    assert line == f"acme sha256:{hashlib.sha256(key.encode()).hexdigest()}"
    assert octavo("new-key", "acme").stdout.splitlines()[0] != key
    assert octavo("new-key", "two words").returncode == 2


def test_the_running_stack_is_found_by_its_state_folder(
    octavo: Run, env: dict[str, str], peer: ScriptedPeer, address: str
) -> None:
    state = StateDir(Path(env["OCTAVO_STATE_DIR"]))
    state.write(
        RunningStack(os.getpid(), psutil.Process().create_time(), "m", {"scheduler": address})
    )
    assert octavo("health").stdout == "SERVING\n"
    env["OCTAVO_ADDRESS"] = "unix:/nonexistent.sock"
    assert octavo("health").returncode == 1
    assert octavo("health", "--address", address).returncode == 0


def test_a_reader_that_leaves_early_is_no_error(
    env: dict[str, str], peer: ScriptedPeer, address: str
) -> None:
    peer.script = [accepted(), *(delta(0, "x" * 1000, 1) for _ in range(500)), Hang()]
    command = [sys.executable, "-m", "octavo", "generate", "p", "--address", address]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(10) == "x" * 10
        process.stdout.close()
        assert process.wait(SOON_S) == 1
        assert process.stderr.read() == ""


def test_prepare_says_what_is_wrong_with_a_model(octavo: Run, tmp_path: Path) -> None:
    done = octavo("prepare", "--model", str(tmp_path / "no-such-model"))
    assert done.returncode == 1
    assert "error: the model cannot be prepared: " in done.stderr
    assert "Traceback" not in done.stderr


def test_version_and_help_need_no_server(octavo: Run) -> None:
    assert octavo("--version").stdout.startswith("octavo 0.")
    shown = octavo("--help").stdout
    assert all(name in shown for name in ("up", "generate", "chat", "health", "model", "demo"))


def read_until(stream: IO[str], text: str) -> str:
    """What comes until `text` has come; the test's own time limit ends a wait for ever."""
    read = ""
    while text not in read:
        piece = stream.read(1)
        assert piece, f"the stream ended after {read!r}"
        read += piece
    return read
