"""GenerationService over a real gRPC server and a real channel, with an engine that does what a test tells it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from inferd.channel import EngineChannel, FrontChannel
from inferd.config import InferdConfig
from inferd.core.messages import (
    LOGITS_FIELDS,
    Adjustments,
    Cancel,
    Counters,
    Ending,
    EngineState,
    Failed,
    Finished,
    ModelCard,
    PromptLogprobs,
    ScoredTokens,
    Shutdown,
    Submit,
    TokenLogprobs,
    Tokens,
    Used,
)
from inferd.front import live
from inferd.text.tokenizer import CHAT_FILE, TOKENIZER_FILE, Tokenizer
from pagepool.errors import PagepoolError, Reason
from pagepool.inferd.v1 import generation_service_pb2 as pb
from pagepool.inferd.v1.generation_service_pb2_grpc import GenerationServiceStub
from pagepool.listen import UnixListener
from pagepool.serve import Servers
from pagepool.status import from_rpc_error
from pagepool.token_ids import pack

CONTEXT = 120_000
SERVING = EngineState(
    "serving",
    pool_epoch=7,
    block_size=16,
    num_blocks=99,
    running=2,
    waiting=1,
    counters=Counters(steps=5, prefix_waits=4, prefix_waits_overdue=3),
    awaiting_prefix=1,
)
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|user|>", "<|assistant|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        ["hello world"], trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, special_tokens=special)
    )
    folder = tmp_path_factory.mktemp("tokenizer")
    backend.save(str(folder / TOKENIZER_FILE))
    (folder / CHAT_FILE).write_text(json.dumps({"template": TEMPLATE, "special_tokens": {}}))
    return folder


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


Script = Callable[["ScriptedEngine", Any], None]


class ScriptedEngine:
    """An EngineLife whose engine runs a script on each message, on a thread as the real one's channel does."""

    def __init__(self, script: Script) -> None:
        self.heard: asyncio.Queue[Any] = asyncio.Queue()
        self._script = script
        self._loop = asyncio.get_running_loop()
        self._code: asyncio.Future[int] = self._loop.create_future()
        ours, theirs = socket.socketpair()
        self._ours = ours
        self._end = EngineChannel(theirs)
        self.killed = False
        self.stops_when_told = True

    async def open(self) -> ScriptedEngine:
        self.channel = await FrontChannel.open(self._ours)
        self._end.start(self._hear)
        return self

    def _hear(self, message: Any) -> None:
        if message is not None:
            self._loop.call_soon_threadsafe(self.heard.put_nowait, message)
            self._script(self, message)
            if isinstance(message, Shutdown) and self.stops_when_told:
                self.exit(0)

    def send(self, *messages: Any) -> None:
        for message in messages:
            self._end.send(message)

    def exit(self, code: int) -> None:
        """Writes what is to be written, closes the channel and ends."""
        self._end.close()
        self._loop.call_soon_threadsafe(lambda: self._code.done() or self._code.set_result(code))

    async def expect(self, kind: type) -> Any:
        async with asyncio.timeout(10):
            while not isinstance(message := await self.heard.get(), kind):
                pass
        return message

    async def wait(self) -> int:
        return await asyncio.shield(self._code)

    def kill(self) -> None:
        self.killed = True
        self._end.close()
        if not self._code.done():
            self._code.set_result(-9)


class World:
    """A front with its engines and a client."""

    def __init__(self, socket_path: Path) -> None:
        self.engines: list[ScriptedEngine] = []
        self.launched = asyncio.Event()
        self.stop = asyncio.Event()
        self.channel = grpc.aio.insecure_channel(f"unix:{socket_path}")
        self.stub = GenerationServiceStub(self.channel)
        self.life: asyncio.Task[None]

    @property
    def engine(self) -> ScriptedEngine:
        return self.engines[-1]

    async def health(self) -> int:
        stub = health_pb2_grpc.HealthStub(self.channel)
        request = health_pb2.HealthCheckRequest(service="pagepool.inferd.v1.GenerationService")
        return (await stub.Check(request, wait_for_ready=True, timeout=10)).status

    async def until_health_is(self, status: int) -> None:
        request = health_pb2.HealthCheckRequest(service="pagepool.inferd.v1.GenerationService")
        watch = health_pb2_grpc.HealthStub(self.channel).Watch(request, wait_for_ready=True, timeout=10)
        while (await watch.read()).status != status:
            pass
        watch.cancel()

    async def until_serving(self) -> None:
        await self.until_health_is(health_pb2.HealthCheckResponse.SERVING)


def ignore(engine: ScriptedEngine, message: Any) -> None:
    """A script that does nothing."""


@asynccontextmanager
async def world(tmp_path: Path, folder: Path, script: Script = ignore, *opening: Any) -> AsyncIterator[World]:
    """A front in its own folder; `opening` is what each engine says first, a card and SERVING unless told otherwise."""
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    card = ModelCard("/model", str(folder), "LlamaForCausalLM", CONTEXT, 280, "float32", [0], b"\x01" * 32)
    path = runtime / "inferd.sock"
    config = InferdConfig(listen=(UnixListener(path),), memd="unix:/nowhere", name="w", drain_grace=1.0)
    made = World(path)

    async def launch() -> ScriptedEngine:
        engine = await ScriptedEngine(script).open()
        made.engines.append(engine)
        made.launched.set()
        engine.send(*(opening or (card, SERVING)))
        return engine

    made.life = asyncio.create_task(live(config, launch, made.stop))
    try:
        if not opening:
            await made.until_serving()
        yield made
    finally:
        await made.channel.close()
        made.stop.set()
        await asyncio.wait_for(asyncio.gather(made.life, return_exceptions=True), 10)


