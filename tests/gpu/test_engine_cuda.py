"""Real daemons on a real GPU: what a worker says, what workers share, and what the death of one costs the others."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from pagepool.errors import Code, PagepoolError, Reason
from pagepool.inferd.v1 import generation_service_pb2 as pb
from pagepool.memd.v1 import pool_service_pb2 as memd_pb
from pagepool.memd.v1 import types_pb2
from pagepool.status import from_rpc_error
from tests.e2e.conftest import Memd
from tests.e2e.workers import Worker, greedy, household, launch_memd, within

pytest.importorskip("pycuda.driver", exc_type=ImportError)

DEVICE = "cuda"
GIB = 1 << 30
VOCAB_SIZE = 264
LENGTHS = (1, 5, 16, 63, 65, 150, 300)
"""Of prompts: one token, a whole block, and both sides of what the decode kernels take."""

NEW_TOKENS = 24
FLAGS = ("--dtype", "float32", "--max-num-seqs", "8", "--max-batch-tokens", "128")
"""Prompts come in several chunks, some beside decoding neighbours."""


def make_model(folder: Path) -> Path:
    """A llama with random weights, spread wide so that attention matters, and a tokenizer of single bytes."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(["<s>", "</s>", *letters])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def expected(folder: Path, prompts: Sequence[list[int]]) -> list[list[int]]:
    """What transformers' own generate says in float32, each prompt alone."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    said = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        said.append(output[0][len(prompt) :].tolist())
    return said


def a_prompt(length: int, seed: int = 0) -> list[int]:
    return [2 + (seed + 7919 * (i + 1) ** 2) % 256 for i in range(length)]


@dataclass
class House:
    """A memd, two workers of one model, and the folder of that."""

    memd: Memd
    first: Worker
    second: Worker
    model: Path


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """One worker runs what torch.compile made, the other the model as it is."""
    model = make_model(tmp_path_factory.mktemp("models") / "small")
    began = time.monotonic()
    pool = ("--device", DEVICE, "--pool-bytes", "16GiB", "--max-num-blocks", "2048", "--heartbeat-timeout", "2s")
    with household(*pool) as (memd, start):
        first = start("first", "--model", str(model), *FLAGS)
        second = start("second", "--model", str(model), *FLAGS, "--compile", "off")
        yield House(memd, first.ready(), second.ready(), model)
        print(f"{time.monotonic() - began:.1f} s in all")


def test_tokens_are_those_of_transformers_alone_and_in_a_batch_on_both_workers(house: House) -> None:
    prompts = [a_prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    wanted = expected(house.model, prompts)
    assert len({tuple(tokens) for tokens in wanted}) == len(LENGTHS)
    for number, worker in enumerate((house.first, house.second)):
        requests = [greedy(p, NEW_TOKENS, ignore_eos=True, cache_salt=b"equal%d" % number) for p in prompts]
        with ThreadPoolExecutor(len(requests)) as pool:
            together = list(pool.map(worker.generate, requests))
        assert [run.token_ids for run in together] == wanted
        alone = greedy(prompts[-1], NEW_TOKENS, ignore_eos=True, cache_salt=b"alone%d" % number)
        assert worker.generate(alone).token_ids == wanted[-1]


def test_penalties_and_logprobs_are_those_of_transformers_on_both_workers(house: House) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(house.model, dtype=torch.float32)
    prompt = a_prompt(150, 3)
    ids, bias = torch.tensor([prompt]), {5: 4.0, 77: -100.0}
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    sequence_bias = {(token,): value for token, value in bias.items()}
    (whole,) = model.generate(ids, repetition_penalty=1.4, sequence_bias=sequence_bias, **options).tolist()
    with torch.inference_mode():
        wanted = model(torch.tensor([whole])).logits[0].double().log_softmax(-1)
    request = greedy(prompt, NEW_TOKENS, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    request.sampling.MergeFrom(pb.SamplingParams(repetition_penalty=1.4, logit_bias=bias))
    for worker in (house.first, house.second):
        card = worker.stub().GetModel(pb.GetModelRequest())
        assert not {"logprobs", "prompt_logprobs", "sampling.logit_bias"} & set(card.unsupported_fields)
        found = []
        for event in worker.stub().Generate(request, timeout=60):
            found += event.prompt_logprobs.logprobs if event.HasField("prompt_logprobs") else event.tokens.logprobs
        assert [each.token_id for each in found] == whole[1:]
        for at, each in enumerate(found):
            assert each.logprob == pytest.approx(float(wanted[at, each.token_id]), abs=1e-3)
            best = wanted[at].topk(len(each.top_token_ids)).values.tolist()
            assert list(each.top_logprobs) == pytest.approx(best, abs=1e-3)


def test_text_goes_in_and_comes_out(house: House) -> None:
    run = house.first.generate(greedy("The lighthouse keeper wrote", 8, ignore_eos=True))
    assert run.finished.usage.prompt_tokens == 27
    assert len(run.token_ids) == 8


def test_the_pool_says_where_it_lies_and_that_the_byte_order_is_the_gpu_s(house: House) -> None:
    pool = house.memd.pool().GetPool(memd_pb.GetPoolRequest()).pool
    assert pool.device.startswith(f"{DEVICE}:")
    assert pool.geometry.layout_version == 2
    assert pool.num_leases == 2


def the_table(memd: Memd) -> types_pb2.BlockTable:
    pool = memd.pool()
    (table,) = within(10, lambda: pool.ListBlockTables(memd_pb.ListBlockTablesRequest()).block_tables)
    return pool.GetBlockTable(memd_pb.GetBlockTableRequest(table_id=table.table_id)).block_table


def watched(memd: Memd, worker: Worker, request: pb.GenerateRequest) -> tuple[list[int], types_pb2.BlockTable, int]:
    """Runs a request; its tokens, its block table while it ran, and how many of its tokens were cached."""
    within(10, lambda: not memd.pool().ListBlockTables(memd_pb.ListBlockTablesRequest()).block_tables)
    call = worker.stub().Generate(request, timeout=60)
    events = [next(call), next(call)]
    table = the_table(memd)
    events += call
    tokens = [token for event in events[1:-1] for token in event.tokens.token_ids]
    return tokens, table, events[-1].finished.usage.cached_tokens


def test_the_second_worker_attends_to_the_first_one_s_blocks(house: House) -> None:
    request = greedy(a_prompt(1000), 2000, ignore_eos=True, cache_salt=b"shared")
    tokens, table, cached = watched(house.memd, house.first, request)
    again, second_table, second_cached = watched(house.memd, house.second, request)
    assert (cached, second_cached) == (0, 999)
    assert again == tokens
    assert list(second_table.block_ids[:62]) == list(table.block_ids[:62])
    assert list(second_table.entries[:62]) == list(table.entries[:62])
    assert second_table.lease_id != table.lease_id


def error_of(call: grpc.Call) -> PagepoolError:
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    return from_rpc_error(caught.value)


def begun(worker: Worker, count: int) -> list[grpc.Call]:
    """Requests that have got their first token and would run for long."""
    calls = [
        worker.stub().Generate(greedy(a_prompt(100, seed), 3900, ignore_eos=True), timeout=60) for seed in range(count)
    ]
    for call in calls:
        assert next(call).HasField("started")
        assert next(call).HasField("tokens")
    return calls


def test_a_worker_killed_under_load_costs_the_other_nothing_and_its_blocks_return(house: House) -> None:
    request = greedy(a_prompt(200, 5), 400, ignore_eos=True)
    wanted = house.first.generate(request).token_ids
    lost = begun(house.second, 4)
    with ThreadPoolExecutor(3) as pool:
        runs = [pool.submit(house.first.generate, request) for _ in range(3)]
        house.second.kill()
        assert all(run.result().token_ids == wanted for run in runs)
    assert {error_of(call).code for call in lost} == {Code.UNAVAILABLE}
    within(6, lambda: house.memd.usage().held_blocks == 0 and house.memd.usage().quarantined_blocks == 0)
    usage = house.memd.usage()
    assert usage.free_blocks + usage.cached_blocks == usage.total_blocks
    after = house.first.generate(greedy(a_prompt(100, 0), 4, ignore_eos=True))
    assert after.finished.usage.cached_tokens == 96, "the dead worker's sealed blocks are still matched"


def used_bytes() -> int:
    pynvml = pytest.importorskip("pynvml")
    pynvml.nvmlInit()
    used: int = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used
    return used


def serves(worker: Worker) -> bool:
    try:
        worker.generate(greedy([7, 8, 9], 1))
    except grpc.RpcError as error:
        if from_rpc_error(error).code is Code.UNAVAILABLE:
            return False
        raise
    return True


def test_after_memd_s_death_requests_end_its_memory_returns_and_its_successor_is_served(house: House) -> None:
    memd, worker = house.memd, house.first
    request = greedy(a_prompt(100, 9), 16, ignore_eos=True)
    wanted = worker.generate(request).token_ids
    old = worker.stub().GetModel(pb.GetModelRequest()).pool_epoch
    calls, before = begun(worker, 2), used_bytes()
    memd.process.send_signal(signal.SIGKILL)
    died = time.monotonic()
    memd.wait()
    for call in calls:
        error = error_of(call)
        assert (error.reason, error.code) == (Reason.POOL_LOST, Code.UNAVAILABLE)
        assert error.retry_after_s
    assert time.monotonic() - died < 2
    # The engine has unmapped it; other users of this GPU may have taken a little meanwhile.
    within(5, lambda: used_bytes() < before - 10 * GIB)
    successor = launch_memd(memd.directory, memd.slab_dir, "--device", DEVICE, "--pool-bytes", "1GiB")
    try:
        began = time.monotonic()
        within(40, lambda: serves(worker))
        print(f"served again {time.monotonic() - began:.1f} s after the next memd was ready")
        assert worker.generate(request).token_ids == wanted
        epoch = worker.stub().GetModel(pb.GetModelRequest()).pool_epoch
        assert epoch not in {0, old}
        assert epoch == successor.pool().GetPool(memd_pb.GetPoolRequest()).pool.epoch
        assert worker.stop() == 0
    finally:
        for channel in successor.channels:
            channel.close()
        successor.stop()
