"""Every reason that a call can fail with stands in its comment, or in its service's, and no other does."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pagepool.errors import Reason
from tests.cpu.reason_walk import Walk

ROOT = Path(__file__).resolve().parents[2]
LINE = re.compile(r"//\s+[A-Z_]+ / ([A-Z_]+(?:, [A-Z_]+)*)")
IN_A_SENTENCE = re.compile(r"answers [A-Z_]+ / ([A-Z_]+)")
NEEDS_A_POOL = {Reason.BLOCK_NOT_FOUND, Reason.TABLE_NOT_FOUND, Reason.GEOMETRY_MISMATCH}
"""Whoever has found a block or table, or has declared a geometry, speaks of a pool that is cut."""
CANNOT = {
    ("DecompressBlocks", Reason.BLOCK_WANTED_EXACT): "no table that wants exact blocks has FP8 blocks",
    ("RenewLease", Reason.POOL_WITHOUT_GEOMETRY): "a lease of a pool that is not cut has nothing to give back",
    ("ReleaseLease", Reason.POOL_WITHOUT_GEOMETRY): "the same",
    ("TruncateBlockTable", Reason.REQUEST_TOO_LARGE): "it asks for one block, and every pool has one",
}
"""What the walk finds though it cannot be, and why not."""
BY_HANDLERS = {Reason.MALFORMED_REQUEST}
"""What pagepool.handlers answers before a method is called."""

MEMD = {
    "_pool": "Pool",
    "pool": "Pool",
    "_clients": "ClientLeases",
    "_state": "PoolState",
    "sharing": "Sharing",
    "compression": "Compression",
    "memory": "PoolMemory",
    "prefixes": "PrefixPins",
    "requests": "RequestMemory",
    "_workers": "WorkerLeases",
    "_stepper": "Stepper",
    "sessions": "Sessions",
}
WORKERS = {**MEMD, "session": "Session", "locks": "LeaseLocks", "geometry": "Geometry", "draft": "Draft"}
INFERD = {
    "_dispatcher": "Dispatcher",
    "tokenizer": "Tokenizer",
    "_template": "ChatTemplate",
}


@dataclass(slots=True)
class Comments:
    """What a service's comments say: for any call, for those that change something, and for each by itself."""

    any_call: set[Reason] = field(default_factory=set)
    changing: set[Reason] = field(default_factory=set)
    own: dict[str, set[Reason]] = field(default_factory=dict)


def comments_of(text: str, service: str) -> Comments:
    """Of a proto's text."""
    before, body = text.split(f"service {service} {{", 1)
    head = before.rsplit("\n\n", 1)[-1]
    any_call, _, changing = head.partition("Calls that change the pool also answer:")
    found = Comments(reasons_in(any_call.splitlines()), reasons_in(changing.splitlines()))
    said: list[str] = []
    for line in body.split("\n}", 1)[0].splitlines():
        said.append(line)
        if rpc := re.match(r"\s+rpc (\w+)\(", line):
            found.own[rpc[1]] = reasons_in(said)
            said = []
    return found


def reasons_in(lines: Iterable[str]) -> set[Reason]:
    text = "\n".join(lines)
    named = [name for found in LINE.findall(text) for name in found.split(", ")]
    return {Reason(name) for name in (*named, *IN_A_SENTENCE.findall(text.replace("\n//", "")))}


def proto(name: str) -> str:
    return (ROOT / "proto" / "pagepool" / name).read_text()


def memd_walk(owners: Mapping[str, str]) -> Walk:
    walk = Walk(owners)
    walk.read([*(ROOT / "memd").glob("*.py"), *(ROOT / "memd" / "core").glob("*.py"), ROOT / "memd/device/locks.py"])
    return walk


def inferd_walk() -> Walk:
    walk = Walk(INFERD)
    folders = (ROOT / "inferd", ROOT / "inferd" / "core", ROOT / "inferd" / "text")
    walk.read(path for folder in folders for path in folder.glob("*.py"))
    return walk


