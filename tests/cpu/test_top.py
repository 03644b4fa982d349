"""What `pagepool top` shows: frames from observations, and the picture at the widths of terminals."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from pagepool.memd.v1.types_pb2 import BLOCK_STATE_HELD, BLOCK_STATE_QUARANTINED, Pool
from pagepool_client.cli.top_view import cells, picture, sparkline
from pagepool_client.diagnosis.observation import Observation, WorkerReport
from pagepool_client.diagnosis.timeline import Frame, Timeline, WorkerRates, kinds_of_blocks, table_use
from tests.cpu.pool_scene import NOW_S, Scene


def drawn(frame: Frame, width: int = 80, height: int | None = None, trouble: str = "") -> list[str]:
    console = Console(width=width, highlight=False, color_system=None)
    with console.capture() as captured:
        console.print(picture(frame, width, height, trouble))
    return [line.rstrip() for line in captured.get().splitlines()]


def busy_scene() -> Scene:
    """Two tables with four blocks in common, one of which has blocks in reserve; cached blocks, and two of a lease."""
    scene = Scene(counters={"prefix_query_tokens": 400, "prefix_hit_tokens": 100, "allocated_blocks": 30})
    prefix = [scene.block(BLOCK_STATE_HELD, 16) for _ in range(4)]
    scene.table(100, shared=prefix)
    scene.table(96, blocks=16, shared=prefix)
    scene.of_lease(9, 2)
    scene.cached(10)
    scene.worker(waiting=3, running=2)
    return scene


def test_tables_alone_say_what_their_blocks_do() -> None:
    seen = busy_scene().seen()
    use = table_use(seen.tables, 16)
    # 100 tokens are 7 blocks, the last with 4 tokens; 96 are 6 of the 16 that the other table has.
    assert (use.distinct, use.shared, use.filling, use.reserved) == (4 + 3 + 12, 4, 1, 10)
    assert (use.tokens, use.saved, use.own) == (64 + 36 + 32, 4, {1: 3, 2: 12})
    assert kinds_of_blocks(seen.pool, use) == {
        "shared": 4,
        "held": 2 + 2 + 2,
        "FP8 held": 0,
        "filling": 1,
        "reserved": 10,
        "cached": 10,
        "FP8 cached": 0,
        "quarantined": 0,
        "kept back": 0,
        "free": 69,
    }


def test_what_a_lost_worker_could_write_is_quarantined_not_reserved() -> None:
    scene = Scene(counters={"lost_leases": 1})
    table = scene.table(40, blocks=5)
    for block in scene.blocks[2:]:
        block.state = BLOCK_STATE_QUARANTINED
    kinds = kinds_of_blocks(scene.seen().pool, table_use([table], 16))
    assert {name: number for name, number in kinds.items() if number} == {"held": 2, "quarantined": 3, "free": 95}
    # No worker was lost: the table has all of its blocks, and three others have moved.
    pool = scene.seen().pool
    pool.usage.held_blocks, pool.counters.lost_leases = 5, 0
    kinds = kinds_of_blocks(pool, table_use([table], 16))
    assert (kinds["filling"], kinds["reserved"], kinds["quarantined"]) == (1, 2, 3)


@given(
    st.lists(st.tuples(st.integers(0, 100), st.integers(0, 20)), max_size=5),
    st.integers(0, 200),
    st.integers(0, 50),
    st.integers(0, 50),
)
def test_kinds_add_up_to_the_pool_even_if_the_tables_are_of_another_moment(
    tables: list[tuple[int, int]], held: int, cached: int, quarantined: int
) -> None:
    scene = Scene()
    for tokens, blocks in tables:
        scene.table(tokens, blocks)
    pool = Pool()
    pool.usage.held_blocks, pool.usage.cached_blocks, pool.usage.quarantined_blocks = held, cached, quarantined
    pool.usage.free_blocks, pool.usage.total_blocks = 7, held + cached + quarantined + 7
    kinds = kinds_of_blocks(pool, table_use(scene.tables, 16))
    assert sum(kinds.values()) == pool.usage.total_blocks
    assert min(kinds.values()) >= 0


@pytest.mark.parametrize(
    ("counts", "width", "expected"),
    [
        ({"a": 1, "b": 1}, 10, {"a": 5, "b": 5}),
        ({"a": 1, "b": 999}, 10, {"a": 1, "b": 9}),
        ({"a": 1, "b": 1, "c": 998}, 10, {"a": 1, "b": 1, "c": 8}),
        ({"a": 0, "b": 3}, 4, {"b": 4}),
        ({"a": 1, "b": 2}, 10, {"a": 3, "b": 7}),
        ({"a": 1, "b": 1, "c": 1}, 2, {"a": 1, "b": 1, "c": 1}),
    ],
)
def test_a_bar_has_the_width_asked_for_and_hides_nothing(
    counts: dict[str, int], width: int, expected: dict[str, int]
) -> None:
    assert cells(counts, width) == expected


def test_a_sparkline_shows_the_newest_values() -> None:
    assert sparkline([0.5] * 5 + [0.0, 0.01, 0.124, 0.125, 0.99, 1.0], 6) == " ▁▁▂██"


def worker_at(seen: Observation, **counters: Any) -> Observation:
    model = seen.workers[0].model
    assert model is not None
    for name, value in counters.items():
        if name == "step_ms":
            model.counters.step_time.FromMilliseconds(value)
        else:
            setattr(model.counters, name, value)
    return seen


def test_rates_are_of_the_time_between_two_readings() -> None:
    timeline, scene = Timeline(), busy_scene()
    first = timeline.frame(worker_at(scene.seen(), generated_tokens=10, prefill_tokens=50, steps=5, step_ms=100))
    assert (first.elapsed_s, first.workers, first.counted["allocated_blocks"]) == (None, {}, 30)
    later = busy_scene()
    later.counters.update(allocated_blocks=50, prefix_query_tokens=500, prefix_hit_tokens=180)
    seen = worker_at(later.seen(at_s=NOW_S + 4), generated_tokens=30, prefill_tokens=50, steps=15, step_ms=350)
    second = timeline.frame(seen)
    assert (second.elapsed_s, second.counted["allocated_blocks"]) == (4.0, 20)
    assert second.workers == {"unix:/w.sock": WorkerRates(5.0, 0.0, 0.025)}
    assert second.history == (0.21, 0.21)
    lines = drawn(second)
    assert lines[4] == "held     ▂▂ 21 %"
    assert lines[5].endswith(", 5 granted/s")
    assert lines[6] == "prefixes 36 % of 500 prompt tokens found (80 % just now), 0 evicted/s"
    assert lines[10].split() == ["w", "2", "3", "5.0", "0.0", "25.0", "ms"]


def test_a_new_memd_life_or_a_new_worker_begins_without_rates() -> None:
    timeline = Timeline()
    timeline.frame(worker_at(busy_scene().seen(), steps=9))
    restarted = worker_at(busy_scene().seen(at_s=NOW_S + 1), steps=2)
    assert timeline.frame(restarted).workers == {}
    other = busy_scene().seen(at_s=NOW_S + 2)
    other.pool.epoch += 1
    assert timeline.frame(other).elapsed_s is None
    for at_s in (NOW_S + 9, NOW_S + 9, NOW_S):
        frame = timeline.frame(busy_scene().seen(at_s=at_s))
        assert frame.elapsed_s is None, "another life, then a clock that stands, then one that goes back"


def test_a_picture_says_what_the_pool_does() -> None:
    lines = drawn(Timeline().frame(busy_scene().seen()), 120)
    assert lines[0].startswith("pagepool top  tiny on host, 1.56 MiB: 100 blocks of 16 tokens")
    assert "up 2 h" in lines[0]
    assert lines[1].startswith("blocks   ◆◆◆◆")
    assert set(lines[1][9:]) == set("◆█▒▫░·")
    counts = ["◆ 4 shared 4.0 %", "█ 6 held 6.0 %", "▒ 1 filling 1.0 %", "▫ 10 reserved 10 %", "░ 10 cached 10 %"]
    assert lines[2] == " " * 9 + "  ".join([*counts, "· 69 free 69 %"])
    assert lines[3] == ("memory   slots 92 % used, sharing saves 4, leases hold 2, 30 granted")
    assert lines[4] == "prefixes 25 % of 400 prompt tokens found, 0 evicted"
    assert lines[5] == "queue    2 running, 3 waiting, 0 refused; room for 6 more of 11.5 blocks each"
    assert lines[-2].split() == ["2", "w", "0", "96", "0", "16", "12", "0.0", "s", "███", "16", "%"]
    assert lines[-1].split() == ["1", "w", "0", "100", "0", "7", "3", "0.0", "s", "█", "7.0", "%"]


@pytest.mark.parametrize("width", [40, 80, 120, 200])
@pytest.mark.parametrize("height", [10, 24, 50])
def test_a_picture_fits_the_terminal(width: int, height: int) -> None:
    scene = busy_scene()
    for _ in range(40):
        scene.table(8)
    scene.total = 300
    scene.workers.append(
        WorkerReport("unix:/b.sock", trouble="nothing answers at unix:/b.sock; start it with pagepool up")
    )
    timeline = Timeline()
    timeline.frame(scene.seen())
    lines = drawn(timeline.frame(scene.seen(at_s=NOW_S + 1)), width, height, trouble="memd is gone; trying again")
    assert max(map(len, lines)) <= width
    if width >= 80 and height >= 24:
        assert len(lines) <= height
        assert lines[-1].startswith("and ")
    assert lines[1] == "memd is gone; trying again"


def test_tables_that_do_not_fit_are_counted() -> None:
    scene = Scene(total=300)
    for index in range(40):
        scene.table(16 * (1 + index % 2))
    assert drawn(Timeline().frame(scene.seen()), height=24)[-1] == "and 28 more tables with 36 blocks"
    assert len(drawn(Timeline().frame(scene.seen()))) == 9 + 40, "all of them without a height"


def test_an_empty_pool_and_one_without_geometry_say_so() -> None:
    lines = drawn(Timeline().frame(Scene().seen()))
    assert lines[-1] == "no block tables: nothing runs"
    assert "nothing written" in lines[3]
    uncut = Observation(
        Pool(epoch=1, device="host", slab_bytes=1 << 20), workers=[WorkerReport("h:1", trouble="it loads")]
    )
    lines = drawn(Timeline().frame(uncut))
    assert lines[0].startswith("pagepool top  no model on host, 1 MiB")
    assert lines[1] == "not cut into blocks yet, since no worker has attached"
    assert lines[-1] == "h:1: it loads"


def test_pinned_blocks_are_shown_and_leave_no_room() -> None:
    scene = Scene(total=50)
    scene.table(160)
    scene.cached(25, pinned=True)
    lines = drawn(Timeline().frame(scene.seen()))
    assert "pinned 25" in lines[3]
    scene.worker(waiting=0, running=1)
    assert "room for 1 more of 10 blocks each" in drawn(Timeline().frame(scene.seen()))[5], "15 can be granted"


def test_what_workers_have_in_reserve_is_told_from_what_clients_hold() -> None:
    scene = Scene()
    scene.table(160)
    scene.reserve(5)
    assert "saves 0, in reserve 5, 0 granted" in drawn(Timeline().frame(scene.seen()))[3]
    scene.of_lease(7, 3)
    lines = drawn(Timeline().frame(scene.seen()))
    assert "in reserve 5, leases hold 3" in lines[3]
    assert "█ 13 held 13 %  ▫ 5 reserved 5.0 %" in lines[2], "10 of the table, 3 of a client's lease"


def test_suspended_tables_do_not_make_the_others_look_small() -> None:
    scene = Scene()
    scene.table(160)
    scene.suspended(160)
    scene.worker(waiting=1, running=1)
    assert "room for 9 more of 10 blocks each" in drawn(Timeline().frame(scene.seen()))[5]


def test_requests_that_wait_for_a_prefix_are_told_from_the_others() -> None:
    scene = Scene(counters={"prefix_pending_requests": 40})
    scene.worker(waiting=1, running=2, for_prefix=3)
    lines = drawn(Timeline().frame(scene.seen()))
    assert "queue    2 running, 4 waiting (3 for a prefix), 0 refused" in lines
    assert lines[4].endswith("0 evicted, 40 waits")


def test_a_worker_of_another_pool_is_marked() -> None:
    scene = Scene()
    scene.worker(waiting=0, running=0, epoch=0)
    assert any("not attached to this pool" in line for line in drawn(Timeline().frame(scene.seen()), 120))