def used(generated: int = 0) -> Used:
    return Used(3, 2, generated, 0.25, 0.5, 1.5)


def saying(tokenizer: Tokenizer, text: str, ending: Ending = Ending.END_OF_SEQUENCE, stop: int | None = None) -> Script:
    """A script that answers each request with a text, a token a message."""

    def script(engine: ScriptedEngine, message: Any) -> None:
        if isinstance(message, Submit):
            ids = tokenizer.encode(text)
            engine.send(*(Tokens([(message.request, [token])]) for token in ids))
            engine.send(Finished(message.request, ending, used(len(ids)), stop))
        elif isinstance(message, Cancel):
            engine.send(Finished(message.request, Ending.CANCELLED, used(99)))

    return script


def text_request(text: str = "hello", **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=pb.TextPrompt(text=text), **fields)


async def collect(call: Any) -> tuple[pb.GenerateStarted, str, list[int], pb.GenerateFinished]:
    """A whole stream; started first, finished last, or the test fails."""
    events = await rest(call)
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds == ["started", *["tokens"] * (len(kinds) - 2), "finished"]
    tokens = [event.tokens for event in events[1:-1]]
    ids = [token for part in tokens for token in part.token_ids]
    return events[0].started, "".join(part.text for part in tokens), ids, events[-1].finished


async def rest(call: Any) -> list[pb.GenerateResponse]:
    """What a stream still has to say."""
    events = []
    while (event := await call.read()) is not grpc.aio.EOF:
        events.append(event)
    return events


async def failure(call: Any) -> PagepoolError:
    answer = rest(call) if hasattr(call, "read") else call
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer
    return from_rpc_error(caught.value)


async def test_a_stream_is_started_then_tokens_then_finished(
    tmp_path: Path, folder: Path, tokenizer: Tokenizer
) -> None:
    text = "Hello wörld 🦊, こんにちは"
    async with world(tmp_path, folder, saying(tokenizer, text)) as here:
        started, shown, ids, finished = await collect(here.stub.Generate(text_request(request_id="mine")))
        assert (started.request_id, started.prompt_tokens) == ("mine", len(tokenizer.encode("hello")))
        assert (shown, ids) == (text, tokenizer.encode(text))
        assert finished.reason == pb.FINISH_REASON_END_OF_SEQUENCE
        usage = finished.usage
        assert (usage.prompt_tokens, usage.cached_tokens, usage.generated_tokens) == (3, 2, len(ids))
        assert (usage.queue_time.nanos, usage.prefill_time.nanos, usage.decode_time.ToSeconds()) == (25e7, 5e8, 1)


async def test_what_is_asked_for_reaches_the_engine(tmp_path: Path, folder: Path, tokenizer: Tokenizer) -> None:
    async with world(tmp_path, folder, saying(tokenizer, "x")) as here:
        sampling = pb.SamplingParams(temperature=0.5, top_p=0.25, top_k=7, min_p=0.125, seed=2**64 - 1, sample_index=3)
        request = pb.GenerateRequest(
            tokens=pb.TokenPrompt(token_ids=[5, 6]),
            sampling=sampling,
            max_tokens=9,
            stop_token_ids=[279],
            ignore_eos=True,
            cache_salt=b"\x00\xff",
            priority=-2,
        )
        started, *_ = await collect(here.stub.Generate(request))
        submit = await here.engine.expect(Submit)
        assert list(submit.prompt) == [5, 6]
        assert (submit.max_tokens, submit.stop_token_ids, submit.ignore_eos) == (9, [279], True)
        assert (submit.salt, submit.priority) == (b"\x00\xff", -2)
        chosen = submit.sampling
        assert (chosen.temperature, chosen.top_p, chosen.top_k, chosen.min_p) == (0.5, 0.25, 7, 0.125)
        assert (chosen.seed, chosen.sample_index, started.seed) == (2**64 - 1, 3, 2**64 - 1)


async def test_what_is_not_given_has_its_default_and_a_seed_is_drawn_and_told(
    tmp_path: Path, folder: Path, tokenizer: Tokenizer
) -> None:
    async with world(tmp_path, folder, saying(tokenizer, "x")) as here:
        seeds, names = set(), set()
        for _ in range(3):
            started, *_ = await collect(here.stub.Generate(text_request()))
            submit = await here.engine.expect(Submit)
            assert (submit.max_tokens, submit.sampling.temperature, submit.sampling.top_p) == (256, 1.0, 1.0)
            assert submit.sampling.seed == started.seed
            seeds.add(started.seed)
            names.add(started.request_id)
        assert len(seeds) == len(names) == 3


async def test_near_the_end_of_the_context_the_default_is_what_is_left(
    tmp_path: Path, folder: Path, tokenizer: Tokenizer
) -> None:
    async with world(tmp_path, folder, saying(tokenizer, "x")) as here:
        tokens = pb.TokenPrompt(token_ids=[5] * (CONTEXT - 10))
        await collect(here.stub.Generate(pb.GenerateRequest(tokens=tokens)))
        assert (await here.engine.expect(Submit)).max_tokens == 10


