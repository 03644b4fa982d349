"""The public clients against scripted servers on real sockets: what is abandoned is cancelled, errors say why."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagepool.errors import PagepoolError, Reason
from pagepool.inferd.v1 import generation_service_pb2 as inferd_pb
from pagepool.inferd.v1 import generation_service_pb2_grpc as inferd_grpc
from pagepool.memd.v1 import pool_service_pb2 as memd_pb
from pagepool.memd.v1 import pool_service_pb2_grpc as memd_grpc
from pagepool.memd.v1.types_pb2 import Block, Lease, Pool
from pagepool.status import ForeignError, to_status
from pagepool.token_ids import unpack
from pagepool_client import AsyncInferenceClient, AsyncPoolClient, InferenceClient, PoolClient
from pagepool_client.prompts import generate_request

add_inferd: Any = inferd_grpc.add_GenerationServiceServicer_to_server
add_memd: Any = memd_grpc.add_PoolServiceServicer_to_server


def abort(context: Any, error: PagepoolError) -> None:
    status = to_status(error)
    context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
    context.abort(grpc.StatusCode[error.code.name], status.message)


def note_end(context: Any, event: threading.Event) -> None:
    if not context.add_callback(event.set):  # it has ended already
        event.set()


class ScriptedInferd(inferd_grpc.GenerationServiceServicer):
    """Streams tokens for ever, unless the prompt says "three"; notes what was cancelled."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()
        self.requests: list[inferd_pb.GenerateRequest] = []

    def Generate(self, request: Any, context: Any) -> Iterator[inferd_pb.GenerateResponse]:  # noqa: N802 gRPC's name
        self.requests.append(request)
        if request.max_tokens < 0:
            abort(context, PagepoolError(Reason.INVALID_FIELD, "max_tokens is -1", field="max_tokens"))
        if request.text.text != "three":
            # Before the first answer: grpc does not come back for more of a call that is cancelled upon it.
            note_end(context, self.cancelled)
        started = inferd_pb.GenerateStarted(request_id="r", prompt_tokens=2)
        yield inferd_pb.GenerateResponse(started=started)
        if request.text.text == "three":
            scored = [inferd_pb.TokenLogprobs(token_id=1, logprob=-0.5)] if request.HasField("logprobs") else []
            if request.HasField("prompt_logprobs"):
                for first in (1, 2):
                    part = inferd_pb.GeneratePromptLogprobs(first_position=first, logprobs=[{"token_id": first}])
                    yield inferd_pb.GenerateResponse(prompt_logprobs=part)
            for word in ("one ", "", "two ", "three"):
                tokens = inferd_pb.GenerateTokens(text=word, token_ids=[1], logprobs=scored)
                yield inferd_pb.GenerateResponse(tokens=tokens)
            usage = inferd_pb.Usage(generated_tokens=4)
            finished = inferd_pb.GenerateFinished(reason=inferd_pb.FINISH_REASON_STOP, usage=usage)
            yield inferd_pb.GenerateResponse(finished=finished)
            return
        while context.is_active():
            yield inferd_pb.GenerateResponse(tokens=inferd_pb.GenerateTokens(text="x", token_ids=[1]))
            time.sleep(0.002)

    def Tokenize(self, request: Any, context: Any) -> inferd_pb.TokenizeResponse:  # noqa: N802 gRPC's name
        if request.text == "hang":
            note_end(context, self.cancelled)
            self.cancelled.wait(10)
        return inferd_pb.TokenizeResponse(token_ids=range(len(request.text)))


