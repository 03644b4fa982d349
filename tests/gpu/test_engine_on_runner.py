"""The engine over memd's core and a runner on the GPU, in one process: what may be in one batch, and what blocks do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from inferd.core.ports import StepInput
from inferd.model.cuda_runner import CudaRunner, RunnerLimits
from inferd.model.load import ServedModel, prepare
from inferd.sampler import Row
from pagekernels.cuda.device import CudaDevice
from pagekernels.layout import pack_entry, slot_mapping
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
from tests.gpu.model_rig import CudaRig, num_graphs

MakePlace = Callable[[bool], Place]


@pytest.fixture
def make_place(device: CudaDevice) -> MakePlace:
    """A place of a tiny llama in float32, compiled or not, where nothing may compile once its runner is ready."""

    def make(compile_: bool) -> Place:
        @contextmanager
        def open_(served: ServedModel, block_size: int, blocks: int, limits: RunnerLimits) -> Iterator[CudaRunner]:
            rig = CudaRig(device, served, block_size, limits=limits, compile_=compile_)
            with rig.runner(blocks) as runner:
                yield runner
            assert num_graphs() == rig.graphs, "something was compiled after the runner was ready"

        served = prepare("llama", random_model("llama").to("cuda"))
        return Place(served, random_model("llama").to("cuda"), open_)

    return make


@pytest.mark.parametrize("compile_", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("budget", "graphs"), [(17, True), (200, True), (64, False)])
def test_any_mix_of_settings_in_one_batch_gives_each_request_what_it_gets_alone(
    make_place: MakePlace, budget: int, graphs: bool, compile_: bool
) -> None:
    expect_any_mix(make_place(compile_), budget, graphs=graphs)


@pytest.mark.parametrize("graphs", [False, True])
def test_drafts_are_verified_a_step_ahead_of_others(make_place: MakePlace, graphs: bool) -> None:
    expect_drafts(make_place(False), graphs=graphs)


@pytest.mark.parametrize("graphs", [False, True])
def test_requests_that_yield_and_resume_say_what_they_would_have(make_place: MakePlace, graphs: bool) -> None:
    expect_resumption(make_place(False), graphs=graphs)


@pytest.mark.parametrize("graphs", [False, True])
def test_samples_and_beams_of_one_prompt_are_what_each_is_alone(make_place: MakePlace, graphs: bool) -> None:
    expect_several(make_place(False), graphs=graphs)


@pytest.mark.parametrize("graphs", [False, True])
def test_forked_tables_write_to_copies_of_their_own(make_place: MakePlace, graphs: bool) -> None:
    expect_forks(make_place(False), graphs=graphs)


def test_a_captured_step_that_asks_for_nothing_allocates_nothing(make_place: MakePlace) -> None:
    place = make_place(False)
    fmt = place.served.format
    table = [pack_entry(fmt, 0, block * fmt.itemsize) for block in range(3)]
    with place.open(place.served, 16, 8, RunnerLimits(64, 8, 256, 8)) as runner:
        prompt = list(range(3, 33))
        slots = slot_mapping(table, 0, 40, 16)
        runner.launch(StepInput(prompt, list(range(30)), slots[:30], [30], [30], [table], [29]), [Row(GREEDY, 30)])
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        for at in range(30, 40):
            step = StepInput([-1], [at], slots[at : at + 1], [1], [at + 1], [table], [0])
            pending = runner.launch(step, [Row(GREEDY, at + 1)])
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        assert pending.tokens() == [place.continuation(prompt, 11)[-1]]
        assert pending.scores() is None
