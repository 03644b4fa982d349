"""Workloads: the file format with an error for every bad line, the generator, and `pagepool workload`."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagepool.errors import PagepoolError, Reason
from pagepool_client.cli.workload import shared_tokens, summary
from pagepool_client.workload.format import MAX_TOKENS, Piece, WorkloadRequest, line, parse, read, token_ids
from pagepool_client.workload.synthetic import Shape, generate

GOOD = '{"at": 0.5, "prompt": [["system", 3], ["chat", 2]], "output_tokens": 4}'
COMMAND = [sys.executable, "-m", "pagepool_client.cli.main", "workload"]


def changed(**fields: object) -> str:
    return json.dumps({**json.loads(GOOD), **fields})


def test_a_line_becomes_a_request_and_blank_lines_are_skipped() -> None:
    (request,) = parse(["", GOOD, "  "], "w")
    assert request == WorkloadRequest(0.5, (Piece("system", 3), Piece("chat", 2)), 4)
    assert request.prompt_tokens == 5


def test_requests_are_read_by_the_time_they_come() -> None:
    assert [one.at_s for one in parse([changed(at=at) for at in (3, 0, 2)], "w")] == [0.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "w.jsonl:3 is no JSON"),
        ("[" * 200_000, "w.jsonl:3 has too many brackets within each other"),
        (GOOD.replace('["chat", 2]', "[" * 500 + "]" * 500), "w.jsonl:3: prompt[1] is [[["),
        (GOOD.replace("0.5", "9" * 400), "w.jsonl:3: at is 9999"),
        (GOOD.replace("0.5", "1e999"), "w.jsonl:3: at is Infinity"),
        (GOOD.replace("0.5", "9" * 5000), "w.jsonl:3 has a number of thousands of digits"),
        (GOOD.replace("4}", "9" * 400 + "}"), "w.jsonl:3: output_tokens is 9999"),
        (changed(prompt=[["\ud800", 1]]), 'w.jsonl:3: prompt[0][0] is "\\ud800", but must be a text'),
        (changed(**{"\ud800": 1}), 'w.jsonl:3: "\\ud800" is an unknown field'),
        ("[1]", "w.jsonl:3 is [1], but must be an object"),
        ('{"at": 1}', "w.jsonl:3: prompt is missing, but must be given"),
        (changed(priority=1), 'w.jsonl:3: "priority" is an unknown field'),
        (changed(at=-1), "w.jsonl:3: at is -1, but must be a number from 0 to 86400"),
        (changed(at="1"), 'w.jsonl:3: at is "1"'),
        (changed(at=True), "w.jsonl:3: at is true"),
        (GOOD.replace("0.5", "NaN"), "w.jsonl:3: at is NaN"),
        (changed(at=86_401), "w.jsonl:3: at is 86401"),
        (changed(output_tokens=0), f"w.jsonl:3: output_tokens is 0, but must be a whole number from 1 to {MAX_TOKENS}"),
        (changed(output_tokens=1.5), "w.jsonl:3: output_tokens is 1.5"),
        (changed(output_tokens=MAX_TOKENS + 1), "w.jsonl:3: output_tokens is 1048577"),
        (changed(prompt=[]), "w.jsonl:3: prompt is [], but must be a list of 1 to 64 pieces"),
        (changed(prompt="hello"), 'w.jsonl:3: prompt is "hello"'),
        (changed(prompt=[["a", 1]] * 65), "w.jsonl:3: prompt is [["),
        (changed(prompt=[["a", 1], ["b"]]), 'w.jsonl:3: prompt[1] is ["b"], but must be a name and a number of tokens'),
        (changed(prompt=[["", 1]]), 'w.jsonl:3: prompt[0][0] is "", but must be a text of 1 to 128 bytes'),
        (changed(prompt=[["é" * 65, 1]]), "w.jsonl:3: prompt[0][0] is"),
        (changed(prompt=[["a", 0]]), "w.jsonl:3: prompt[0][1] is 0"),
    ],
)
def test_a_bad_line_is_named_with_its_number_field_value_and_limit(text: str, words: str) -> None:
    with pytest.raises(PagepoolError) as caught:
        parse([GOOD, "", text, GOOD], "w.jsonl")
    assert caught.value.reason is Reason.INVALID_FIELD
    assert caught.value.message.startswith(words)
    assert "; " in caught.value.message, "the way out"


def test_a_file_that_is_none_or_empty_is_refused_by_name(tmp_path: Path) -> None:
    binary, empty = tmp_path / "binary", tmp_path / "empty"
    binary.write_bytes(b"\xff\xfe")
    empty.write_text("\n\n")
    cases = {binary: "not UTF-8", empty: "at least one request", tmp_path / "no": "No such file", tmp_path: "directory"}
    for path, words in cases.items():
        with pytest.raises(PagepoolError, match=words) as caught:
            read(path)
        assert str(path) in caught.value.message


@given(
    st.floats(0, 86_400).map(lambda at: round(at, 6)),
    st.lists(st.tuples(st.text(min_size=1, max_size=20), st.integers(1, MAX_TOKENS)), min_size=1, max_size=5),
    st.integers(1, MAX_TOKENS),
)
def test_what_is_written_is_read_again(at_s: float, pieces: list[tuple[str, int]], output: int) -> None:
    request = WorkloadRequest(at_s, tuple(Piece(*piece) for piece in pieces), output)
    assert "\n" not in line(request)
    assert parse([line(request)], "w") == [request]


def test_equal_pieces_are_equal_tokens_and_longer_ones_continue_shorter_ones() -> None:
    short, long = [Piece("system", 40), Piece("chat", 10)], [Piece("system", 40), Piece("chat", 60)]
    ids = token_ids(long, 1000, frozenset({0, 1, 2}))
    assert len(ids) == 100
    assert token_ids(short, 1000, frozenset({0, 1, 2})) == ids[:50]
    assert min(ids) >= 3
    assert max(ids) < 1000
    assert token_ids([Piece("other", 40)], 1000) != token_ids([Piece("system", 40)], 1000)
    assert token_ids([Piece("system", 4)], 1000) == [144, 7, 662, 510], "the same in every process and version"


def test_a_generated_workload_is_like_the_figures_it_is_made_from() -> None:
    shape = Shape(requests=20_000, rate=5.0, turns=3.0, systems=4, max_tokens=200_000, pause_s=1.0)
    requests = list(generate(shape, seed=1))
    assert [one.at_s for one in requests] == sorted(one.at_s for one in requests)
    assert len(requests) == 20_000
    assert requests[-1].at_s == pytest.approx(20_000 / 5, rel=0.05)
    firsts: dict[str, WorkloadRequest] = {}
    for one in requests:
        firsts.setdefault(one.prompt[-1].name, one)
    assert len(requests) / len(firsts) == pytest.approx(3.0, rel=0.05)
    first_turns = [one.prompt[-1].tokens for one in firsts.values()]
    assert statistics.mean(first_turns) == pytest.approx(161.31, rel=0.05)
    assert statistics.median(first_turns) == pytest.approx(161.31 / 1.6487, rel=0.05), "log-normal: mean / exp(1/2)"
    assert statistics.mean(one.output_tokens for one in requests) == pytest.approx(337.99, rel=0.05)
    assert {one.prompt[0] for one in requests} == {Piece(f"system-{number}", 128) for number in range(4)}


def test_a_later_turn_begins_with_all_that_was_said() -> None:
    said: dict[str, int] = {}
    later = 0
    for one in generate(Shape(requests=2000), seed=2):
        talk = one.prompt[-1]
        assert talk.tokens > said.get(talk.name, 0)
        later += talk.name in said
        said[talk.name] = talk.tokens + one.output_tokens
    assert later > 500


def test_no_request_is_longer_than_asked_for_and_the_seed_decides_everything() -> None:
    shape = Shape(requests=3000, max_tokens=300, systems=1, system_tokens=100)
    requests = list(generate(shape, seed=3))
    totals = [one.prompt_tokens + one.output_tokens for one in requests]
    assert max(totals) == 300, "some are cut"
    assert min(one.output_tokens for one in requests) >= 1
    assert list(generate(shape, seed=3)) == requests
    assert list(generate(shape, seed=4)) != requests
    assert all(one.prompt_tokens == 1 for one in generate(Shape(requests=50, max_tokens=2, systems=0), seed=5))


def test_shared_tokens_are_those_an_earlier_prompt_began_with() -> None:
    prompts = [
        [("s", 10), ("a", 5)],  # new
        [("s", 10), ("b", 5)],  # 10
        [("s", 10), ("a", 9)],  # 15
        [("s", 8), ("a", 5)],  # 8: what follows is another text there
        [("a", 5)],  # new
        [("s", 12), ("a", 5)],  # 10
        [("s", 12), ("a", 5), ("a", 5)],  # 17
    ]
    requests = [WorkloadRequest(0.0, tuple(Piece(*piece) for piece in prompt), 1) for prompt in prompts]
    assert shared_tokens(requests) == 10 + 15 + 8 + 10 + 17


def test_the_command_prints_a_workload_that_it_can_check(tmp_path: Path) -> None:
    words = ["--requests", "50", "--seed", "7", "--turns", "2"]
    made = subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=60, check=True)
    expected = list(generate(Shape(requests=50, turns=2.0), seed=7))
    assert made.stdout == "".join(f"{line(one)}\n" for one in expected)
    (tmp_path / "w.jsonl").write_text(made.stdout)
    told = subprocess.run(
        [*COMMAND, "--check", str(tmp_path / "w.jsonl")], capture_output=True, text=True, timeout=60, check=True
    )
    assert told.stdout.splitlines() == summary(read(tmp_path / "w.jsonl"))
    assert told.stdout.startswith("50 requests in ")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--rate", "0"], "--rate is 0.0, but must be from 0.001 to 100000"),
        (["--turns", "nan"], "--turns is nan"),
        (["--requests", "0"], "--requests is 0"),
        (["--max-tokens", "129"], "--max-tokens is 129, but must be at least 130"),
        (["--check", "nowhere.jsonl"], "--check is nowhere.jsonl"),
    ],
)
def test_a_wrong_flag_is_refused_by_name(words: list[str], line: str) -> None:
    done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert line in done.stderr
    assert "Traceback" not in done.stderr
