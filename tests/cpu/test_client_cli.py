"""The pagepool command, run as a process against scripted servers; and the block map, drawn from plain values."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagekernels.layout import Format, pack_entry
from pagepool.errors import PagepoolError, Reason
from pagepool.inferd.v1 import generation_service_pb2 as pb
from pagepool.inferd.v1 import generation_service_pb2_grpc as pb_grpc
from pagepool.memd.v1.types_pb2 import (
    BLOCK_STATE_CACHED,
    BLOCK_STATE_HELD,
    BLOCK_STATE_QUARANTINED,
    Block,
    BlockState,
    BlockTable,
    Pool,
)
from pagepool.status import to_status
from pagepool_client.cli.block_map import Snapshot, draw
from pagepool_client.cli.generate import KINDS
from tests.cpu.cli_rig import Start, default_signals, served, start

__all__ = ["default_signals", "start"]


class ScriptedInferd(pb_grpc.GenerationServiceServicer):
    """Echoes the last message word by word; "endless" goes on until it is cancelled, "refuse" is refused."""

    def __init__(self) -> None:
        self.requests: list[pb.GenerateRequest] = []
        self.cancelled = threading.Event()

    def Generate(self, request: Any, context: Any) -> Iterator[pb.GenerateResponse]:  # noqa: N802 gRPC's name
        self.requests.append(request)
        text = request.text.text or request.chat.messages[-1].content
        if text == "refuse":
            error = PagepoolError(Reason.PROMPT_TOO_LONG, "the prompt is too long; shorten it")
            context.set_trailing_metadata((("grpc-status-details-bin", to_status(error).SerializeToString()),))
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)
        yield pb.GenerateResponse(started=pb.GenerateStarted(request_id="r", prompt_tokens=9))
        if text == "endless":
            context.add_callback(self.cancelled.set)
        while True:
            for word in text.split():
                yield pb.GenerateResponse(tokens=pb.GenerateTokens(text=f"{word.upper()} ", token_ids=[1]))
                if text == "endless":
                    time.sleep(0.01)
            if text != "endless" or not context.is_active():
                break
        usage = pb.Usage(prompt_tokens=9, cached_tokens=4, generated_tokens=3)
        usage.decode_time.FromMilliseconds(500)
        if request.speculate_tokens:
            usage.draft_tokens, usage.accepted_tokens = 20, 11
        finished = pb.GenerateFinished(reason=pb.FINISH_REASON_END_OF_SEQUENCE, usage=usage)
        yield pb.GenerateResponse(finished=finished)

    def GetModel(self, request: Any, context: Any) -> pb.GetModelResponse:  # noqa: N802 gRPC's name
        return pb.GetModelResponse(model="echo", dtype="float32")


@pytest.fixture
def inferd(tmp_path: Path) -> Iterator[ScriptedInferd]:
    with served(ScriptedInferd(), tmp_path) as servicer:
        yield servicer


def test_generate_streams_text_to_stdout_and_usage_to_stderr(inferd: ScriptedInferd, start: Start) -> None:
    flags = ["--max-tokens", "7", "--temperature", "0.5", "--top-p", "0.9", "--top-k", "3", "--min-p", "0.1"]
    process = start("generate", "one two three", *flags, "--seed", "4", "--stop", "end", "--stop", "fin")
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, "ONE TWO THREE \n")
    assert "9 prompt tokens, 4 of them cached; 3 generated in" in err
    assert "4.0 tokens/s; ended by end of sequence" in err
    (request,) = inferd.requests
    sampling = request.sampling
    assert (request.text.text, request.max_tokens, list(request.stop)) == ("one two three", 7, ["end", "fin"])
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (0.5, 3, 4)
    assert (round(sampling.top_p, 5), round(sampling.min_p, 5)) == (0.9, 0.1)


def test_generate_takes_a_chat_message_from_stdin_and_prints_json(inferd: ScriptedInferd, start: Start) -> None:
    process = start("generate", "-", "--chat", "--json")
    out, _ = process.communicate("hi there", timeout=30)
    events = [json.loads(line) for line in out.splitlines()]
    assert [next(iter(event)) for event in events] == ["started", "tokens", "tokens", "finished"]
    assert events[1]["tokens"]["text"] == "HI "
    assert events[-1]["finished"]["usage"]["cached_tokens"] == 4
    assert inferd.requests[0].chat.messages[0].role == "user"
    assert not inferd.requests[0].sampling.HasField("temperature")


def test_generate_passes_penalties_bias_and_logprobs_on(inferd: ScriptedInferd, start: Start) -> None:
    penalties = ["--repetition-penalty", "1.5", "--presence-penalty", "-0.5", "--frequency-penalty", "0.25"]
    flags = [*penalties, "--logit-bias", "7=-100", "--logit-bias", "9=2.5", "--logprobs", "0", "--prompt-logprobs", "3"]
    process = start("generate", "hi", "--json", *flags)
    process.communicate(timeout=30)
    assert process.returncode == 0
    (request,) = inferd.requests
    sampling = request.sampling
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.5, -0.5, 0.25)
    assert dict(sampling.logit_bias) == {7: -100.0, 9: 2.5}
    assert (request.HasField("logprobs"), request.logprobs, request.prompt_logprobs) == (True, 0, 3)


def test_a_continuation_that_guessed_says_how_often_it_was_right(inferd: ScriptedInferd, start: Start) -> None:
    process = start("generate", "one two three", "--speculate-tokens", "8")
    _, err = process.communicate(timeout=30)
    assert "4.0 tokens/s, 11 of 20 guesses right; ended by" in err
    assert inferd.requests[0].speculate_tokens == 8


def test_prompt_logprobs_are_called_in_json_as_in_the_proto() -> None:
    events = [field.message_type for field in pb.GenerateResponse.DESCRIPTOR.oneofs_by_name["event"].fields]
    names = [field.name for field in pb.GenerateResponse.DESCRIPTOR.oneofs_by_name["event"].fields]
    assert [KINDS[event.name] for event in events if event is not None] == names


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--ttl", "nan"], "--ttl is nan"),
        (["--ttl", "inf"], "--ttl is inf"),
        (["--priority", "1099511627776"], "--priority is 1099511627776"),
        (["--salt", "\udcff"], "--salt is"),
    ],
)
def test_flags_of_pin_that_no_message_can_carry_are_refused(start: Start, flags: list[str], line: str) -> None:
    process = start("pin", "hi", *flags)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (2, "")
    assert line in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--logprobs", "2"], "--logprobs is given without --json"),
        (["--prompt-logprobs", "0"], "--prompt-logprobs is given without --json"),
        (["--logit-bias", "the=1"], "'the=1' is not ID=BIAS, such as 42=-100"),
        (["--logit-bias", "7"], "'7' is not ID=BIAS"),
    ],
)
def test_flags_of_generate_that_do_not_fit_are_refused(
    inferd: ScriptedInferd, start: Start, flags: list[str], line: str
) -> None:
    process = start("generate", "hi", *flags)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (2, "")
    assert line in err
    assert not inferd.requests


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ctrl_c_or_a_closed_terminal_cancels_generate_on_the_server_and_exits_130(
    inferd: ScriptedInferd, start: Start, end: signal.Signals
) -> None:
    process = start("generate", "endless")
    assert process.stdout is not None
    assert process.stdout.read(3) == "END"
    process.send_signal(end)
    assert process.wait(10) == 130
    assert inferd.cancelled.wait(5)
    assert process.stderr is not None
    assert "Traceback" not in process.stderr.read()


def test_chat_remembers_the_conversation_until_reset(inferd: ScriptedInferd, start: Start) -> None:
    process = start("chat", "--system", "be brief")
    out, err = process.communicate("one\ntwo\n/reset\nthree\n/exit\n", timeout=30)
    assert process.returncode == 0
    assert out == "ONE \nTWO \nTHREE \n"
    assert "echo (float32)" in err
    said = [[message.content for message in request.chat.messages] for request in inferd.requests]
    assert said == [["be brief", "one"], ["be brief", "one", "ONE ", "two"], ["be brief", "three"]]


def test_chat_survives_a_refused_message_and_ends_with_the_input(inferd: ScriptedInferd, start: Start) -> None:
    process = start("chat")
    out, err = process.communicate("refuse\nafter\n", timeout=30)
    assert process.returncode == 0
    assert out.split() == ["AFTER"]
    assert "pagepool: the prompt is too long; shorten it" in err
    assert [message.content for message in inferd.requests[1].chat.messages] == ["after"]


def test_ctrl_c_stops_an_answer_but_not_the_chat(inferd: ScriptedInferd, start: Start) -> None:
    process = start("chat")
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("endless\n")
    process.stdin.flush()
    assert process.stdout.read(3) == "END"
    process.send_signal(signal.SIGINT)
    assert inferd.cancelled.wait(5)
    out, err = process.communicate("after\n", timeout=10)
    assert process.returncode == 0
    assert out.split()[-1] == "AFTER"
    assert "cancelled" in err
    assert len(inferd.requests[1].chat.messages) == 3


@pytest.mark.parametrize("words", [["generate", "hi"], ["chat"], ["blocks"], ["doctor"]])
def test_a_daemon_that_does_not_run_is_one_line_with_the_way_out(start: Start, words: list[str]) -> None:
    process = start(*words)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (1, "")
    (line,) = err.splitlines()
    assert line.startswith("pagepool: nothing answers at unix:")
    assert "pagepool up" in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "refuse"], "pagepool: the prompt is too long; shorten it"),
        (["generate", "hi", "--max-tokens", str(1 << 40)], "max_tokens is 1099511627776"),
        (["generate", "hi", "--top-k", "many"], "argument --top-k: invalid int value: 'many'"),
        (["generate", "\udcff"], "must be valid text"),
        (["doctor", "--over", "0"], "--over is 0.0, but must be above 0 and at most 3600 seconds"),
        (["doctor", "--over", "nan"], "--over is nan"),
    ],
)
def test_a_wrong_request_exits_2_and_names_what_is_wrong(
    inferd: ScriptedInferd, start: Start, words: list[str], message: str
) -> None:
    process = start(*words)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def block(place: int, state: BlockState, **fields: Any) -> Block:
    return Block(block_id=100 + place, state=state, entry=pack_entry(Format.BF16, 0, 2 * place), **fields)


def drawn(snapshot: Snapshot, width: int = 80) -> list[str]:
    return draw(snapshot, width, lambda text, _style: text)


def pool_of(total: int) -> Pool:
    pool = Pool(epoch=255, device="host", slab_bytes=3 << 20, block_size=16, block_bytes=1536, unit_bytes=768)
    pool.geometry.model_name = "tiny"
    pool.usage.total_blocks, pool.usage.free_blocks = total, total
    return pool


def test_every_block_is_drawn_where_it_lies_by_what_it_does() -> None:
    blocks = [
        block(0, BLOCK_STATE_HELD, sealed=True, ref_count=1, num_tokens=16),
        block(1, BLOCK_STATE_HELD, sealed=True, ref_count=2, num_tokens=16),
        block(3, BLOCK_STATE_HELD, ref_count=1, num_tokens=5),
        block(4, BLOCK_STATE_HELD, ref_count=1),
        block(5, BLOCK_STATE_CACHED, sealed=True, num_tokens=16),
        block(15, BLOCK_STATE_QUARANTINED),
    ]
    lines = drawn(Snapshot(pool_of(16), blocks))
    assert lines[0] == "pool 00000000000000ff on host, 3 MiB: tiny; 16 blocks of 16 tokens, 1.5 KiB each"
    assert " 0  █◆·▒▫░·········✗" in lines
    legend = dict(line.split()[::2][:2] for line in lines[-7:])
    assert legend == {
        "█": "held",
        "◆": "shared",
        "▒": "filling",
        "▫": "reserved",
        "░": "cached",
        "✗": "quarantined",
        "·": "free",
    }


def test_rows_of_free_blocks_are_folded_and_no_block_is_lost() -> None:
    lines = drawn(Snapshot(pool_of(1000), [block(0, BLOCK_STATE_CACHED), block(999, BLOCK_STATE_CACHED)]))
    assert lines[3] == "  0  ░" + "·" * 63
    assert lines[4] == " 64  ⋮ 896 free blocks"
    assert lines[5] == "960  " + "·" * 39 + "░"


def test_a_map_fits_the_terminal() -> None:
    for width in (40, 80, 200):
        map_lines = drawn(Snapshot(pool_of(5000), [block(2500, BLOCK_STATE_CACHED)]), width)[2:]
        assert max(map(len, map_lines)) <= width


def test_tables_are_listed_with_the_places_of_their_blocks() -> None:
    entries = [pack_entry(Format.BF16, 0, 2 * place) for place in (4, 5, 6, 1, 9, 8)]
    table = BlockTable(table_id=3, holder="w", block_ids=range(6), entries=entries, num_tokens=90, cached_tokens=48)
    assert drawn(Snapshot(pool_of(16), [], [table]))[-1] == (
        "table 3 of w: 90 tokens, 48 of them found, 6 blocks at 4-6, 1, 9, 8"
    )


def test_a_pool_without_geometry_says_what_it_waits_for() -> None:
    assert drawn(Snapshot(Pool(epoch=1, device="host", slab_bytes=1 << 20))) == [
        "pool 0000000000000001 on host, 1 MiB: not cut into blocks yet, since no worker has attached"
    ]
