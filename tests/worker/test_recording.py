"""The serving benchmark's recordings: kept as they were, and executed again to the same tokens."""

from __future__ import annotations

import io
import time
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks import bare
from benchmarks.recording import Recorder, num_drawn, read_steps
from benchmarks.serve_report import interval, walls_us, worker_of
from benchmarks.workload import load_traces, make_items, poisson_arrivals
from tests.worker.stage import DEADLINE_S
from tests.worker.tiny import Driver, load_tiny, make_runner

NUM_STEPS = 4


@pytest.fixture
def folder(model_folders: dict[str, Path]) -> Path:
    return model_folders["llama-gqa"]


def recording(folder: Path, path: Path) -> Path:
    """A prompt of one sequence, one of another beside it, and decodes of both; written to path."""
    runner, recorder = make_runner(load_tiny(folder)), Recorder()
    recorder.attach(runner)
    driver = Driver(runner)
    one, other = driver.add([5, 6, 7]), driver.add([8, 9])
    driver.step([(one, 3, 1)])
    driver.step([(one, 1, 1), (other, 2, 1)])
    for _ in range(NUM_STEPS - 2):
        driver.step([(one, 1, 1), (other, 1, 1)])
    recorder.write(path)
    return path


def test_a_replay_draws_the_same_tokens(folder: Path, tmp_path: Path):
    steps = read_steps(recording(folder, tmp_path / "steps"))
    assert [each.step.step_id for each in steps] == [1, 2, 3, 4]
    assert num_drawn(steps) == 2 * NUM_STEPS - 1
    other_runner = make_runner(load_tiny(folder))
    for _ in range(2):  # The second one finds the first one's sequences, and begins anew.
        report = bare.replay(other_runner, steps)
        assert report["num_steps"] == NUM_STEPS
        assert report["num_same_tokens"] == report["num_tokens"] == num_drawn(steps)
        assert report["seconds"] >= report["forward_s"] > 0


def test_tokens_that_differ_are_counted(folder: Path, tmp_path: Path):
    steps = read_steps(recording(folder, tmp_path / "steps"))
    steps[0].output.sampled_token_ids[:] += 1
    report = bare.replay(make_runner(load_tiny(folder)), steps)
    assert report["num_same_tokens"] == num_drawn(steps) - 1


def test_it_is_written_where_told_and_begins_anew(folder: Path, tmp_path: Path):
    recorder, runner = Recorder(), make_runner(load_tiny(folder))
    recorder.attach(runner)
    driver = Driver(runner)
    one = driver.add([5])
    paths = [tmp_path / "first", tmp_path / "second"]
    for path in paths:
        driver.step([(one, 1, 1)])
        recorder.write_where_told(io.StringIO(f"{path}\n"))
        deadline_s = time.monotonic() + DEADLINE_S
        while not path.exists():
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
    assert [[each.step.step_id for each in read_steps(path)] for path in paths] == [[1], [2]]


def test_what_a_worker_did_between_its_steps(folder: Path, tmp_path: Path):
    steps = read_steps(recording(folder, tmp_path / "steps"))
    ended_us = steps[-1].began_us + steps[-1].busy_us
    assert walls_us(steps).sum() == pytest.approx(ended_us - steps[0].began_us)
    report = worker_of(steps)
    gaps = [each.output.timings.gap_us for each in steps[1:]]
    assert report["worker_gap_p50_ms"] == pytest.approx(sorted(gaps)[1] / 1000)
    # A runner that is called directly is idle until it is called.
    assert report["worker_idle_p50_ms"] == report["worker_gap_p50_ms"] > 0


def test_an_interval_holds_the_median_and_narrows():
    few, many = interval([0.9, 1.0, 1.1]), interval([0.9, *[1.0] * 20, 1.1])
    assert few == (0.9, 1.1)
    assert many == (1.0, 1.0)


def test_lengths_come_from_the_traces_that_are_there(tmp_path: Path):
    assert list(load_traces(None)) == list(load_traces(tmp_path)) == ["uniform"]
    items = make_items([(50, 7), (3000, 90)], 40, 0, max_prompt=100, max_output=20)
    shapes = {(len(item.prompt_token_ids), item.num_output_tokens) for item in items}
    assert shapes == {(50, 7), (100, 20)}


def test_arrivals_are_poisson():
    arrivals = poisson_arrivals(4000, 5.0, seed=3)
    gaps = [after - before for before, after in pairwise(arrivals)]
    mean = sum(gaps) / len(gaps)
    assert arrivals[0] == 0
    assert mean == pytest.approx(0.2, rel=0.05)
    # Exponential: the deviation is the mean.
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert deviation == pytest.approx(mean, rel=0.05)
