"""What `pagepool doctor` and `pagepool top` make of tables that gave up their blocks."""

from __future__ import annotations

from rich.console import Console

from pagepool.memd.v1.types_pb2 import BLOCK_STATE_HELD
from pagepool_client.cli.block_map import Snapshot, draw
from pagepool_client.cli.top_view import picture
from pagepool_client.diagnosis.diagnose import diagnose
from pagepool_client.diagnosis.figures import measure
from pagepool_client.diagnosis.findings import Finding, Severity
from pagepool_client.diagnosis.timeline import Timeline
from tests.cpu.pool_scene import Scene


def full_scene() -> Scene:
    """All 100 blocks are in two tables, and three wait without any."""
    scene = Scene(counters={"refused_requests": 9})
    for _ in range(2):
        scene.table(50 * 16)
    scene.suspended(100, idle_s=3.0)
    scene.suspended(1)
    scene.suspended(0)
    scene.worker(waiting=3, running=2)
    return scene


def found(scene: Scene) -> Finding:
    (finding,) = [finding for finding in diagnose(scene.seen()) if finding.code == "suspended_tables"]
    return finding


def test_tables_without_blocks_are_a_problem_while_the_pool_is_full() -> None:
    finding = found(full_scene())
    assert finding.severity is Severity.PROBLEM
    assert finding.figures == {
        "suspended_tables": 3,
        "running_tables": 2,
        "suspended_tokens": 101,
        "needed_blocks": 125,
        "longest_wait_seconds": 3.0,
    }
    assert finding.detail.startswith(
        "3 tables with 101 tokens (8 blocks) wait without blocks, one for 3.0 s, while 2 tables have some"
    )
    names = [(remedy.where, remedy.name, remedy.value) for remedy in finding.remedies]
    assert ("inferd", "--max-num-seqs", "2") in names
    assert names[0][:2] == ("memd", "--pool-bytes")


def test_one_that_has_not_been_resumed_yet_is_advice_and_running_tables_alone_are_nothing() -> None:
    scene = Scene()
    scene.table(40)
    assert "suspended_tables" not in [finding.code for finding in diagnose(scene.seen())]
    scene.suspended(30)
    finding = found(scene)
    assert finding.severity is Severity.ADVICE
    assert finding.detail.startswith("1 table with 30 tokens (2 blocks) waits without blocks")
    assert "while 1 table has some" in finding.detail


def test_they_are_no_blocks_ahead_no_waste_and_no_average() -> None:
    scene = Scene()
    scene.table(40, blocks=40)
    figures, before = measure(scene.seen()), diagnose(scene.seen())
    for _ in range(9):
        scene.suspended(41)
    assert measure(scene.seen()) == figures
    assert [one for one in diagnose(scene.seen()) if one.code != "suspended_tables"] == before


def test_top_and_the_block_map_list_them_with_their_tokens() -> None:
    scene = full_scene()
    console = Console(width=100, color_system=None)
    with console.capture() as captured:
        console.print(picture(Timeline().frame(scene.seen()), 100, None, ""))
    (line,) = [line for line in captured.get().splitlines() if "suspended" in line and " 100 " in line]
    assert line.split()[:2] == ["3", "w"]
    seen = scene.seen()
    text = draw(Snapshot(seen.pool, seen.blocks, seen.tables), 100, lambda text, look: text)
    assert any(line.endswith("table 3 of w: 100 tokens, suspended") for line in text)
    assert all(block.state == BLOCK_STATE_HELD for block in seen.blocks)
