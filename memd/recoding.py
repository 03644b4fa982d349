"""CompressBlocks and DecompressBlocks: each is one command of the core, answered when workers have carried it out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar, cast

from google.protobuf.message import Message

from memd.core.errors import no_worker
from memd.core.recodes import Outcome, Recode
from memd.requests import RequestMemory
from memd.sessions import Sessions
from pagepool.memd.v1 import pool_service_pb2 as pb
from pagepool.memd.v1 import types_pb2

Request = pb.CompressBlocksRequest | pb.DecompressBlocksRequest
Answer = TypeVar("Answer", bound=Message)
Command = Callable[[int, Sequence[int], float], tuple[list[Outcome], list[Recode]]]


class Life(Protocol):
    """What is needed of memd.service.MemdLife."""

    @property
    def clock(self) -> Callable[[], float]:
        """Seconds on the pool's clock."""

    @property
    def sessions(self) -> Sessions:
        """Whom to tell."""

    @property
    def requests(self) -> RequestMemory:
        """The answers of the last minute."""


async def recode(life: Life, request: Request, command: Command, kind: Callable[..., Answer]) -> Answer:
    """The answer to a request: what became of each of its blocks.

    Who calls again while the first call is waiting waits for the same work. NO_WORKER if it came to nothing.
    """
    now = life.clock()
    if (known := life.requests.find(request.request_id, request, now)) is not None:
        return cast("Answer", known)
    there, recodes = command(request.lease_id, request.block_ids, now)
    life.sessions.publish()
    await life.sessions.finished(recodes)
    if failure := next((one.failure for one in recodes if one.failure), ""):
        raise no_worker(failure)
    outcomes = _by_id([*there, *(outcome for one in recodes for outcome in one.outcomes)])
    answer = kind(compressions=[_message(outcomes[one]) for one in dict.fromkeys(request.block_ids)])
    life.requests.keep(request.request_id, request, life.clock(), answer)
    return answer


def _by_id(outcomes: Iterable[Outcome]) -> dict[int, Outcome]:
    return {one.block_id: one for one in outcomes}


def _message(outcome: Outcome) -> pb.Compression:
    k_error, v_error = outcome.errors
    return pb.Compression(
        block_id=outcome.block_id,
        format=cast("types_pb2.Format", outcome.format),
        entry=outcome.entry,
        k_error=k_error,
        v_error=v_error,
    )
