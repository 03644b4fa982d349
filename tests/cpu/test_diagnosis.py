"""What `pagepool doctor` finds in a pool: scenes of plain values, with the figures that each must give."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.config import InferdConfig
from memd.config import MemdConfig
from pagekernels.layout import Format, pack_entry
from pagepool.memd.v1.types_pb2 import (
    BLOCK_STATE_CACHED,
    BLOCK_STATE_HELD,
    BLOCK_STATE_QUARANTINED,
    Pool,
)
from pagepool_client.diagnosis.diagnose import diagnose
from pagepool_client.diagnosis.figures import Holder, measure
from pagepool_client.diagnosis.findings import Finding, Severity
from pagepool_client.diagnosis.observation import Observation, WorkerReport
from pagepool_client.diagnosis.report import as_json, facts
from pagepool_client.diagnosis.words import share, size_flag, span
from tests.cpu.pool_scene import EPOCH, KIB, NOW_S, Scene


def codes(seen: Observation) -> list[tuple[str, str]]:
    return [(finding.code, finding.severity.value) for finding in diagnose(seen)]


def found(seen: Observation, code: str) -> Finding:
    (finding,) = [finding for finding in diagnose(seen) if finding.code == code]
    return finding


def tried(finding: Finding) -> list[str]:
    return [f"{remedy.where} {remedy.name} {remedy.value}" for remedy in finding.remedies]


def healthy_scene() -> Scene:
    scene = Scene(counters={"prefix_query_tokens": 5000, "prefix_hit_tokens": 3000, "allocated_blocks": 300})
    prefix = [scene.block(BLOCK_STATE_HELD, 16) for _ in range(4)]
    for tokens in (150, 160, 170):
        scene.table(tokens, shared=prefix)
    scene.cached(30)
    scene.worker(waiting=0, running=3)
    return scene


def test_a_healthy_pool_has_no_findings_and_its_figures_are_right() -> None:
    seen = healthy_scene().seen()
    assert diagnose(seen) == []
    figures = measure(seen)
    # 150, 160 and 170 tokens are 10, 10 and 11 blocks, of which each has 4 in common with the others.
    assert (figures.available, figures.sealed, figures.tokens) == (77, 30 + 4 + 5 + 6 + 6, 64 + 86 + 96 + 106)
    assert (figures.tail_slots, figures.reserved_blocks, figures.direct_blocks) == (10 + 0 + 6, 0, 0)
    assert (figures.saved_blocks, figures.stray_units) == (8, 0)
    assert figures.mean_table_blocks == pytest.approx(31 / 3)
    assert figures.holders[0] == Holder(
        50, 3, "w", blocks=11, own_blocks=7, own_places=7.0, tokens=170, idle_s=0.0, worker=True
    )
    lines = dict(facts(seen, figures))
    assert lines["pool"] == "tiny, 100 blocks of 16 tokens (16 KiB each) on host, up 2 h"
    assert lines["blocks"] == "23 held (23 %), 30 cached (30 %), 47 free (47 %)"
    assert lines["slots"] == (
        "352 tokens in 368 slots of held blocks (96 %); empty: 16 in blocks written in part, 0 in tables ahead of "
        "their tokens, 0 in workers' reserves, 0 of leases"
    )
    assert lines["sharing"] == "3 tables; without sharing they would need 8 more blocks"
    assert lines["fragments"] == "none between blocks: any free place fits any block"
    assert lines["block size"] == "16; as practitioners advise at 1 KiB a token"
    assert lines["prefixes"].startswith("3,000 of 5,000 prompt tokens found (60 %) since memd's start 2 h ago")
    assert lines["queue"].startswith("3 running and 0 waiting at 1 worker; 0 requests for blocks refused")


@pytest.mark.parametrize("scene", [Scene(), Scene(total=1)])
def test_an_empty_pool_is_healthy(scene: Scene) -> None:
    seen = scene.seen()
    assert diagnose(seen) == []
    assert dict(facts(seen, measure(seen)))["slots"] == "no block is held"


def short_scene(tokens: int, count: int = 40, **changes: Any) -> Scene:
    scene = Scene(block_size=128, **changes)
    for _ in range(count):
        scene.table(tokens)
    return scene


def test_blocks_written_in_part_of_which_no_table_is_left_are_no_advice() -> None:
    scene = Scene(block_size=128)
    for _ in range(40):
        scene.block(BLOCK_STATE_HELD, 20, [(7, 0)])
    assert "waste_inside_blocks" not in [code for code, _ in codes(scene.seen())]


def test_short_sequences_in_large_blocks_ask_for_smaller_ones() -> None:
    seen = short_scene(20).seen()
    assert codes(seen) == [("waste_inside_blocks", "advice")]
    finding = found(seen, "waste_inside_blocks")
    # 20 of 128 slots are used; blocks of 8 leave 4 of 24 empty, of 16 and 32 leave 12 of 32.
    assert finding.figures == {
        "empty_slots": 40 * 108,
        "written_slots": 40 * 128,
        "median_tokens": 20,
        "empty_slots_then": 40 * 4,
    }
    assert tried(finding) == ["memd --block-size 8"]
    assert finding.detail.startswith("4,320 of 5,120 slots in written blocks (84 %) hold no token: half of the 40 seq")
    assert finding.remedies[0].effect == "160 slots would be empty (17 %); practice is 16 for a model of this size"


@pytest.mark.parametrize(
    ("tokens", "size"),
    [(64, "64"), (62, "64"), (30, "32"), (46, "16"), (8, "8")],
    ids=["no waste at 64", "under 5 % at 64", "equal at 32, 16 and 8", "under 5 % at 16", "none at 8 alone"],
)
def test_the_largest_block_size_that_wastes_little_is_advised(tokens: int, size: str) -> None:
    (finding,) = diagnose(short_scene(tokens).seen())
    assert tried(finding) == [f"memd --block-size {size}"]


def test_waste_that_smaller_blocks_would_not_save_is_no_finding() -> None:
    scene = Scene(block_size=16)
    for _ in range(50):
        scene.table(1)
    # 15 of 16 slots are empty, and 7 of 8 would be: that saves more than half.
    assert tried(found(scene.seen(), "waste_inside_blocks")) == ["memd --block-size 8"]
    at_the_least = Scene(block_size=8)
    for _ in range(50):
        at_the_least.table(1)
    assert diagnose(at_the_least.seen()) == []
    no_gain = Scene(block_size=16)
    for _ in range(50):
        no_gain.table(12)  # 4 of 16 empty, and 4 of 2 x 8 as well
    assert diagnose(no_gain.seen()) == []


def test_waste_is_a_problem_only_when_blocks_are_short() -> None:
    scene = short_scene(20, count=97)
    scene.counters = {"refused_requests": 3}
    assert codes(scene.seen()) == [("out_of_blocks", "problem"), ("waste_inside_blocks", "problem")]
    assert diagnose(short_scene(20, count=5).seen()) == [], "540 of 12,800 slots"


def test_less_waste_matters_when_blocks_are_short() -> None:
    def codes_of(tokens: int, count: int) -> list[str]:
        scene = Scene(block_size=128, total=30)
        for _ in range(count):
            scene.table(tokens)
        return [code for code, _ in codes(scene.seen())]

    assert codes_of(120, 29) == ["out_of_blocks", "waste_inside_blocks"], "8 of 128 slots, 6.25 %"
    assert codes_of(123, 29) == ["out_of_blocks"], "5 of 128 slots, 3.9 %"
    assert codes_of(120, 20) == [], "160 of the pool's 3,840 slots, 4.2 %"
    assert codes_of(120, 25) == ["waste_inside_blocks"], "200 of 3,840, 5.2 %"


def test_pinned_blocks_matter_from_half_of_a_pool_with_room() -> None:
    for count, expected in ((49, []), (50, [("held_by_leases", "advice")])):
        scene = Scene()
        scene.of_lease(7, count)
        assert codes(scene.seen()) == expected


def test_pinned_prefixes_are_out_of_reach_and_named_when_blocks_are_short() -> None:
    scene = Scene(counters={"refused_requests": 1})
    scene.table(60 * 16)
    scene.cached(30, pinned=True, idle_s=30)
    scene.cached(6, pinned=True, idle_s=600)
    scene.cached(2)
    seen = scene.seen()  # 4 can be granted: 2 free and 2 cached
    assert (measure(seen).available, codes(seen)) == (4, [("out_of_blocks", "problem"), ("pinned_prefixes", "problem")])
    finding = found(seen, "pinned_prefixes")
    assert finding.figures == {"pinned_blocks": 36, "total_blocks": 100, "longest_idle_seconds": 600.0}
    assert tried(finding) == ["client UnpinPrefix the prefix that was last used 10 min ago"]
    assert "36 of the cached ones pinned" in dict(facts(seen, measure(seen)))["blocks"]
    for count, expected in ((39, []), (40, [("pinned_prefixes", "advice")])):
        roomy = Scene()
        roomy.cached(count, pinned=True)
        assert codes(roomy.seen()) == expected


def test_pins_are_named_to_a_request_that_waits_for_more_than_they_leave() -> None:
    scene = Scene()
    scene.cached(39, pinned=True)
    assert codes(scene.seen()) == []
    scene.worker(waiting=1, running=0)
    assert "pinned_prefixes" in dict(codes(scene.seen()))


def test_large_models_are_advised_blocks_of_8() -> None:
    seen = short_scene(20, token_bytes=256 * KIB).seen()
    assert found(seen, "waste_inside_blocks").remedies[0].effect.endswith("practice is 8 for a model of this size")
    assert dict(facts(seen, measure(seen)))["block size"] == "128; practitioners advise 8 at 256 KiB a token"
    below = short_scene(20, token_bytes=256 * KIB - 1).seen()
    assert dict(facts(below, measure(below)))["block size"].startswith("128; practitioners advise 16")


def pinned_scene() -> Scene:
    scene = Scene(counters={"refused_requests": 12})
    scene.of_lease(7, 80, num_tokens=16, idle_s=300)
    scene.of_lease(8, 16, idle_s=5)
    return scene


def test_a_pool_full_of_pinned_blocks_names_the_leases_and_what_to_release() -> None:
    seen = pinned_scene().seen()
    assert codes(seen) == [("out_of_blocks", "problem"), ("held_by_leases", "problem")]
    full, pinned = diagnose(seen)
    assert full.figures == {
        "total_blocks": 100,
        "held_blocks": 96,
        "most_held_blocks": 96,
        "available_blocks": 4,
        "refused_requests": 12,
        "waiting_requests": 0,
        "saved_blocks": 0,
        "mean_table_blocks": 0.0,
        "needed_blocks": 125,
    }
    assert full.title == "The pool is out of blocks"
    assert full.detail.startswith("96 of 100 blocks are held and 4 can be granted; 12 requests for blocks were refused")
    assert tried(full) == ["memd --pool-bytes 2MiB", "memd --fp8 pressure"], "125 blocks of 16 KiB are 1.95 MiB"
    assert full.evidence == [
        "held by lease 7: 80 blocks, 80 of its own, idle 5 min",
        "held by lease 8: 16 blocks, 16 of its own, idle 5.0 s",
    ]
    assert pinned.figures == {"pinned_blocks": 96, "total_blocks": 100, "leases": 2}
    assert tried(pinned) == ["client ReleaseLease lease_id 7"]
    assert pinned.remedies[0].effect.startswith("gives 80 blocks back")


def test_a_pool_full_of_running_tables_names_the_largest_and_how_many_blocks_would_do() -> None:
    scene = Scene(total=100, counters={"refused_requests": 1})
    scene.table(640)
    scene.table(800)
    scene.table(160)
    scene.worker(waiting=4, running=3)
    finding = found(scene.seen(), "out_of_blocks")
    # 100 held, and four waiting requests of 100 / 3 blocks each, to be nine tenths of the pool.
    assert finding.figures["needed_blocks"] == 263 == -(-(100 + 4 * 34) * 10 // 9)
    assert [line.split(",")[0] for line in finding.evidence] == [
        "held by table 2 of w: 50 blocks",
        "held by table 1 of w: 40 blocks",
        "held by table 3 of w: 10 blocks",
    ]
    assert size_flag(263 * 16 * KIB) == "5MiB"
    assert tried(finding) == ["memd --pool-bytes 5MiB", "memd --fp8 pressure"]


def test_a_pool_that_is_capped_is_told_about_the_cap_first() -> None:
    scene = pinned_scene()
    scene.slab_blocks = 110
    cap, more, fp8 = "memd --max-num-blocks 110", "memd --pool-bytes 2MiB", "memd --fp8 pressure"
    assert tried(diagnose(scene.seen())[0]) == [cap, more, fp8]
    scene.slab_blocks = 500
    finding = diagnose(scene.seen())[0]
    assert tried(finding) == ["memd --max-num-blocks 125", fp8]
    assert finding.remedies[0].effect == "the pool's 7.81 MiB have room for 500 blocks, but are cut into 100"


def test_nearly_full_and_formerly_full_are_told_apart() -> None:
    scene = Scene()
    scene.table(96 * 16)
    (finding,) = diagnose(scene.seen())
    assert (finding.title, finding.severity) == ("The pool is nearly full", Severity.ADVICE)
    scene = Scene(counters={"refused_requests": 2})
    scene.table(95 * 16)
    (finding,) = diagnose(scene.seen())
    assert (finding.title, finding.severity) == ("The pool was out of blocks", Severity.ADVICE)


def queue_scene(blocks_each: int, waiting: int = 2) -> Scene:
    scene = Scene()
    for _ in range(4):
        scene.table(blocks_each * 16)
    scene.cached(5)
    scene.worker(waiting=waiting, running=4)
    return scene


def test_a_queue_for_more_blocks_than_are_left_is_the_pools_fault() -> None:
    seen = queue_scene(blocks_each=21).seen()  # 16 are left, and requests like those that run need 21
    assert codes(seen) == [("out_of_blocks", "problem")]
    finding = found(seen, "out_of_blocks")
    assert (finding.figures["available_blocks"], finding.figures["mean_table_blocks"]) == (16, 21.0)
    assert finding.figures["needed_blocks"] == 140 == -(-(84 + 2 * 21) * 10 // 9)
    assert "2 requests wait" in finding.detail


def test_a_queue_before_a_pool_with_room_is_the_workers_limit() -> None:
    seen = queue_scene(blocks_each=10, waiting=3).seen()  # 60 are left: six more like those that run
    assert codes(seen) == [("workers_are_full", "problem")]
    (finding,) = diagnose(seen)
    assert finding.figures == {
        "waiting_requests": 3,
        "running_requests": 4,
        "available_blocks": 60,
        "mean_table_blocks": 10.0,
        "fitting_requests": 6,
    }
    assert tried(finding) == ["inferd --max-num-seqs 8", "inferd --memd unix:/memd.sock"], "4 run, 3 wait"
    assert tried(diagnose(queue_scene(10, waiting=500).seen())[0])[0] == "inferd --max-num-seqs 16", "only 6 more fit"


def test_a_queue_for_as_many_blocks_as_are_left_is_the_workers_limit() -> None:
    seen = queue_scene(blocks_each=20).seen()  # 20 are left, and that is what a table has
    assert [finding.figures["fitting_requests"] for finding in diagnose(seen)] == [1]


def reuse_scene(found_tokens: int = 100, evicted: int = 0, **changes: Any) -> Scene:
    counters = {"prefix_query_tokens": 4000, "prefix_hit_tokens": found_tokens, "allocated_blocks": 250}
    scene = Scene(counters={**counters, "evicted_blocks": evicted}, **changes)
    scene.cached(40)
    return scene


def test_prefixes_that_were_evicted_ask_for_more_blocks() -> None:
    scene = reuse_scene(evicted=60)
    assert codes(scene.seen()) == [("prefixes_evicted", "problem")]
    (finding,) = diagnose(scene.seen())
    assert finding.figures == {
        "query_tokens": 4000,
        "hit_tokens": 100,
        "allocated_blocks": 250,
        "evicted_blocks": 60,
        "sealed_blocks": 40,
        "needed_blocks": 160,
    }
    assert tried(finding) == ["memd --pool-bytes 3MiB", "memd --host-tier 1MiB"], "160 of 16 KiB, and 60"
    assert finding.detail.startswith(
        "100 of 4,000 prompt tokens (2.5 %) were found since memd's start 2 h ago; 60 of 250"
    )
    assert codes(reuse_scene(evicted=25).seen()) == [("prefixes_evicted", "problem")], "a tenth of what was granted"
    assert found(reuse_scene(evicted=240).seen(), "prefixes_evicted").figures["needed_blocks"] == 200, "at most twice"


def test_many_distinct_prefixes_are_told_to_begin_alike() -> None:
    scene = reuse_scene(evicted=24)  # under a tenth of what was granted
    scene.table(32)
    scene.table(32)
    finding = found(scene.seen(), "prompts_differ")
    assert (finding.figures["tables"], finding.figures["first_blocks"]) == (2, 2)
    assert tried(finding) == ["request text what all share first", "request cache_salt one for all who may share"]
    coarse = reuse_scene(block_size=64)
    assert tried(found(coarse.seen(), "prompts_differ"))[-1] == "memd --block-size 16"


def test_a_young_pool_is_cold_and_wants_warming_up() -> None:
    assert codes(reuse_scene(uptime_s=299).seen()) == [("pool_is_cold", "advice")]
    assert tried(found(reuse_scene(uptime_s=299).seen(), "pool_is_cold")) == ["request max_tokens 1"]
    assert codes(reuse_scene(uptime_s=300).seen()) == [("prompts_differ", "advice")]


def test_prompts_that_never_fill_a_block_cannot_be_found() -> None:
    scene = reuse_scene()
    scene.blocks.clear()
    assert tried(found(scene.seen(), "prompts_too_short")) == ["memd --block-size 8"]
    scene.block_size = 8
    assert found(scene.seen(), "prompts_too_short").remedies[0].where == "request"


def test_a_hit_rate_is_judged_only_by_enough_tokens_and_only_if_low() -> None:
    assert diagnose(reuse_scene(found_tokens=800).seen()) == [], "a fifth was found"
    assert codes(reuse_scene(found_tokens=799).seen()) == [("prompts_differ", "advice")]
    scene = reuse_scene()
    scene.counters.update(prefix_query_tokens=999)
    assert diagnose(scene.seen()) == []


def test_counters_are_those_of_the_time_that_was_watched() -> None:
    scene = reuse_scene(found_tokens=0, evicted=200)
    earlier = scene.seen().pool
    scene.counters.update(prefix_query_tokens=6000, prefix_hit_tokens=1500)
    seen = scene.seen(earlier=[earlier], watched_s=30.0)
    assert diagnose(seen) == [], "1,500 of the last 2,000 were found, and nothing was evicted"
    assert codes(scene.seen(at_s=NOW_S)) == [], "1,500 of all 6,000"
    scene.counters.update(refused_requests=4, lost_leases=1)
    seen = scene.seen(earlier=[earlier], watched_s=30.0)
    assert codes(seen) == [("out_of_blocks", "advice"), ("lost_workers", "advice")]
    assert "4 requests for blocks were refused in the last 30 s" in found(seen, "out_of_blocks").detail


def test_memory_over_time_counts_the_worst_moment() -> None:
    scene = Scene()
    scene.table(90 * 16)
    peak = scene.seen().pool
    peak.usage.held_blocks, peak.usage.free_blocks = 99, 1
    scene.blocks, scene.tables = scene.blocks[:20], []
    seen = scene.seen(earlier=[scene.seen().pool, peak], watched_s=60.0)
    finding = found(seen, "out_of_blocks")
    assert (finding.figures["most_held_blocks"], finding.figures["held_blocks"]) == (99, 20)
    assert dict(facts(seen, measure(seen)))["blocks"].endswith("in 60 s held went from 20 to 20, at most 99")


def test_tables_that_nobody_touches_are_named_with_what_they_would_give_back() -> None:
    scene = Scene()
    prefix = [scene.block(BLOCK_STATE_HELD, 16) for _ in range(10)]
    scene.table(320, shared=prefix, idle_s=600)
    scene.table(400, shared=prefix, idle_s=90)
    scene.table(160, shared=prefix, idle_s=59.9)
    finding = found(scene.seen(), "idle_tables")
    assert finding.figures == {"tables": 2, "own_blocks": 10 + 15, "longest_idle_seconds": 600.0}
    assert tried(finding) == ["client cancel the call whose table 2 is, at w"]
    assert finding.remedies[0].effect == "gives 15 blocks back"
    assert "(25 % of the pool) were not touched for 60 s or more, one for 10 min" in finding.detail
    scene.tables[0].idle_time.FromSeconds(1)
    assert codes(scene.seen()) == [], "15 of 100 blocks, while 65 are free"


def test_what_a_lost_worker_keeps_is_named() -> None:
    scene = Scene(counters={"lost_leases": 1})
    for _ in range(8):
        scene.block(BLOCK_STATE_QUARANTINED, 3, [(9, 4)])
    (finding,) = diagnose(scene.seen())
    assert (finding.code, finding.severity) == ("lost_workers", Severity.PROBLEM)
    assert finding.figures == {"quarantined_blocks": 8, "lost_leases": 1}
    assert tried(finding) == ["memd --heartbeat-timeout 30s"]
    assert diagnose(Scene(counters={"lost_leases": 1}).seen()) == [], "nobody waits for it any more"


def test_blocks_that_have_moved_are_nobodys_loss() -> None:
    scene = Scene(counters={"merged_blocks": 8})
    for _ in range(8):
        scene.block(BLOCK_STATE_QUARANTINED, scene.block_size, [(9, 0)])
    assert diagnose(scene.seen()) == []


def test_fragmentation_is_what_smaller_blocks_leave_beside_them() -> None:
    scene = Scene()
    for unit in (0, 3, 4, 5):
        scene.block(BLOCK_STATE_CACHED, 16).entry = pack_entry(Format.FP8_E4M3, 0, unit)
    seen = scene.seen()
    assert measure(seen).stray_units == 2, "units 1 and 2; 4 and 5 fill a place"
    assert dict(facts(seen, measure(seen)))["fragments"] == "2 units free in places that hold smaller blocks"


def test_a_pool_without_geometry_says_how_it_gets_one() -> None:
    pool = Pool(epoch=EPOCH, slab_bytes=64 << 20, block_size=16)
    seen = Observation(pool, workers=[WorkerReport("unix:/w", trouble="it loads", asked_for=False)], target="unix:/m")
    (finding,) = diagnose(seen)
    assert (finding.code, finding.figures) == ("no_geometry", {"slab_bytes": 64 << 20})
    assert tried(finding) == ["inferd --memd unix:/m", "memd --geometry FILE"]
    assert finding.evidence == ["worker at unix:/w: it loads"]
    assert as_json(seen, None, [finding])["figures"] is None


def test_workers_that_are_silent_or_elsewhere_are_named() -> None:
    scene = healthy_scene()
    scene.worker(waiting=0, running=0, epoch=0)
    scene.worker(waiting=0, running=0, epoch=255)
    scene.workers += [
        WorkerReport("unix:/gone", trouble="nothing answers at unix:/gone"),
        WorkerReport("unix:/default", trouble="nothing answers", asked_for=False),
    ]
    findings = diagnose(scene.seen())
    assert [finding.code for finding in findings] == ["worker_elsewhere", "worker_elsewhere", "worker_silent"]
    assert "attached to no pool" in findings[0].detail
    assert "the memd life 00000000000000ff, while this memd's life is 0000000000000007" in findings[1].detail
    assert findings[2].detail == "nothing answers at unix:/gone."


def fp8_scenes() -> list[Scene]:
    """One in which FP8 is in vain, and one whose split places are half empty."""
    vain, holes = Scene(counters={"compressed_blocks": 50, "blocks_over_error": 50}), Scene()
    holes.cached(40)
    for index in range(12):
        holes.compress(holes.blocks[index : index + 1], 40 + index)
    return [vain, holes]


def every_finding() -> list[Finding]:
    few_free, lost = queue_scene(21), Scene()
    lost.block(BLOCK_STATE_QUARANTINED, 3, [(9, 4)])
    reserved, idle = Scene(), Scene()
    reserved.table(40, blocks=97, lease=7)
    idle.table(30 * 16, idle_s=100)
    never = reuse_scene()
    never.blocks.clear()
    elsewhere = Scene(workers=[WorkerReport("unix:/gone", trouble="nothing answers")])
    elsewhere.worker(0, 0, epoch=1)
    capped, kept, asleep = pinned_scene(), Scene(), Scene()
    asleep.suspended(40)
    capped.slab_blocks = 110
    kept.cached(50, pinned=True)
    scenes = [few_free, lost, reserved, idle, never, elsewhere, capped, queue_scene(10), short_scene(20)]
    scenes += [
        *fp8_scenes(),
        kept,
        asleep,
        reuse_scene(evicted=60),
        reuse_scene(block_size=64),
        reuse_scene(uptime_s=1),
    ]
    empty = Observation(Pool(slab_bytes=1 << 20), target="unix:/m.sock")
    return [finding for seen in (*(scene.seen() for scene in scenes), empty) for finding in diagnose(seen)]


def test_every_finding_says_which_real_flag_to_set_to_which_legal_value() -> None:
    settings = {
        where: {f"--{one.name.replace('_', '-')}": one.metadata["parse"] for one in fields(config)}
        for where, config in (("memd", MemdConfig), ("inferd", InferdConfig))
    }
    findings = every_finding()
    assert len({finding.code for finding in findings}) == 18
    for finding in findings:
        assert finding.remedies, finding
        assert finding.detail.endswith("."), finding
        for remedy in finding.remedies:
            assert remedy.value, finding
            assert remedy.effect, finding
            if remedy.where in settings:
                settings[remedy.where][remedy.name](remedy.value)


def test_every_finding_stands_in_the_document() -> None:
    document = (Path(__file__).resolve().parents[2] / "docs" / "pool.md").read_text()
    assert {finding.code for finding in every_finding()} == set(re.findall(r"`([a-z]+(?:_[a-z]+)+)`", document)) - {
        "max_tokens",
        "cache_salt",
    }


@given(
    st.lists(st.tuples(st.integers(1, 200), st.integers(0, 20), st.integers(0, 3)), max_size=8),
    st.integers(0, 5),
    st.sampled_from([8, 16, 64]),
)
def test_every_slot_of_a_held_block_is_accounted_for_once(
    tables: list[tuple[int, int, int]], direct: int, block_size: int
) -> None:
    scene = Scene(total=2000, block_size=block_size)
    prefix = [scene.block(BLOCK_STATE_HELD, block_size) for _ in range(3)] if tables else []
    for tokens, blocks, shared in tables:
        common = prefix[: min(shared, tokens // block_size)]
        scene.table(tokens, blocks, shared=common)
    if prefix:
        scene.table(3 * block_size + 1, shared=prefix)
    scene.of_lease(9, direct)
    figures, held = measure(scene.seen()), scene.seen().pool.usage.held_blocks
    empty = figures.tail_slots + (figures.reserved_blocks + figures.direct_blocks) * block_size
    assert figures.tokens + empty == held * block_size
    assert sum(len(table.block_ids) for table in scene.tables) == held - direct + figures.saved_blocks
    assert sum(holder.blocks for holder in figures.holders) == held + figures.saved_blocks


def test_figures_are_said_as_people_and_flags_have_them() -> None:
    assert [share(1, 0), share(0, 5), share(1, 1000), share(99, 1000), share(1, 10), share(2, 3)] == [
        "0 %",
        "0 %",
        "0.1 %",
        "9.9 %",
        "10 %",
        "67 %",
    ]
    assert [span(0.04), span(9.94), span(9.96), span(119), span(120), span(7200), span(172_800)] == [
        "0.0 s",
        "9.9 s",
        "10 s",
        "119 s",
        "2 min",
        "2 h",
        "2 d",
    ]
    assert [size_flag(1), size_flag((1 << 20) + 1), size_flag(1 << 30), size_flag((1 << 30) + 1)] == [
        "1MiB",
        "2MiB",
        "1GiB",
        "1.25GiB",
    ]
