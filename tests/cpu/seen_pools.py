"""Pools of memd's core as `pagepool doctor` sees them, and what it advises about them."""

from __future__ import annotations

from rich.console import Console

from memd import messages
from memd.core.pool import Pool
from pagepool.inferd.v1.generation_service_pb2 import GetModelResponse
from pagepool_client.cli.top_view import picture
from pagepool_client.diagnosis.diagnose import diagnose
from pagepool_client.diagnosis.findings import Finding
from pagepool_client.diagnosis.observation import Observation, WorkerReport
from pagepool_client.diagnosis.timeline import Frame
from tests.cpu.core_worker import GEOMETRY

TOTAL, START_S = 100, 1000.0


def pool_of(num_blocks: int = TOTAL, block_size: int = 8) -> Pool:
    pool = Pool(7, block_size, 1 << 30, num_blocks)
    pool.declare(GEOMETRY)
    return pool


def seen(pool: Pool, now: float = 1.0, waiting: int = 0, running: int = 0, uptime_s: float = 7200.0) -> Observation:
    """What the commands would read of this pool, and of one worker where requests wait or run."""
    told = messages.pool_message(pool, None, START_S)
    blocks = [messages.block_message(one) for one in pool.blocks_between(0, 1 << 20, None, now)]
    tables = [messages.table_message(one) for one in pool.tables_after(0, 1 << 20, now)]
    model = GetModelResponse(pool_epoch=pool.epoch, waiting_requests=waiting, running_requests=running)
    workers = [WorkerReport("unix:/w.sock", model)] if waiting or running else []
    return Observation(told, blocks, tables, workers, START_S + uptime_s, target="unix:/memd.sock")


def finding(of: Observation, code: str) -> Finding:
    (found,) = [one for one in diagnose(of) if one.code == code]
    return found


def advice(of: Observation, code: str, name: str) -> str:
    """The value of the remedy with this name."""
    (value,) = [remedy.value for remedy in finding(of, code).remedies if remedy.name == name]
    return value


def remedies(of: Finding) -> dict[str, str]:
    """What to change, and the effect."""
    return {f"{one.name} {one.value}": one.effect for one in of.remedies}


def at_the_top(frame: Frame, width: int = 100, height: int | None = None) -> list[str]:
    """The lines of `pagepool top`."""
    console = Console(width=width, highlight=False, color_system=None)
    with console.capture() as captured:
        console.print(picture(frame, width, height))
    return [line.rstrip() for line in captured.get().splitlines()]


def codes(of: Observation) -> list[str]:
    return [one.code for one in diagnose(of)]


def numbered(value: str) -> int:
    return int(value.rsplit(maxsplit=1)[-1])


def tokens(first: int, count: int) -> list[int]:
    return list(range(first, first + count))