async def test_packed_token_ids_are_the_same_prompt(tmp_path: Path, folder: Path, tokenizer: Tokenizer) -> None:
    async with world(tmp_path, folder, saying(tokenizer, "x")) as here:
        for tokens in (pb.TokenPrompt(token_ids=[5, 260, 7]), pb.TokenPrompt(packed_token_ids=pack([5, 260, 7]))):
            await collect(here.stub.Generate(pb.GenerateRequest(tokens=tokens)))
            assert list((await here.engine.expect(Submit)).prompt) == [5, 260, 7]


async def test_a_conversation_becomes_the_templates_prompt(tmp_path: Path, folder: Path, tokenizer: Tokenizer) -> None:
    async with world(tmp_path, folder, saying(tokenizer, "x")) as here:
        messages = [pb.ChatMessage(role="user", content="hi <|end|>")]
        rendered = await here.stub.ApplyChatTemplate(pb.ApplyChatTemplateRequest(messages=messages))
        await collect(here.stub.Generate(pb.GenerateRequest(chat=pb.ChatPrompt(messages=messages))))
        assert rendered.text == "<|user|>hi <|end|><|end|><|assistant|>"
        assert list(rendered.token_ids) == list((await here.engine.expect(Submit)).prompt)
        assert list(rendered.token_ids).count(0) == 1, "the template's own, not the user's"


SAMPLING, INVALID = "sampling", Reason.INVALID_FIELD
BAD_REQUESTS = {
    "no prompt": (pb.GenerateRequest(), INVALID, "prompt"),
    "empty text": (text_request(""), Reason.PROMPT_EMPTY, "text.text"),
    "no tokens": (pb.GenerateRequest(tokens=pb.TokenPrompt()), Reason.PROMPT_EMPTY, "prompt"),
    "no messages": (pb.GenerateRequest(chat=pb.ChatPrompt()), INVALID, "chat.messages"),
    "no role": (pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage()])), INVALID, "chat.messages[0].role"),
    "refused role": (
        pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="tool")])),
        Reason.CHAT_TEMPLATE_REFUSED,
        "chat.messages",
    ),
    "unknown token": (pb.GenerateRequest(tokens=pb.TokenPrompt(token_ids=[1, 280])), INVALID, "tokens.token_ids[1]"),
    "unknown packed token": (
        pb.GenerateRequest(tokens=pb.TokenPrompt(packed_token_ids=pack([1, 280]))),
        INVALID,
        "tokens.packed_token_ids[1]",
    ),
    "part of a packed token": (
        pb.GenerateRequest(tokens=pb.TokenPrompt(packed_token_ids=bytes(7))),
        INVALID,
        "tokens.packed_token_ids",
    ),
    "tokens twice": (
        pb.GenerateRequest(tokens=pb.TokenPrompt(token_ids=[1], packed_token_ids=pack([1]))),
        INVALID,
        "tokens.packed_token_ids",
    ),
    "whole context": (
        pb.GenerateRequest(tokens=pb.TokenPrompt(token_ids=[1] * CONTEXT)),
        Reason.PROMPT_TOO_LONG,
        "prompt",
    ),
    "endless tokens": (
        pb.GenerateRequest(tokens=pb.TokenPrompt(token_ids=[280] * (CONTEXT + 1))),
        Reason.PROMPT_TOO_LONG,
        "prompt",
    ),
    "prompt and answer": (text_request(max_tokens=CONTEXT), Reason.PROMPT_TOO_LONG, "prompt"),
    "endless text": (text_request("x" * 60 * CONTEXT), Reason.PROMPT_TOO_LONG, "prompt"),
    "max_tokens 0": (text_request(max_tokens=0), INVALID, "max_tokens"),
    "max_tokens negative": (text_request(max_tokens=-1), INVALID, "max_tokens"),
    "temperature NaN": (text_request(sampling={"temperature": math.nan}), INVALID, "sampling.temperature"),
    "temperature negative": (text_request(sampling={"temperature": -0.5}), INVALID, "sampling.temperature"),
    "temperature infinite": (text_request(sampling={"temperature": math.inf}), INVALID, "sampling.temperature"),
    "temperature 101": (text_request(sampling={"temperature": 101}), INVALID, "sampling.temperature"),
    "top_p 0": (text_request(sampling={"top_p": 0}), INVALID, "sampling.top_p"),
    "top_p above 1": (text_request(sampling={"top_p": 1.5}), INVALID, "sampling.top_p"),
    "top_p NaN": (text_request(sampling={"top_p": math.nan}), INVALID, "sampling.top_p"),
    "top_k negative": (text_request(sampling={"top_k": -1}), INVALID, "sampling.top_k"),
    "min_p negative": (text_request(sampling={"min_p": -0.1}), INVALID, "sampling.min_p"),
    "min_p NaN": (text_request(sampling={"min_p": math.nan}), INVALID, "sampling.min_p"),
    "repetition_penalty 0": (
        text_request(sampling={"repetition_penalty": 0}), INVALID, "sampling.repetition_penalty"
    ),
    "repetition_penalty NaN": (
        text_request(sampling={"repetition_penalty": math.nan}), INVALID, "sampling.repetition_penalty"
    ),
    "repetition_penalty 101": (
        text_request(sampling={"repetition_penalty": 101}), INVALID, "sampling.repetition_penalty"
    ),
    "presence_penalty 2.5": (text_request(sampling={"presence_penalty": 2.5}), INVALID, "sampling.presence_penalty"),
    "presence_penalty NaN": (
        text_request(sampling={"presence_penalty": math.nan}), INVALID, "sampling.presence_penalty"
    ),
    "frequency_penalty -3": (text_request(sampling={"frequency_penalty": -3}), INVALID, "sampling.frequency_penalty"),
    "frequency_penalty infinite": (
        text_request(sampling={"frequency_penalty": math.inf}), INVALID, "sampling.frequency_penalty"
    ),
    "bias of no token": (text_request(sampling={"logit_bias": {280: 1}}), INVALID, "sampling.logit_bias[280]"),
    "bias 101": (text_request(sampling={"logit_bias": {3: 1, 4: 101}}), INVALID, "sampling.logit_bias[4]"),
    "bias NaN": (text_request(sampling={"logit_bias": {3: math.nan}}), INVALID, "sampling.logit_bias[3]"),
    "bias minus infinity": (text_request(sampling={"logit_bias": {3: -math.inf}}), INVALID, "sampling.logit_bias[3]"),
    "too many biases": (
        text_request(sampling={"logit_bias": dict.fromkeys(range(1025), 1)}), INVALID, "sampling.logit_bias"
    ),
    "logprobs 21": (text_request(logprobs=21), INVALID, "logprobs"),
    "prompt_logprobs 21": (text_request(prompt_logprobs=21), INVALID, "prompt_logprobs"),
    "speculate_tokens 33": (text_request(speculate_tokens=33), INVALID, "speculate_tokens"),
    "speculate_tokens 2**32 - 1": (text_request(speculate_tokens=2**32 - 1), INVALID, "speculate_tokens"),
    "unknown stop token": (text_request(stop_token_ids=[3, 280]), INVALID, "stop_token_ids[1]"),
    "too many stop tokens": (text_request(stop_token_ids=[3] * 65), INVALID, "stop_token_ids"),
    "empty stop": (text_request(stop=["a", ""]), INVALID, "stop[1]"),
    "long stop": (text_request(stop=["é" * 129]), INVALID, "stop[0]"),
    "too many stops": (text_request(stop=["a"] * 17), INVALID, "stop"),
    "long request_id": (text_request(request_id="x" * 129), INVALID, "request_id"),
    "long salt": (text_request(cache_salt=b"x" * 65), INVALID, "cache_salt"),
    "high priority": (text_request(priority=101), INVALID, "priority"),
    "low priority": (text_request(priority=-(2**31)), INVALID, "priority"),
}  # fmt: skip


