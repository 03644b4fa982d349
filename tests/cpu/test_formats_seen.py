"""Pools with blocks of two formats, as `pagepool blocks`, `top` and `doctor` show them: places, bytes, and sums."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memd.core.extent import Tiers
from memd.core.fp8 import Fp8, Policy
from memd.core.pool import Pool
from pagekernels.layout import Format
from pagepool.memd.v1.types_pb2 import BLOCK_STATE_HELD, BLOCK_STATE_QUARANTINED
from pagepool_client.cli.block_map import Snapshot, draw
from pagepool_client.diagnosis.diagnose import diagnose
from pagepool_client.diagnosis.figures import measure
from pagepool_client.diagnosis.findings import Finding, Severity
from pagepool_client.diagnosis.formats import places_of
from pagepool_client.diagnosis.observation import Observation
from pagepool_client.diagnosis.report import as_json, facts
from pagepool_client.diagnosis.timeline import Timeline, kinds_of_blocks, table_use
from tests.cpu.compression_rig import GEOMETRY, B, Worker, compress, tokens
from tests.cpu.pool_scene import NOW_S, Scene
from tests.cpu.seen_pools import at_the_top, remedies, seen

NATIVE = [Format.BF16, Format.F32]


def mixed_scene(native: Format = Format.BF16) -> Scene:
    """A table of 16 blocks and some more tokens, of which 8 in the middle are FP8 blocks; 9 that are only cached."""
    scene = Scene(total=64, native=native, kept=2)
    scene.counters = {"compressed_blocks": 20, "decompressed_blocks": 3, "blocks_over_error": 2}
    scene.table(16 * 16 + 5)
    scene.cached(9)
    scene.compress(scene.blocks[4:12], 32)
    scene.compress(scene.blocks[17:22], 40)
    return scene


def on_the_map(scene: Scene, width: int = 100) -> list[str]:
    seen = scene.seen()
    return draw(Snapshot(seen.pool, seen.blocks, seen.tables), width, lambda text, look: text)


def found(seen: Observation, code: str) -> Finding:
    (finding,) = [one for one in diagnose(seen) if one.code == code]
    return finding


def test_a_split_place_is_one_cell_whatever_the_native_format_is() -> None:
    halves, quarters = on_the_map(mixed_scene()), on_the_map(mixed_scene(Format.F32))
    assert halves[4] == " 0  ████········████▒·····░░░░······▚▚▚▚····▖▖▖·····················"
    assert quarters[4] == " 0  ████········████▒·····░░░░······▚▚······▖▖······················"
    assert halves[1] == "13 held, 7 cached, 2 kept back (drawn as free), 42 free"
    assert halves[2] == ("13 in FP8 (7 places, 104 KiB), 13 in bf16 (208 KiB); room for 1 more in split places")
    assert quarters[2] == ("13 in FP8 (4 places, 52 KiB), 13 in f32 (208 KiB); room for 3 more in split places")
    assert halves[9] == "▚  4 FP8 held    split, with FP8 blocks: at least one of them is in use"
    assert halves[11] == "· 44 free        holds nothing; 2 of these are kept back to compress into"
    assert halves[-1] == "table 1 of w: 261 tokens, 17 blocks (8 in FP8) at 0-3, 32-35, 12-16"


@pytest.mark.parametrize("native", NATIVE)
def test_of_several_blocks_in_a_place_the_most_urgent_is_drawn(native: Format) -> None:
    scene, units = Scene(total=16, native=native), native.itemsize
    scene.cached(2 * units)
    scene.compress(scene.blocks, 2)
    assert " 0  ··▖▖············" in on_the_map(scene)
    scene.blocks[0].state = BLOCK_STATE_HELD
    assert " 0  ··▚▖············" in on_the_map(scene), "whatever comes behind it"
    scene.blocks[-1].state = BLOCK_STATE_HELD
    assert " 0  ··▚▚············" in on_the_map(scene), "whatever comes before it"
    scene.blocks[1].state = scene.blocks[-2].state = BLOCK_STATE_QUARANTINED
    assert " 0  ··✗✗············" in on_the_map(scene)


@given(
    st.sampled_from(NATIVE),
    st.lists(st.tuples(st.sampled_from([1, 2, 3]), st.booleans()), max_size=60),
    st.integers(0, 3),
    st.integers(20, 120),
)
def test_every_sum_is_right_and_no_line_of_the_map_is_too_long(
    native: Format, blocks: list[tuple[int, bool]], kept: int, width: int
) -> None:
    """Blocks of every state, FP8 blocks among them, in tables or not."""
    scene = Scene(total=2 * len(blocks) + kept + 3, native=native, kept=kept)
    for state, _ in blocks:
        scene.block(state, 16)
    scene.compress([one for one, (_, is_fp8) in zip(scene.blocks, blocks, strict=True) if is_fp8], len(blocks))
    scene.table(32, shared=[one for one in scene.blocks if one.state == BLOCK_STATE_HELD][:2], blocks=0)
    seen = scene.seen()
    usage = seen.pool.usage
    assert usage.free_blocks >= 0
    kinds = kinds_of_blocks(seen.pool, table_use(seen.tables, 16, places_of(seen.pool)))
    assert (sum(kinds.values()), min(kinds.values()) >= 0) == (usage.total_blocks, True)
    assert kinds["FP8 held"] + kinds["FP8 cached"] <= usage.split_blocks
    drawn = draw(Snapshot(seen.pool, seen.blocks), max(width, 24), lambda text, look: text)
    assert max(map(len, drawn[drawn.index("") :])) <= max(width, 24)
    figures = measure(seen)
    assert figures.held_blocks == sum(one.state == BLOCK_STATE_HELD for one in scene.blocks)
    words = re.findall(r"(\d+) (?:held|cached|quarantined|kept back|free)", dict(facts(seen, figures))["blocks"])
    assert sum(map(int, words)) == usage.total_blocks


def test_top_draws_both_formats_and_says_what_lies_in_them() -> None:
    timeline, scene = Timeline(), mixed_scene()
    first = at_the_top(timeline.frame(scene.seen()))
    assert first[1].count("▚") > first[1].count("▖") > first[1].count("╌") > 0
    assert first[2:4] == [
        "         █ 8 held 12 %  ▚ 4 FP8 held 6.2 %  ▒ 1 filling 1.6 %  ░ 4 cached 6.2 %",
        "         ▖ 3 FP8 cached 4.7 %  ╌ 2 kept back 3.1 %  · 42 free 66 %",
    ]
    words = "formats  13 in FP8 (7 places, 104 KiB), 13 in bf16 (208 KiB)"
    assert first[5:7] == [words, "         20 compressed, 3 decompressed, 2 over the error bound"]
    scene.counters["compressed_blocks"] = 44
    later = at_the_top(timeline.frame(scene.seen(at_s=NOW_S + 2)), 120)
    assert later[6] == f"{words}; 12 compressed/s, 0 decompressed/s, 2 over the error bound"


def test_fp8_blocks_of_a_table_are_a_part_of_a_place_and_no_leases() -> None:
    lines = at_the_top(Timeline().frame(mixed_scene().seen()), 120)
    assert "leases hold" not in "".join(lines)
    assert lines[-1].endswith("████ 20 %"), "8 halves and 9 whole places of 64"
    assert not any(line.startswith("formats") for line in at_the_top(Timeline().frame(Scene().seen())))


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_picture_with_both_formats_fits_the_terminal(width: int) -> None:
    scene = mixed_scene()
    scene.total = 400
    scene.reserve(3)
    for _ in range(60):
        scene.table(20)
    scene.block(BLOCK_STATE_QUARANTINED, 3)
    scene.compress(scene.blocks[4:12], 300)
    scene.compress(scene.blocks[17:22], 310)
    timeline = Timeline()
    timeline.frame(scene.seen())
    lines = at_the_top(timeline.frame(scene.seen(at_s=NOW_S + 1)), width, 30)
    assert max(map(len, lines)) <= width
    assert len(lines) <= 30
    assert lines[-1].startswith("and ")


def test_doctor_counts_places_and_blocks_of_either_format() -> None:
    seen = mixed_scene().seen()
    figures = measure(seen)
    lines = dict(facts(seen, figures))
    assert lines["blocks"] == "13 held (20 %), 7 cached (11 %), 2 kept back (3.1 %), 42 free (66 %)"
    assert lines["formats"] == (
        "13 in FP8 (7 places, 104 KiB), 13 in bf16 (208 KiB); 20 compressed, 3 decompressed and 2 over the error bound "
        "since memd's start 2 h ago"
    )
    assert lines["slots"].startswith("261 tokens in 272 slots of held blocks (96 %); empty: 11 in blocks written in")
    assert lines["slots"].endswith(", 0 of leases")
    assert (figures.held_blocks, figures.holders[0].own_blocks, figures.holders[0].own_places) == (17, 17, 13.0)
    told = as_json(seen, figures, diagnose(seen))
    assert {"kept_blocks": 2, "split_blocks": 7, "fp8_blocks": 13, "unit_bytes": 8192}.items() <= dict(
        told["pool"]  # type: ignore[call-overload]
    ).items()
    assert "formats" not in dict(facts(Scene().seen(), measure(Scene().seen())))


@pytest.mark.parametrize(("native", "places"), [(Format.BF16, 43), (Format.F32, 22)])
def test_a_pool_without_fp8_blocks_is_told_what_they_would_free(native: Format, places: int) -> None:
    scene = Scene(native=native)
    for length in (640, 800, 144):
        scene.table(length)
    # All full blocks but the first and the newest four of each table: 35, 45 and 4; and a cached one.
    scene.cached(1)
    effect = remedies(found(scene.seen(), "out_of_blocks"))["--fp8 pressure"]
    assert effect.startswith(f"of the blocks of now, 85 (84 of them in use) would fit in {places} places, which frees ")
    assert f"frees {85 - places};" in effect
    scene.suspended(100)
    assert "--fp8 pressure" in remedies(found(scene.seen(), "suspended_tables"))
    scene.blocks[10].k_error = 0.2
    assert "84 (83 of them" in remedies(found(scene.seen(), "out_of_blocks"))["--fp8 pressure"], "one lost too much"
    scene.counters["compressed_blocks"] = 1
    assert "--fp8 pressure" not in remedies(found(scene.seen(), "out_of_blocks"))


def test_what_fp8_would_hardly_free_is_no_advice() -> None:
    scene = Scene(counters={"refused_requests": 1})
    scene.cached(9)
    assert "--fp8 pressure" not in remedies(found(scene.seen(), "out_of_blocks")), "9 in 5 places frees 4"
    scene.cached(1)
    assert "frees 5;" in remedies(found(scene.seen(), "out_of_blocks"))["--fp8 pressure"]


def test_what_is_kept_back_is_wanted_beside_what_is_held() -> None:
    scene = Scene(counters={"refused_requests": 1}, kept=10)
    scene.table(90 * 16)
    scene.suspended(320)
    seen = scene.seen()
    assert found(seen, "suspended_tables").figures["needed_blocks"] == -(-(90 + 10 + 20) * 10 // 9)
    seen = scene.seen(tables=seen.tables[:1])
    assert found(seen, "out_of_blocks").figures["needed_blocks"] == 125
    scene.worker(waiting=1, running=1)
    assert found(scene.seen(), "out_of_blocks").figures["needed_blocks"] == -(-(90 + 10 + 90) * 10 // 9)


@pytest.mark.parametrize(("compressed", "over", "is_found"), [(45, 5, False), (44, 6, True), (30, 19, False)])
def test_fp8_is_in_vain_where_more_than_a_tenth_loses_too_much(compressed: int, over: int, is_found: bool) -> None:
    scene = Scene(counters={"compressed_blocks": compressed, "blocks_over_error": over}, kept=2)
    scene.cached(3)
    scene.blocks[1].k_error, scene.blocks[1].v_error = 0.081, 0.03
    findings = [one for one in diagnose(scene.seen()) if one.code == "compression_in_vain"]
    assert bool(findings) is is_found, "of 50 blocks; 49 are too few to say"
    for finding in findings:
        assert finding.severity is Severity.ADVICE
        assert finding.figures == {"compressed_blocks": compressed, "blocks_over_error": over, "kept_blocks": 2}
        assert remedies(finding) == {
            "--fp8 off": "workers no longer compute for nothing, and 2 places kept back can be granted"
        }
        assert finding.evidence == ["block 1001: K would lose 8.1 %, V 3.0 %"]


@pytest.mark.parametrize("native", NATIVE)
def test_holes_are_named_with_the_blocks_that_fill_them(native: Format) -> None:
    def with_lone_blocks(count: int) -> Scene:
        scene = Scene(native=native)
        scene.cached(30)
        for index in range(count):
            scene.compress(scene.blocks[index : index + 1], 50 + index)
        return scene

    holes_each, most = native.itemsize - 1, 5 * native.itemsize // (native.itemsize - 1)
    assert diagnose(with_lone_blocks(most).seen()) == []
    seen = with_lone_blocks(most + 1).seen()
    finding, holes = found(seen, "half_empty_places"), (most + 1) * holes_each
    assert finding.severity is Severity.ADVICE
    assert finding.figures == {
        "split_blocks": most + 1,
        "fp8_blocks": most + 1,
        "empty_units": holes,
        "fitting_blocks": min(holes, 30 - most - 1),
    }
    (remedy,) = finding.remedies
    assert remedy.value.startswith(f"block_ids {1000 + most + 1}, ")
    assert remedy.value.count(",") == 7
    seen = with_lone_blocks(30).seen()
    assert diagnose(seen) == [], "no block is left that could fill them"


def test_moved_fp8_blocks_do_not_hide_what_a_lost_worker_keeps() -> None:
    scene = Scene(counters={"lost_leases": 1})
    for _ in range(5):
        scene.block(BLOCK_STATE_QUARANTINED, 16)
    scene.cached(1)
    scene.compress(scene.blocks[:4], 20)
    assert scene.seen().moved == 3, "four in two places, and one of the native format"
    assert diagnose(scene.seen()) == []
    scene.block(BLOCK_STATE_QUARANTINED, 3)
    assert found(scene.seen(), "lost_workers").figures["quarantined_blocks"] == 1
    scene.blocks[0].state = BLOCK_STATE_HELD
    assert (scene.seen().moved, found(scene.seen(), "lost_workers").figures["quarantined_blocks"]) == (2, 1)


def test_idle_tables_are_measured_by_the_places_that_they_take() -> None:
    scene = Scene()
    scene.table(20 * 16, idle_s=600)
    scene.table(16, idle_s=600)
    scene.compress(scene.blocks[:12], 0)
    scene.table(82 * 16)  # from now on blocks are short
    scene.blocks[0].idle_time.FromSeconds(0)
    finding = found(scene.seen(), "idle_tables")
    assert finding.figures["own_blocks"] == 21
    assert "with 21 blocks of their own (15 % of the pool)" in finding.detail


def small_pool(num_blocks: int, fp8: Fp8 | None) -> tuple[Pool, int, Worker]:
    """A pool of memd's core, a client's lease, and a worker that takes Recodes."""
    pool = Pool(7, B, 1 << 30, num_blocks, tiers=Tiers(fp8))
    pool.declare(GEOMETRY)
    pool.tick(0.0)
    return pool, pool.create_lease("me", 1000.0, 0.0).lease_id, Worker(pool, "one")


def test_a_real_pool_is_drawn_right_while_blocks_are_compressed() -> None:
    pool, lease, worker = small_pool(16, Fp8())
    grant = worker.serve(tokens(6 * B + 3))

    def looks(row: str, slots: str) -> None:
        now = seen(pool)
        assert draw(Snapshot(now.pool, now.blocks, now.tables), 60, lambda text, look: text).count(f" 0  {row}") == 1
        kinds = kinds_of_blocks(now.pool, table_use(now.tables, B, places_of(now.pool)))
        usage = now.pool.usage
        assert sum(kinds.values()) == usage.total_blocks
        assert kinds["FP8 held"] + kinds["FP8 cached"] == usage.split_blocks == row.count("▚") + row.count("▖")
        assert kinds["free"] + kinds["kept back"] == row.count("·")
        assert dict(facts(now, measure(now)))["slots"].startswith(slots)
        assert diagnose(now) == []

    looks("·██████▒········", "51 tokens in 56 slots")
    (recode,) = pool.compression.compress(lease, grant.blocks.block_ids[1:4], 2.0)[1]
    looks("·█◆◆◆██▒▚▚······", "51 tokens in 56 slots")  # the worker has both, and nothing in reserve
    assert worker.answer() is recode
    looks("·█✗✗✗██▒▚▚······", "51 tokens in 56 slots")
    worker.acknowledge()
    looks("·█···██▒▚▚······", "51 tokens in 56 slots")
    worker.step(releases=[grant.table_id])
    looks("·░···░░·▖▖······", "no block is held")


def test_what_fp8_is_said_to_free_it_frees() -> None:
    def served(policy: Policy | None) -> Observation:
        pool, _, worker = small_pool(100, policy and Fp8(policy, kept_share=0.0))
        for seed in range(4):
            worker.serve(tokens(24 * B - 1, seed))
        pool.tick(2.0)
        while worker.hear():
            worker.answer()
            worker.acknowledge()
        return seen(pool)

    short = served(None)
    assert [one.code for one in diagnose(short)] == ["out_of_blocks"]
    effect = remedies(found(short, "out_of_blocks"))["--fp8 pressure"]
    assert effect.startswith("of the blocks of now, 72 (72 of them in use) would fit in 36 places, which frees 36;")
    assert diagnose(served(Policy.PRESSURE)) == []
    assert served(Policy.ALWAYS).pool.usage.free_blocks == short.pool.usage.free_blocks + 36


def test_the_blocks_that_are_named_to_fill_holes_give_places_back() -> None:
    pool, lease, worker = small_pool(64, Fp8(kept_share=0.0))
    grant = worker.serve(tokens(40 * B - 1))
    compress(pool, lease, grant.blocks.block_ids[1:21], [worker])
    worker.acknowledge()
    assert diagnose(seen(pool)) == []
    (recode,) = pool.compression.decompress(lease, grant.blocks.block_ids[1:21:2], 3.0)[1]
    assert worker.answer(3.0) is recode
    worker.acknowledge(3.0)
    of = seen(pool)
    finding = found(of, "half_empty_places")
    assert finding.detail == (
        "10 FP8 blocks lie in 10 split places, which would hold 20: 2.5 KiB (7.8 % of the pool) can be granted to "
        "nobody."
    )
    (remedy,) = finding.remedies
    assert remedy.effect.startswith("fills holes: 10 full blocks of now fit into them")
    named = [int(one) for one in remedy.value.removeprefix("block_ids ").split(", ")]
    compress(pool, lease, named, [worker], now=4.0)
    worker.acknowledge(4.0)
    assert pool.usage().free == of.pool.usage.free_blocks + len(named)
    assert diagnose(seen(pool)) == []