def method_of(rpc: str) -> str:
    return re.sub(r"(?<!^)([A-Z])", r"_\1", rpc).lower()


def differences(
    said: Comments, raised: dict[str, set[Reason]], changing: set[str]
) -> dict[str, tuple[set[str], set[str]]]:
    """By call: what it can raise and its comments do not say, and what its own comment says and it cannot raise."""
    found = {}
    for rpc, own in said.own.items():
        reasons = raised[rpc] - {reason for name, reason in CANNOT if name == rpc}
        reasons -= {Reason.POOL_WITHOUT_GEOMETRY} if reasons & NEEDS_A_POOL else set()
        wide = said.any_call | (said.changing if rpc in changing else set())
        silent, empty = reasons - own - wide, own - reasons - BY_HANDLERS
        if silent or empty:
            found[rpc] = ({str(one) for one in silent}, {str(one) for one in empty})
    return found


def test_the_comments_of_pool_service_say_what_its_methods_raise() -> None:
    walk, said = memd_walk(MEMD), comments_of(proto("memd/v1/pool_service.proto"), "PoolService")
    raised = {rpc: walk.reasons("PoolService", method_of(rpc)) for rpc in said.own}
    changing = {rpc for rpc, reasons in raised.items() if Reason.READ_ONLY_LISTENER in reasons}
    assert len(said.own) == 22
    assert len(changing) == 16
    assert [(rpc, reason) for rpc, reason in CANNOT if reason not in raised[rpc]] == []
    assert differences(said, raised, changing) == {}
    assert walk.unreached("clients", "sharing", "pins", "requests", "paging", "limits", "service") == []


def test_the_comment_of_attach_says_what_a_worker_can_be_refused_with() -> None:
    walk, said = memd_walk(WORKERS), comments_of(proto("memd/v1/worker_service.proto"), "WorkerService")
    # Sessions end the streams of others, too: of workers that were not heard in time, or are back on another stream.
    raised = {"Attach": walk.reasons("WorkerService", "attach") | walk.raised_in("sessions")}
    assert differences(said, raised, set()) == {}
    assert walk.unreached("workers", "stepping", "geometry", "worker_service", "locks", "draft") == []


def test_the_comments_of_generation_service_say_what_its_methods_raise() -> None:
    walk, said = inferd_walk(), comments_of(proto("inferd/v1/generation_service.proto"), "GenerationService")
    raised = {rpc: walk.reasons("GenerationService", method_of(rpc)) for rpc in said.own}
    # What the engine ends a request with crosses a process.
    raised["Generate"] |= walk.raised_in("failures", "refusals", "sequence", "continuation", "dispatch")
    assert differences(said, raised, set()) == {}
    assert walk.unreached("service", "validation", "strategy", "template", "tokenizer") == []


@pytest.mark.parametrize(
    ("rpc", "line", "expected"),
    [
        ("FreeBlocks", "LEASE_IS_WORKERS", ({"LEASE_IS_WORKERS"}, set())),
        ("GetBlock", "EPOCH_MISMATCH", ({"EPOCH_MISMATCH"}, set())),
        ("GetPool", "", (set(), {"QUEUE_FULL"})),
    ],
)
def test_a_line_that_is_missing_or_too_many_is_found(rpc: str, line: str, expected: tuple[set[str], set[str]]) -> None:
    walk, said = memd_walk(MEMD), comments_of(proto("memd/v1/pool_service.proto"), "PoolService")
    raised = {one: walk.reasons("PoolService", method_of(one)) for one in said.own}
    changing = {one for one, reasons in raised.items() if Reason.READ_ONLY_LISTENER in reasons}
    said.own[rpc] = said.own[rpc] - {Reason(line)} if line else said.own[rpc] | {Reason.QUEUE_FULL}
    assert differences(said, raised, changing) == {rpc: expected}