async def test_bad_requests_are_refused_by_field_value_limit_and_way_out(
    tmp_path: Path, folder: Path, tokenizer: Tokenizer
) -> None:
    async with world(tmp_path, folder, saying(tokenizer, "fine")) as here:
        for name, (request, reason, field) in BAD_REQUESTS.items():
            error = await failure(here.stub.Generate(request))
            assert (name, error.reason, error.field) == (name, reason, field)
            assert error.message.partition(";")[2], f"{name}: the message names a way out"
            assert error.message.startswith((field.partition(".")[0], "the model's chat template")), name
        _, shown, *_ = await collect(here.stub.Generate(text_request()))
        assert shown == "fine"
        assert list((await here.engine.expect(Submit)).prompt) == tokenizer.encode("hello"), (
            "no bad one got to the engine"
        )


async def test_limits_themselves_are_allowed(tmp_path: Path, folder: Path, tokenizer: Tokenizer) -> None:
    async with world(tmp_path, folder, saying(tokenizer, "fine")) as here:
        request = text_request(
            request_id="é" * 64,
            max_tokens=CONTEXT - len(tokenizer.encode("hello")),
            stop=["é" * 128] * 16,
            stop_token_ids=[279] * 64,
            cache_salt=b"x" * 64,
            priority=-100,
            sampling={"temperature": 100, "top_p": 1, "top_k": 0, "min_p": 1, "repetition_penalty": 100}
            | {"presence_penalty": 2, "frequency_penalty": -2, "logit_bias": {279: -100, 0: 100}},
            logprobs=20,
            prompt_logprobs=20,
            speculate_tokens=32,
        )
        _, shown, *_ = await collect(here.stub.Generate(request))
        assert shown == "fine"


