"""The CUDA runner over the host's memory and the CPU's kernels: its own logic, where there is no GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from inferd.core.ports import StepInput
from inferd.model.cuda_runner import RunnerLimits
from inferd.model.load import prepare
from inferd.sampler import Row
from pagekernels.cpu import configure
from pagekernels.layout import pack_entry
from tests.cpu.host_gpu import host_runner
from tests.cpu.model_configs import random_model
from tests.cpu.runner_cases import (
    Place,
    expect_any_mix,
    expect_drafts,
    expect_forks,
    expect_resumption,
    expect_several,
)
from tests.cpu.settings_mix import GREEDY


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Place:
    configure(1)
    served = prepare("llama", random_model("llama"))
    open_: Any = partial(host_runner, patch=monkeypatch)
    return Place(served, random_model("llama"), open_)


@pytest.mark.parametrize(("budget", "graphs"), [(17, True), (200, True), (64, False)])
def test_any_mix_of_settings_in_one_batch_gives_each_request_what_it_gets_alone(
    place: Place, budget: int, graphs: bool
) -> None:
    expect_any_mix(place, budget, graphs=graphs, most=8)


def test_drafts_are_verified_a_step_ahead_of_others(place: Place) -> None:
    expect_drafts(place, graphs=True)


def test_requests_that_yield_and_resume_say_what_they_would_have(place: Place) -> None:
    expect_resumption(place, graphs=True, count=5)


def test_samples_and_beams_of_one_prompt_are_what_each_is_alone(place: Place) -> None:
    expect_several(place, graphs=True)


def test_forked_tables_write_to_copies_of_their_own(place: Place) -> None:
    expect_forks(place, graphs=True)


def test_a_step_that_fails_half_way_is_over_when_it_says_so(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels launched before it failed write to its blocks, which are given back as soon as it has failed."""
    with place.open(place.served, 16, 8, RunnerLimits(64, 8, 256, 8, graphs=False)) as runner:
        stream: Any = runner._stream
        synchronized: list[bool] = []
        monkeypatch.setattr(stream, "synchronize", lambda: synchronized.append(True))

        def fail(*_: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(runner, "_forward", fail)
        table = [pack_entry(place.served.format, 0, 0)]
        with pytest.raises(torch.OutOfMemoryError):
            runner.launch(StepInput([3], [0], [0], [1], [1], [table], [0]), [Row(GREEDY, 1)])
        assert synchronized