class ScriptedMemd(memd_grpc.PoolServiceServicer):
    """Grants one lease of 0.3 s, and lists five blocks two a page."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()
        self.lease_ends: PagepoolError | None = None
        self.renewals = 0
        self.released = threading.Event()
        self.allocations: list[memd_pb.AllocateBlocksRequest] = []
        self.unavailable = 0

    def GetPool(self, request: Any, context: Any) -> memd_pb.GetPoolResponse:  # noqa: N802 gRPC's name
        return memd_pb.GetPoolResponse(pool=Pool(epoch=3))

    def ListBlocks(self, request: Any, context: Any) -> memd_pb.ListBlocksResponse:  # noqa: N802 gRPC's name
        first = int(request.page_token or 1)
        blocks = [Block(block_id=number) for number in range(first, min(first + 2, 6))]
        return memd_pb.ListBlocksResponse(blocks=blocks, next_page_token=str(first + 2) if first + 2 < 6 else "")

    def WatchPool(self, request: Any, context: Any) -> Iterator[memd_pb.WatchPoolResponse]:  # noqa: N802 gRPC's name
        note_end(context, self.cancelled)
        while context.is_active():
            yield memd_pb.WatchPoolResponse(pool=Pool(epoch=3))
            time.sleep(0.002)

    def CreateLease(self, request: Any, context: Any) -> memd_pb.CreateLeaseResponse:  # noqa: N802 gRPC's name
        return memd_pb.CreateLeaseResponse(lease=self._lease(request.holder), epoch=3)

    def RenewLease(self, request: Any, context: Any) -> memd_pb.RenewLeaseResponse:  # noqa: N802 gRPC's name
        if self.lease_ends:
            abort(context, self.lease_ends)
        self.renewals += 1
        return memd_pb.RenewLeaseResponse(lease=self._lease("me"))

    def ReleaseLease(self, request: Any, context: Any) -> memd_pb.ReleaseLeaseResponse:  # noqa: N802 gRPC's name
        assert (request.epoch, request.lease_id) == (3, 8)
        self.released.set()
        return memd_pb.ReleaseLeaseResponse()

    def AllocateBlocks(self, request: Any, context: Any) -> memd_pb.AllocateBlocksResponse:  # noqa: N802 gRPC's name
        self.allocations.append(request)
        if self.unavailable:
            self.unavailable -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "scripted")
        return memd_pb.AllocateBlocksResponse(block_ids=range(request.num_blocks))

    def _lease(self, holder: str) -> Lease:
        lease = Lease(lease_id=8, holder=holder)
        lease.ttl.FromMilliseconds(300)
        return lease


def serve(target: str, add: Callable[[Any], None]) -> Any:
    server = grpc.server(futures.ThreadPoolExecutor(8))
    add(server)
    server.add_insecure_port(target)
    server.start()
    return server


@pytest.fixture
def target(tmp_path: Path) -> str:
    return f"unix:{tmp_path / 'server.sock'}"


@pytest.fixture
def inferd(target: str) -> Iterator[ScriptedInferd]:
    servicer = ScriptedInferd()
    server = serve(target, lambda server: add_inferd(servicer, server))
    yield servicer
    server.stop(None).wait()


@pytest.fixture
def memd(target: str) -> Iterator[ScriptedMemd]:
    servicer = ScriptedMemd()
    server = serve(target, lambda server: add_memd(servicer, server))
    yield servicer
    server.stop(None).wait()


def test_a_continuation_is_read_as_events_and_as_text(inferd: ScriptedInferd, target: str) -> None:
    with InferenceClient(target) as client:
        kinds = [type(event).__name__ for event in client.generate("three")]
        assert kinds == ["GenerateStarted", *["GenerateTokens"] * 4, "GenerateFinished"]
        generation = client.generate("three")
        assert list(generation.pieces()) == ["one ", "two ", "three"]
        assert generation.started is not None
        assert generation.started.prompt_tokens == 2
        assert generation.finished is not None
        assert generation.finished.usage.generated_tokens == 4
        assert client.generate("three").text() == "one two three"


def test_logprobs_are_collected_while_a_continuation_is_read(inferd: ScriptedInferd, target: str) -> None:
    with InferenceClient(target) as client:
        generation = client.generate("three", logprobs=0, prompt_logprobs=2)
        assert generation.text() == "one two three"
        assert [each.logprob for each in generation.logprobs] == [-0.5] * 4
        assert [each.token_id for each in generation.prompt_logprobs] == [1, 2]
        kinds = [type(event).__name__ for event in client.generate("three", prompt_logprobs=0)]
        assert kinds == [
            "GenerateStarted",
            *["GeneratePromptLogprobs"] * 2,
            *["GenerateTokens"] * 4,
            "GenerateFinished",
        ]
        plain = client.generate("three")
        assert plain.text() == "one two three"
        assert (plain.logprobs, plain.prompt_logprobs) == ([], [])


def test_reading_can_go_on_after_a_break_while_the_continuation_is_held(inferd: ScriptedInferd, target: str) -> None:
    with InferenceClient(target) as client:
        generation = client.generate("three")
        for piece in generation.pieces():
            assert piece == "one "
            break
        assert generation.text() == "two three"


def test_leaving_a_loop_over_a_continuation_cancels_it_on_the_server(inferd: ScriptedInferd, target: str) -> None:
    with InferenceClient(target) as client:
        for piece in client.generate("endless").pieces():
            assert piece == "x"
            break
        assert inferd.cancelled.wait(5)


def test_leaving_a_with_block_cancels_the_continuation(inferd: ScriptedInferd, target: str) -> None:
    with InferenceClient(target) as client:
        with client.generate("endless") as generation:
            next(generation)
            assert not inferd.cancelled.wait(0.05)
        assert inferd.cancelled.wait(5)
        assert list(generation) == []


def test_a_dropped_continuation_is_cancelled_even_in_a_reference_cycle(inferd: ScriptedInferd, target: str) -> None:
    with InferenceClient(target) as client:
        generation = client.generate("endless")
        next(generation)
        cycle: list[Any] = [generation]
        cycle.append(cycle)
        del generation, cycle
        gc.collect()
        assert inferd.cancelled.wait(5)


def test_an_error_in_the_readers_body_cancels_the_continuation(inferd: ScriptedInferd, target: str) -> None:
    with InferenceClient(target) as client:
        with pytest.raises(KeyError), client.generate("endless") as generation:
            raise KeyError(next(generation).__class__.__name__)
        assert inferd.cancelled.wait(5)


def test_a_refused_request_raises_the_servers_error(inferd: ScriptedInferd, target: str) -> None:
    with InferenceClient(target) as client, pytest.raises(PagepoolError, match="max_tokens is -1") as caught:
        client.generate("hi", max_tokens=-1).text()
    assert (caught.value.reason, caught.value.field) == (Reason.INVALID_FIELD, "max_tokens")


async def test_async_a_continuation_is_read_as_text(inferd: ScriptedInferd, target: str) -> None:
    async with AsyncInferenceClient(target) as client:
        generation = client.generate("three")
        assert await generation.text() == "one two three"
        assert generation.finished is not None
        assert list((await client.tokenize("four")).token_ids) == [0, 1, 2, 3]


async def test_async_logprobs_are_collected_while_a_continuation_is_read(inferd: ScriptedInferd, target: str) -> None:
    async with AsyncInferenceClient(target) as client:
        generation = client.generate("three", logprobs=0, prompt_logprobs=2)
        assert await generation.text() == "one two three"
        assert [each.logprob for each in generation.logprobs] == [-0.5] * 4
        assert [each.token_id for each in generation.prompt_logprobs] == [1, 2]


async def test_async_leaving_a_loop_over_a_continuation_cancels_it(inferd: ScriptedInferd, target: str) -> None:
    async with AsyncInferenceClient(target) as client:
        async for _ in client.generate("endless"):
            break
        assert await asyncio.to_thread(inferd.cancelled.wait, 5)


async def test_async_a_cancelled_reader_cancels_the_continuation(inferd: ScriptedInferd, target: str) -> None:
    async with AsyncInferenceClient(target) as client:
        generation = client.generate("endless")
        reader = asyncio.create_task(generation.text())
        await asyncio.sleep(0.05)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert await asyncio.to_thread(inferd.cancelled.wait, 5)


async def test_async_a_cancelled_unary_call_is_cancelled_on_the_server(inferd: ScriptedInferd, target: str) -> None:
    async with AsyncInferenceClient(target) as client:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.tokenize("hang"), 0.1)
        assert await asyncio.to_thread(inferd.cancelled.wait, 5)


async def test_async_a_refused_request_raises_the_servers_error(inferd: ScriptedInferd, target: str) -> None:
    async with AsyncInferenceClient(target) as client:
        with pytest.raises(PagepoolError, match="max_tokens is -1"):
            await client.generate("hi", max_tokens=-1).text()


def test_prompts_and_options_become_the_request_they_name() -> None:
    messages = [{"role": "user", "content": "hi"}]
    request = generate_request(None, messages, None, {"temperature": 0.0, "max_tokens": 5, "stop": "end", "top_k": 3})
    assert request.chat.messages[0].content == "hi"
    assert request.sampling.HasField("temperature")
    assert not request.sampling.HasField("top_p")
    assert (request.sampling.temperature, request.sampling.top_k, request.max_tokens) == (0.0, 3, 5)
    assert list(request.stop) == ["end"]
    assert list(unpack(generate_request(None, None, [1, 2], {}).tokens.packed_token_ids)) == [1, 2]
    request = generate_request(
        "a", None, None, {"logit_bias": {7: -100, 2: 0.5}, "repetition_penalty": 1.5, "logprobs": 0}
    )
    assert not request.HasField("speculate_tokens")
    assert generate_request("a", None, None, {"speculate_tokens": 0}).HasField("speculate_tokens")
    assert dict(request.sampling.logit_bias) == {7: -100.0, 2: 0.5}
    assert request.sampling.repetition_penalty == 1.5
    assert (request.HasField("logprobs"), request.HasField("prompt_logprobs")) == (True, False)
    assert generate_request("<x>", None, None, {"parse_special_tokens": True}).text.parse_special_tokens


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((None, None, None), {}, "prompt is not given, but must be exactly one of"),
        (("a", None, [1]), {}, "prompt is prompt and token_ids, but must be exactly one of"),
        ((None, None, [-1]), {}, "token_ids is .*unsigned 32-bit"),
        ((None, [{"role": "user"}], None), {}, r"messages\[0\] is \['role'\], but must be a mapping"),
        (("a", None, None), {"max_tokens": 1 << 40}, "max_tokens is 1099511627776"),
        (("a", None, None), {"temperature": "hot"}, "temperature is 'hot'"),
        (("a", None, None), {"logit_bias": {"the": 1.0}}, "logit_bias is {'the': 1.0}"),
        (("a", None, None), {"logit_bias": {-1: 1.0}}, "logit_bias is {-1: 1.0}"),
        (("a", None, None), {"logit_bias": {1: "much"}}, "logit_bias is {1: 'much'}"),
        (("a", None, None), {"logprobs": -1}, "logprobs is -1"),
    ],
)
def test_what_does_not_fit_a_request_is_named(arguments: Any, options: Any, message: str) -> None:
    with pytest.raises(PagepoolError, match=message) as caught:
        generate_request(arguments[0], arguments[1], arguments[2], options)
    assert caught.value.reason is Reason.INVALID_FIELD


def test_listing_walks_the_pages(memd: ScriptedMemd, target: str) -> None:
    with PoolClient(target) as client:
        assert [block.block_id for block in client.blocks(page_size=2)] == [1, 2, 3, 4, 5]
        assert client.pool().epoch == 3


def test_a_dropped_watch_is_cancelled(memd: ScriptedMemd, target: str) -> None:
    with PoolClient(target) as client:
        for pool in client.watch():
            assert pool.epoch == 3
            break
        assert memd.cancelled.wait(5)


def test_a_lease_renews_itself_and_is_released_at_the_end(memd: ScriptedMemd, target: str) -> None:
    with PoolClient(target) as client:
        with client.lease(ttl_s=0.3, holder="me") as lease:
            assert (lease.lease_id, lease.epoch, lease.lease.holder) == (8, 3, "me")
            time.sleep(0.35)
            assert memd.renewals >= 2
            assert not memd.released.is_set()
        assert memd.released.is_set()


def test_a_dropped_lease_is_released(memd: ScriptedMemd, target: str) -> None:
    with PoolClient(target) as client:
        client.lease()
        assert memd.released.wait(5)


def test_a_lost_lease_says_so_at_the_next_call(memd: ScriptedMemd, target: str) -> None:
    memd.lease_ends = PagepoolError(Reason.LEASE_NOT_FOUND, "lease 8 is gone")
    with PoolClient(target) as client, client.lease() as lease:
        time.sleep(0.2)
        with pytest.raises(PagepoolError, match="lease 8 is gone"):
            lease.allocate(1)
    assert memd.allocations == []
    assert not memd.released.is_set()


def test_a_change_that_is_repeated_carries_one_request_id(memd: ScriptedMemd, target: str) -> None:
    memd.unavailable = 1
    with PoolClient(target) as client, client.lease() as lease:
        assert list(lease.allocate(2).block_ids) == [0, 1]
        lease.allocate(1)
    first, again, other = memd.allocations
    assert first == again
    assert len({first.request_id, other.request_id, ""}) == 3


async def test_async_the_pool_client_lists_watches_and_leases(memd: ScriptedMemd, target: str) -> None:
    async with AsyncPoolClient(target) as client:
        assert [block.block_id async for block in client.blocks()] == [1, 2, 3, 4, 5]
        async for pool in client.watch():
            assert pool.epoch == 3
            break
        assert await asyncio.to_thread(memd.cancelled.wait, 5)
        async with await client.lease(holder="me") as lease:
            await asyncio.sleep(0.25)
            assert memd.renewals >= 1
            assert list((await lease.allocate(2)).block_ids) == [0, 1]
        assert memd.released.is_set()


async def test_async_a_dropped_lease_is_released(memd: ScriptedMemd, target: str) -> None:
    async with AsyncPoolClient(target) as client:
        await client.lease()
        assert await asyncio.to_thread(memd.released.wait, 5)


@pytest.mark.parametrize("call", [lambda client: client.pool(), lambda client: next(client.watch())])
def test_a_daemon_that_is_not_there_is_named_with_the_way_out(call: Callable[[Any], Any], target: str) -> None:
    with PoolClient(target) as client, pytest.raises(ForeignError, match=r"nothing answers at unix:.*pagepool up"):
        call(client)


def test_closing_from_another_thread_ends_the_reading(inferd: ScriptedInferd, target: str) -> None:
    with InferenceClient(target) as client:
        generation = client.generate("endless")
        threading.Timer(0.05, generation.close).start()
        assert generation.text().startswith("x")
        assert inferd.cancelled.wait(5)


async def test_async_closing_from_another_task_ends_the_reading(inferd: ScriptedInferd, target: str) -> None:
    async with AsyncInferenceClient(target) as client:
        generation = client.generate("endless")
        asyncio.get_running_loop().call_later(0.05, generation.close)
        assert (await generation.text()).startswith("x")
        assert await asyncio.to_thread(inferd.cancelled.wait, 5)