async def test_a_stop_text_ends_the_request_here_and_in_the_engine(
    tmp_path: Path, folder: Path, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode("one two STOP three")

    def script(engine: ScriptedEngine, message: Any) -> None:
        if isinstance(message, Submit):
            engine.send(*(Tokens([(message.request, [token])]) for token in ids))
        elif isinstance(message, Cancel):
            engine.send(Finished(message.request, Ending.CANCELLED, used(99)))

    async with world(tmp_path, folder, script) as here:
        _, shown, got, finished = await collect(here.stub.Generate(text_request(stop=["never", "two STOP"])))
        assert (await here.engine.expect(Cancel)).request
        assert shown == "one "
        assert (finished.reason, finished.stop_text) == (pb.FINISH_REASON_STOP, "two STOP")
        assert tokenizer.decode(got) == "one two STOP"
        assert finished.usage.generated_tokens == len(got)


async def test_text_held_back_for_a_stop_text_is_shown_at_the_end(
    tmp_path: Path, folder: Path, tokenizer: Tokenizer
) -> None:
    async with world(tmp_path, folder, saying(tokenizer, "one ST", Ending.MAX_TOKENS)) as here:
        _, shown, got, finished = await collect(here.stub.Generate(text_request(stop=["STOP"])))
        assert (shown, tokenizer.decode(got)) == ("one ST", "one ST")
        assert (finished.reason, finished.stop_text) == (pb.FINISH_REASON_MAX_TOKENS, "")


async def test_a_stop_token_is_named(tmp_path: Path, folder: Path, tokenizer: Tokenizer) -> None:
    async with world(tmp_path, folder, saying(tokenizer, "x", Ending.STOP_TOKEN, 7)) as here:
        *_, finished = await collect(here.stub.Generate(text_request()))
        assert (finished.reason, finished.stop_token_id) == (pb.FINISH_REASON_STOP, 7)


async def test_half_a_character_at_the_end_is_shown_as_such(tmp_path: Path, folder: Path, tokenizer: Tokenizer) -> None:
    fox = tokenizer.encode("a🦊")[:-1]

    def script(engine: ScriptedEngine, message: Any) -> None:
        if isinstance(message, Submit):
            engine.send(Tokens([(message.request, fox)]), Finished(message.request, Ending.MAX_TOKENS, used()))

    async with world(tmp_path, folder, script) as here:
        _, shown, got, _ = await collect(here.stub.Generate(text_request()))
        assert (shown, got) == ("a\N{REPLACEMENT CHARACTER}", fox)


async def test_cancelling_a_call_cancels_the_request(tmp_path: Path, folder: Path) -> None:
    async with world(tmp_path, folder) as here:
        call = here.stub.Generate(text_request())
        assert (await call.read()).WhichOneof("event") == "started"
        submit = await here.engine.expect(Submit)
        call.cancel()
        assert (await here.engine.expect(Cancel)).request == submit.request


async def test_a_deadline_cancels_the_request(tmp_path: Path, folder: Path) -> None:
    async with world(tmp_path, folder) as here:
        call = here.stub.Generate(text_request(), timeout=0.3)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rest(call)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        submit = await here.engine.expect(Submit)
        assert (await here.engine.expect(Cancel)).request == submit.request


async def test_a_finished_request_is_not_cancelled(tmp_path: Path, folder: Path, tokenizer: Tokenizer) -> None:
    async with world(tmp_path, folder, saying(tokenizer, "x")) as here:
        await collect(here.stub.Generate(text_request()))
        await collect(here.stub.Generate(text_request()))
        heard = [here.engine.heard.get_nowait() for _ in range(here.engine.heard.qsize())]
        assert [type(message) for message in heard] == [Submit, Submit]


async def test_a_slow_reader_gets_every_token_in_few_messages_and_blocks_nobody(
    tmp_path: Path, folder: Path, tokenizer: Tokenizer
) -> None:
    letters = tokenizer.encode("abcdefgh")
    flood = letters * 12_500

    def script(engine: ScriptedEngine, message: Any) -> None:
        if isinstance(message, Submit) and message.max_tokens == len(flood):
            engine.send(*(Tokens([(message.request, letters)]) for _ in range(len(flood) // len(letters))))
            engine.send(Finished(message.request, Ending.MAX_TOKENS, used()))
        else:
            saying(tokenizer, "quick")(engine, message)

    async with world(tmp_path, folder, script) as here:
        slow = here.stub.Generate(text_request(max_tokens=len(flood)))
        assert (await slow.read()).WhichOneof("event") == "started"
        for _ in range(3):
            async with asyncio.timeout(5):
                _, shown, *_ = await collect(here.stub.Generate(text_request()))
            assert shown == "quick"
        events = await rest(slow)
        ids = [token for event in events for token in event.tokens.token_ids]
        assert ids == flood
        assert events[-1].finished.usage.generated_tokens == len(flood)
        assert len(events) < len(flood) / len(letters) / 2, "tokens that waited came together"


async def test_an_engine_that_dies_fails_its_requests_and_is_started_again(
    tmp_path: Path, folder: Path, tokenizer: Tokenizer
) -> None:
    async with world(tmp_path, folder, saying(tokenizer, "alive")) as here:
        first = here.engine
        first._script = lambda engine, message: None
        calls = [here.stub.Generate(text_request()) for _ in range(3)]
        for call in calls:
            assert (await call.read()).WhichOneof("event") == "started"
        first.exit(139)
        for call in calls:
            error = await failure(call)
            assert (error.reason, error.code.name) == (Reason.ENGINE_FAILED, "INTERNAL")
            assert "look into the worker's log" in error.message
        early = await failure(here.stub.Generate(text_request()))
        assert early.reason is Reason.ENGINE_STARTING
        assert early.retry_after_s
        assert await here.health() == health_pb2.HealthCheckResponse.NOT_SERVING
        await here.until_serving()
        assert len(here.engines) == 2
        _, shown, *_ = await collect(here.stub.Generate(text_request()))
        assert shown == "alive"


async def test_while_the_engine_starts_calls_are_told_to_come_back(tmp_path: Path, folder: Path) -> None:
    async with world(tmp_path, folder, ignore, EngineState("loading", "reading weights")) as here:
        assert await here.health() == health_pb2.HealthCheckResponse.NOT_SERVING
        for call in (
            here.stub.Generate(text_request()),
            here.stub.Tokenize(pb.TokenizeRequest(text="x")),
            here.stub.GetModel(pb.GetModelRequest()),
        ):
            error = await failure(call)
            assert (error.reason, error.code.name) == (Reason.ENGINE_STARTING, "UNAVAILABLE")
            assert error.retry_after_s


async def test_a_known_model_tokenizes_while_its_weights_are_loaded(
    tmp_path: Path, folder: Path, tokenizer: Tokenizer
) -> None:
    card = ModelCard("/model", str(folder), "LlamaForCausalLM", CONTEXT, 280, "float32", [0], b"\x01" * 32)
    async with world(tmp_path, folder, ignore, card, EngineState("loading")) as here:
        async with asyncio.timeout(10):
            ids: list[int] = []
            while not ids:
                with suppress(grpc.aio.AioRpcError):
                    ids = list((await here.stub.Tokenize(pb.TokenizeRequest(text="hello"))).token_ids)
        assert ids == tokenizer.encode("hello")
        assert (await failure(here.stub.Generate(text_request()))).reason is Reason.ENGINE_STARTING


async def test_without_memd_requests_are_told_that_the_pool_is_lost(tmp_path: Path, folder: Path) -> None:
    async with world(tmp_path, folder) as here:
        here.engine.send(EngineState("attaching", "memd is gone"))

        await here.until_health_is(health_pb2.HealthCheckResponse.NOT_SERVING)
        error = await failure(here.stub.Generate(text_request()))
        assert (error.reason, error.code.name) == (Reason.POOL_LOST, "UNAVAILABLE")
        here.engine.send(SERVING)
        await here.until_serving()


async def test_the_engines_refusals_reach_the_caller_whole(tmp_path: Path, folder: Path) -> None:
    def script(engine: ScriptedEngine, message: Any) -> None:
        if isinstance(message, Submit):
            engine.send(Failed(message.request, "QUEUE_FULL", "9 wait; retry", "", 2.5, {"waiting": "9"}))

    async with world(tmp_path, folder, script) as here:
        error = await failure(here.stub.Generate(text_request()))
        assert (error.reason, error.message, error.retry_after_s) == (Reason.QUEUE_FULL, "9 wait; retry", 2.5)
        assert error.metadata["waiting"] == "9"


async def test_an_engine_that_cannot_start_ends_the_front_with_its_reason(tmp_path: Path, folder: Path) -> None:
    refusal = Failed(0, "GEOMETRY_MISMATCH", "the pool has other weights", "", None, {})
    async with world(tmp_path, folder, ignore, refusal) as here:
        await here.launched.wait()
        here.engine.exit(2)
        with pytest.raises(PagepoolError, match="the pool has other weights") as caught:
            await asyncio.wait_for(here.life, 10)
        assert caught.value.reason is Reason.GEOMETRY_MISMATCH


async def test_an_engine_that_dies_before_it_served_ends_the_front(tmp_path: Path, folder: Path) -> None:
    async with world(tmp_path, folder, ignore, EngineState("loading")) as here:
        await here.launched.wait()
        here.engine.exit(1)
        with pytest.raises(PagepoolError, match="exit code 1"):
            await asyncio.wait_for(here.life, 10)
        assert len(here.engines) == 1


async def test_stopping_lets_running_requests_end_and_takes_no_new_ones(
    tmp_path: Path, folder: Path, tokenizer: Tokenizer
) -> None:
    async with world(tmp_path, folder) as here:
        call = here.stub.Generate(text_request())
        assert (await call.read()).WhichOneof("event") == "started"
        submit = await here.engine.expect(Submit)
        here.engine.stops_when_told = False
        here.stop.set()
        assert (await here.engine.expect(Shutdown)).grace_s == 1.0
        assert await here.health() == health_pb2.HealthCheckResponse.NOT_SERVING
        assert (await failure(here.stub.Generate(text_request()))).reason is Reason.DRAINING
        here.engine.send(Tokens([(submit.request, tokenizer.encode("bye"))]))
        here.engine.send(Finished(submit.request, Ending.MAX_TOKENS, used()))
        here.engine.exit(0)
        events = await rest(call)
        assert "".join(event.tokens.text for event in events) == "bye"
        assert events[-1].finished.reason == pb.FINISH_REASON_MAX_TOKENS
        await asyncio.wait_for(here.life, 10)


async def test_a_request_that_outlasts_the_grace_ends_in_a_status(tmp_path: Path, folder: Path) -> None:
    async with world(tmp_path, folder) as here:
        call = here.stub.Generate(text_request())
        assert (await call.read()).WhichOneof("event") == "started"
        submit = await here.engine.expect(Submit)
        here.engine.stops_when_told = False
        here.stop.set()
        await here.engine.expect(Shutdown)
        here.engine.send(Finished(submit.request, Ending.CANCELLED, used()))
        assert (await failure(call)).reason is Reason.DRAINING
        here.engine.exit(0)


async def test_a_request_that_waits_for_memd_is_sent_elsewhere_when_the_worker_stops(
    tmp_path: Path, folder: Path
) -> None:
    async with world(tmp_path, folder) as here:
        call = here.stub.Generate(text_request())
        assert (await call.read()).WhichOneof("event") == "started"
        await here.engine.expect(Submit)
        here.engine.send(EngineState("attaching", "memd is gone"))
        await here.until_health_is(health_pb2.HealthCheckResponse.NOT_SERVING)
        here.stop.set()
        assert (await failure(call)).reason is Reason.DRAINING


async def test_an_engine_that_the_same_signal_ends_while_it_starts_is_no_failure(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(tmp_path, folder, ignore, EngineState("loading")) as here:
        await here.launched.wait()

        async def draining(_servers: Servers) -> None:
            here.engine.exit(0)
            await asyncio.sleep(0.2)

        monkeypatch.setattr(Servers, "draining", draining)
        here.stop.set()
        await asyncio.wait([here.life], timeout=10)
        assert here.life.exception() is None


async def test_stopping_while_the_engine_starts_kills_it_at_once(tmp_path: Path, folder: Path) -> None:
    async with world(tmp_path, folder, ignore, EngineState("loading")) as here:
        await here.launched.wait()
        here.stop.set()
        async with asyncio.timeout(1.5):
            await here.life
        assert here.engine.killed


async def test_get_model_describes_model_and_worker(tmp_path: Path, folder: Path) -> None:
    async with world(tmp_path, folder) as here:
        model = await here.stub.GetModel(pb.GetModelRequest())
        assert (model.model, model.architecture, model.dtype) == ("smollm2", "LlamaForCausalLM", "float32")
        assert (model.max_context_tokens, model.vocab_size, list(model.eos_token_ids)) == (CONTEXT, 280, [0])
        assert (model.model_digest, model.has_chat_template) == (b"\x01" * 32, True)
        assert (model.block_size, model.pool_epoch) == (16, 7)
        assert (model.running_requests, model.waiting_requests, model.counters.steps) == (2, 1, 5)
        waits = model.prefix_waiting_requests, model.counters.prefix_waits, model.counters.prefix_waits_overdue
        assert waits == (1, 4, 3)


async def test_tokenize_and_detokenize_are_inverse_and_name_what_is_unknown(
    tmp_path: Path, folder: Path, tokenizer: Tokenizer
) -> None:
    async with world(tmp_path, folder) as here:
        for parse in (False, True):
            request = pb.TokenizeRequest(text="hello<|end|>", parse_special_tokens=parse)
            answer = await here.stub.Tokenize(request)
            assert list(answer.token_ids) == tokenizer.encode("hello<|end|>", parse_special_tokens=parse)
            assert len(answer.pieces) == len(answer.token_ids)
            assert (0 in answer.token_ids) is parse
            text = await here.stub.Detokenize(pb.DetokenizeRequest(token_ids=answer.token_ids))
            assert text.text == "hello<|end|>"
        skipped = await here.stub.Detokenize(
            pb.DetokenizeRequest(token_ids=[*answer.token_ids], skip_special_tokens=True)
        )
        assert skipped.text == "hello"
        error = await failure(here.stub.Detokenize(pb.DetokenizeRequest(token_ids=[1, 280])))
        assert (error.reason, error.field) == (Reason.INVALID_FIELD, "token_ids[1]")


# -- penalties, bias and logprobs


async def test_what_is_asked_of_the_logits_reaches_the_engine(
    tmp_path: Path, folder: Path, tokenizer: Tokenizer
) -> None:
    async with world(tmp_path, folder, saying(tokenizer, "x")) as here:
        penalties = {"repetition_penalty": 1.5, "presence_penalty": -0.5, "frequency_penalty": 0.25}
        asked = text_request(sampling=penalties | {"logit_bias": {7: -100, 3: 0.5}}, logprobs=0, prompt_logprobs=20)
        await collect(here.stub.Generate(asked))
        submit = await here.engine.expect(Submit)
        how = submit.adjustments
        assert dict(zip(how.bias_token_ids, how.biases, strict=True)) == {7: -100.0, 3: 0.5}
        assert (how.repetition_penalty, how.presence_penalty, how.frequency_penalty) == (1.5, -0.5, 0.25)
        assert (submit.logprobs, submit.prompt_logprobs) == (0, 20)
        await collect(here.stub.Generate(text_request(sampling={"frequency_penalty": 0.5})))
        assert (await here.engine.expect(Submit)).adjustments == Adjustments(frequency_penalty=0.5)


@pytest.mark.parametrize(
    "sampling", [{}, {"repetition_penalty": 1}, {"presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}}]
)
async def test_settings_that_do_nothing_ask_nothing_of_the_engine(
    tmp_path: Path, folder: Path, tokenizer: Tokenizer, sampling: Any
) -> None:
    async with world(tmp_path, folder, saying(tokenizer, "x")) as here:
        await collect(here.stub.Generate(text_request(sampling=sampling)))
        submit = await here.engine.expect(Submit)
        assert (submit.adjustments, submit.logprobs, submit.prompt_logprobs) == (None, None, None)


@pytest.mark.parametrize(("asked", "told"), [({}, None), ({"speculate_tokens": 0}, 0), ({"speculate_tokens": 9}, 9)])
async def test_how_much_to_guess_reaches_the_engine_and_what_came_of_it_the_client(
    tmp_path: Path, folder: Path, tokenizer: Tokenizer, asked: dict[str, int], told: int | None
) -> None:
    ids = tokenizer.encode("x")

    def script(engine: ScriptedEngine, message: Any) -> None:
        if isinstance(message, Submit):
            used_up = dataclasses.replace(used(1), draft_tokens=20, accepted_tokens=11)
            engine.send(Tokens([(message.request, ids)]), Finished(message.request, Ending.MAX_TOKENS, used_up))

    async with world(tmp_path, folder, script) as here:
        *_, finished = await collect(here.stub.Generate(text_request(**asked)))
        assert (await here.engine.expect(Submit)).speculate_tokens == told
        assert (finished.usage.draft_tokens, finished.usage.accepted_tokens) == (20, 11)


WISHES = {
    "sampling.repetition_penalty": {"sampling": {"repetition_penalty": 1.5}},
    "sampling.presence_penalty": {"sampling": {"presence_penalty": 0.5}},
    "sampling.frequency_penalty": {"sampling": {"frequency_penalty": 0.5}},
    "sampling.logit_bias": {"sampling": {"logit_bias": {3: 1}}},
    "logprobs": {"logprobs": 0},
    "prompt_logprobs": {"prompt_logprobs": 0},
    "best_of": {"best_of": 2},
    "beam": {"beam": {"width": 2}},
}


async def test_what_the_engines_device_cannot_do_is_refused_by_field_and_told_beforehand(
    tmp_path: Path, folder: Path, tokenizer: Tokenizer
) -> None:
    card = ModelCard("/model", str(folder), "Llama", CONTEXT, 280, "float32", [0], b"\x01" * 32, [*LOGITS_FIELDS])
    async with world(tmp_path, folder, saying(tokenizer, "fine"), card, SERVING) as here:
        await here.until_serving()
        assert list((await here.stub.GetModel(pb.GetModelRequest())).unsupported_fields) == list(WISHES)
        for field, wish in WISHES.items():
            error = await failure(here.stub.Generate(text_request(**wish)))
            assert (error.reason, error.field) == (Reason.INVALID_FIELD, field)
            assert "device cannot do it yet; leave it out" in error.message
        neutral = {"repetition_penalty": 1, "presence_penalty": 0, "logit_bias": {}}
        assert (await collect(here.stub.Generate(text_request(sampling=neutral))))[1] == "fine"


def scored(token: int, top: int = 2) -> TokenLogprobs:
    return TokenLogprobs(token, -token / 8, list(range(top)), [-0.25 * (each + 1) for each in range(top)])


def expect_like(found: pb.TokenLogprobs, each: TokenLogprobs) -> None:
    assert (found.token_id, list(found.top_token_ids)) == (each.token_id, each.top_token_ids)
    assert (found.logprob, list(found.top_logprobs)) == (each.logprob, each.top_logprobs)


async def test_logprobs_stand_beside_their_tokens_and_the_prompts_before_them(
    tmp_path: Path, folder: Path, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode("Hello wörld 🦊")
    prompt = [scored(token, 1) for token in (9, 8, 7)]

    def script(engine: ScriptedEngine, message: Any) -> None:
        if isinstance(message, Submit):
            engine.send(PromptLogprobs(message.request, 1, prompt[:2]), PromptLogprobs(message.request, 3, prompt[2:]))
            engine.send(*(ScoredTokens([(message.request, [scored(token)])]) for token in ids))
            engine.send(Finished(message.request, Ending.END_OF_SEQUENCE, used(len(ids))))

    async with world(tmp_path, folder, script) as here:
        events = await rest(here.stub.Generate(text_request(logprobs=2, prompt_logprobs=1)))
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds == ["started", "prompt_logprobs", "prompt_logprobs", *["tokens"] * (len(kinds) - 4), "finished"]
    parts = [event.prompt_logprobs for event in events[1:3]]
    assert [part.first_position for part in parts] == [1, 3]
    found = [each for part in parts for each in part.logprobs]
    for each, wanted in zip(found, prompt, strict=True):
        expect_like(each, wanted)
    tokens = [event.tokens for event in events[3:-1]]
    assert "".join(part.text for part in tokens) == "Hello wörld 🦊"
    for part in tokens:
        assert [each.token_id for each in part.logprobs] == list(part.token_ids)
    for each, token in zip([each for part in tokens for each in part.logprobs], ids, strict=True):
        expect_like(each, scored(token))


async def test_logprobs_end_with_the_token_that_completes_a_stop_text(
    tmp_path: Path, folder: Path, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode("one two STOP three")

    def script(engine: ScriptedEngine, message: Any) -> None:
        if isinstance(message, Submit):
            engine.send(ScoredTokens([(message.request, [scored(token) for token in ids])]))
        elif isinstance(message, Cancel):
            engine.send(Finished(message.request, Ending.CANCELLED, used(99)))

    async with world(tmp_path, folder, script) as here:
        events = await rest(here.stub.Generate(text_request(stop=["STOP"], logprobs=2)))
    tokens = [event.tokens for event in events[1:-1]]
    taken = [token for part in tokens for token in part.token_ids]
    assert tokenizer.decode(taken) == "one two STOP"
    assert [each.token_id for part in tokens for each in part.logprobs] == taken


async def test_logprobs_that_pile_up_come_in_messages_that_grpc_takes(
    tmp_path: Path, folder: Path, tokenizer: Tokenizer
) -> None:
    count = 40_000
    ids = [*tokenizer.encode("é"), *tokenizer.encode("a") * count]

    def script(engine: ScriptedEngine, message: Any) -> None:
        if isinstance(message, Submit):
            engine.send(ScoredTokens([(message.request, [scored(token, 20) for token in ids])]))
            engine.send(Finished(message.request, Ending.MAX_TOKENS, used(len(ids))))

    async with world(tmp_path, folder, script) as here:
        events = await rest(here.stub.Generate(text_request(max_tokens=len(ids), logprobs=20)))
    tokens = [event.tokens for event in events[1:-1]]
    assert max(event.ByteSize() for event in events) < 1 << 20
    assert sum(event.ByteSize() for event in events) > 4 << 20
    assert [token for part in tokens for token in part.token_ids] == ids
    assert [each.token_id for part in tokens for each in part.logprobs] == ids
    assert "".join(part.text for part in tokens) == "é" + "a" * count
    assert events[-1].finished.usage.generated_tokens == len(ids)
