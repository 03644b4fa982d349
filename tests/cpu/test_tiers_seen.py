"""Pools with a host tier, as `pagepool blocks`, `top` and `doctor` show them: what is below is not the device's."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memd.core.fp8 import Fp8, Policy
from memd.core.pool import Pool
from memd.core.values import TableRequest
from pagekernels.layout import Format, pack_entry
from pagepool.memd.v1.types_pb2 import BLOCK_STATE_HELD, BLOCK_STATE_QUARANTINED
from pagepool_client.cli.block_map import Snapshot, draw
from pagepool_client.diagnosis.diagnose import diagnose
from pagepool_client.diagnosis.figures import measure
from pagepool_client.diagnosis.formats import Places, is_fp8, places_of
from pagepool_client.diagnosis.observation import Observation
from pagepool_client.diagnosis.report import as_json, facts
from pagepool_client.diagnosis.tiers import host_tier, is_below
from pagepool_client.diagnosis.timeline import Timeline, kinds_of_blocks, table_use
from tests.cpu.compression_rig import B, Worker, compress, make, move_all, tokens
from tests.cpu.pool_scene import NOW_S, Scene
from tests.cpu.seen_pools import at_the_top, codes, finding, remedies, seen

SLABS = [pytest.param(1, id="gpu"), pytest.param(0, id="shared memory")]
"""Where the host tier is: in a slab of its own, or behind the device."""


def rig(slab: int, num_blocks: int = 10, num_host: int = 20, fp8: Fp8 | None = None) -> tuple[Pool, int, Worker]:
    """A pool with a host tier, a client's lease, and a worker."""
    pool, lease = make(num_blocks, fp8, num_host, slab=slab)
    return pool, lease, Worker(pool, "one")


def lowered(pool: Pool, worker: Worker, prompt: list[int]) -> list[int]:
    """A prompt was served and its blocks went down; tables of these ids have nearly all of the device."""
    worker.step(1.0, releases=[worker.serve(prompt).table_id])
    tables = []
    for seed in range(5):  # the copies keep up
        (one,) = worker.step(1.5, creates=[TableRequest(tokens(2 * B - 1, 10 + seed), 2 - seed // 4)]).grants
        tables.append(one.table_id)
        move_all(pool, 2.0)
    return tables


def on_the_map(of: Observation, width: int = 80) -> list[str]:
    return draw(Snapshot(of.pool, of.blocks, of.tables), width, lambda text, look: text)


def adds_up(of: Observation) -> bool:
    """Whether no sum of the device counts what is below."""
    usage, figures = of.pool.usage, measure(of)
    kinds = kinds_of_blocks(of.pool, table_use(of.tables, of.pool.block_size, places_of(of.pool)))
    assert (sum(kinds.values()), min(kinds.values()) >= 0) == (usage.total_blocks, True)
    words = re.findall(r"(\d+) (?:held|cached|quarantined|kept back|free)", dict(facts(of, figures))["blocks"])
    assert sum(map(int, words)) == usage.total_blocks
    legend = re.findall(r"^([█◆▒▫░▚▖✗·]) +(\d+) ", "\n".join(on_the_map(of)), re.MULTILINE)
    cells = {glyph: int(number) for glyph, number in legend}
    assert cells.get("·", 0) == usage.free_blocks + usage.kept_blocks
    assert cells.get("░", 0) + cells.get("▖", 0) == usage.cached_blocks
    return figures.stray_units == usage.split_blocks * places_of(of.pool).units - usage.fp8_blocks


def test_a_block_below_has_no_place_of_the_device() -> None:
    places = Places(10, 2)
    assert [places.of(pack_entry(Format.BF16, 0, unit)) for unit in (0, 6, 18, 20, 21, 60)] == [0, 3, 9, *[None] * 3]
    assert [places.of(pack_entry(Format.FP8_E4M3, 0, unit)) for unit in (0, 7, 19, 20)] == [0, 3, 9, None]
    assert {places.of(pack_entry(fmt, 1, 4)) for fmt in (Format.BF16, Format.FP8_E4M3)} == {None}


@pytest.mark.parametrize("slab", SLABS)
def test_a_real_pool_is_drawn_right_while_blocks_go_down_and_come_up(slab: int) -> None:
    pool, _, worker = rig(slab)
    prompt = tokens(4 * B)

    def looks(below: str, last: str, first_row: str) -> None:
        now = seen(pool)
        lines = on_the_map(now)
        assert lines[2] == f"below: {below}"
        assert lines[4].startswith(f"0  {first_row}")
        assert lines[-1].endswith(last)
        assert adds_up(now)

    filling = lowered(pool, worker, prompt)
    looks("4 of 20 places (4 in use by nobody), 2 KiB; 0 came up, 4 went down", "1 blocks at 1", "·▫▫▫▫▫▫▫▫▫")
    worker.step(2.5, releases=filling)
    (again,) = worker.step(3.0, creates=[TableRequest([*prompt, 1], 5)]).grants
    # The places that the blocks come up to are granted at once.
    looks("4 of 20 places, 2 KiB; 0 came up, 4 went down", "32 of them found, 5 blocks (4 below) at 0", "▫····▫▫▫▫·")
    move_all(pool, 3.5)
    looks("4 of 20 places, 2 KiB; 4 came up, 4 went down", "5 blocks at 6, 5, 8, 7, 0", "▫····████·")
    worker.acknowledge(4.0)
    looks("0 of 20 places, 0 B; 4 came up, 4 went down", "5 blocks at 6, 5, 8, 7, 0", "▫····████·")
    worker.step(5.0, releases=[again.table_id])


@pytest.mark.parametrize("slab", SLABS)
def test_fp8_blocks_below_are_named_and_split_no_place_of_the_device(slab: int) -> None:
    pool, lease, worker = rig(slab, 6, 4, Fp8(Policy.MANUAL, kept_share=0))
    prompt = tokens(4 * B)
    grant = worker.serve(prompt)
    worker.step(1.0, releases=[grant.table_id])
    compress(pool, lease, list(grant.blocks.block_ids[:4]), [worker])
    other = worker.serve(tokens(4 * B - 1, 3), now=2.0)
    move_all(pool, 2.5)
    worker.step(3.0, releases=[other.table_id])
    worker.step(3.5, creates=[TableRequest([*prompt, 1], 5)])
    now = seen(pool)
    below = sum(is_below(one) and one.sealed for one in now.blocks)  # and one that another is just going down to
    assert below == 2
    assert f"5 blocks (4 in FP8, {below} below) at" in on_the_map(now)[-1]
    use = table_use(now.tables, B, places_of(now.pool))
    assert (use.below, use.places, use.split) == (below, 1 + (4 - below + 1) // 2, (4 - below + 1) // 2)
    assert use.taken[now.tables[0].table_id] == 1 + (4 - below) / 2
    # One is coming up already, and both of its places are listed.
    assert now.pool.usage.fp8_blocks == sum(is_fp8(one.entry) for one in now.blocks if not is_below(one)) == 3
    assert on_the_map(now)[2].startswith("3 in FP8 (2 places, 768 B), ")
    assert measure(now).held_blocks == 4, "with the one that is going down, beside the one that is being filled"


def test_top_says_what_is_below_and_how_fast_blocks_come_and_go() -> None:
    timeline = Timeline()
    scene = Scene(host=512, counters={"prefix_query_tokens": 400, "prefix_hit_tokens": 100, "host_hit_tokens": 25})
    scene.cached(120)
    scene.table(5)
    scene.total = 400
    scene.lower(scene.blocks[:120], 1)
    scene.counters.update(demoted_blocks=130, promoted_blocks=12)
    first = at_the_top(timeline.frame(scene.seen()), 122)
    words = "host     120 of 512 places (120 in use by nobody), 1.88 MiB of 8 MiB"
    assert f"{words}; 130 down, 12 up, 25 % of the tokens found were there" in first
    scene.counters.update(demoted_blocks=150, promoted_blocks=14, prefix_hit_tokens=200, host_hit_tokens=75)
    later = at_the_top(timeline.frame(scene.seen(at_s=NOW_S + 2)), 80)
    at = later.index(words)
    assert later[at + 1] == " " * 9 + "10 down/s, 1 up/s, 38 % of the tokens found were there (50 % just now)"
    assert not any(line.startswith("host ") for line in at_the_top(Timeline().frame(Scene().seen())))


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_picture_with_a_host_tier_fits_the_terminal(width: int) -> None:
    scene, timeline = Scene(total=300, host=50, counters={"prefix_hit_tokens": 9, "host_hit_tokens": 3}), Timeline()
    for _ in range(60):
        scene.table(20)
    scene.lower([block for block in scene.blocks if block.sealed][:40], 0)
    timeline.frame(scene.seen())
    lines = at_the_top(timeline.frame(scene.seen(at_s=NOW_S + 1)), width, 30)
    assert max(map(len, lines)) <= width
    assert len(lines) <= 30
    assert lines[-1].startswith("and ")


@given(
    st.sampled_from([Format.BF16, Format.F32]),
    st.lists(st.tuples(st.sampled_from([1, 2, 3]), st.booleans(), st.booleans()), max_size=60),
    st.sampled_from([0, 1]),
)
def test_every_sum_is_the_devices_whatever_is_below(
    native: Format, blocks: list[tuple[int, bool, bool]], slab: int
) -> None:
    """Blocks of every state, some of them FP8 blocks and some below, in tables or not."""
    scene = Scene(total=2 * len(blocks) + 10, native=native, host=len(blocks) + 1)
    for state, _, _ in blocks:
        scene.block(state, 16)
    here = [one for one, (_, _, is_low) in zip(scene.blocks, blocks, strict=True) if not is_low]
    fp8 = [one for one, (_, is_fp8, _) in zip(scene.blocks, blocks, strict=True) if is_fp8]
    scene.compress([one for one in fp8 if one in here], len(blocks) + 2)
    low = [one for one in scene.blocks if one not in here]
    for one in low:
        one.entry = pack_entry(Format.FP8_E4M3 if one in fp8 else native, 0, 0)
    scene.lower(low, slab)
    scene.table(32, shared=[one for one in scene.blocks if one.state == BLOCK_STATE_HELD][:2], blocks=0)
    now = scene.seen()
    assert adds_up(now)
    figures, here = measure(now), [one for one in scene.blocks if one not in low]
    held = sum(one.state == BLOCK_STATE_HELD for one in here)
    assert (figures.held_blocks, figures.tokens) == (held, 16 * held)
    assert figures.sealed == len(scene.blocks)
    moved = {now.pool.usage.quarantined_blocks, sum(one.state == BLOCK_STATE_QUARANTINED for one in here)}
    assert now.moved in moved


def test_what_a_table_holds_below_is_not_its_own_and_gives_no_place_back() -> None:
    scene = Scene(host=30)
    scene.table(40 * 16, idle_s=600)
    scene.lower(scene.blocks[:30], 1)
    now = scene.seen()
    holder = measure(now).holders[0]
    assert (holder.blocks, holder.own_blocks, holder.own_places) == (40, 10, 10.0)
    assert diagnose(now) == [], "10 places of 100 are no quarter of it"
    scene.of_lease(9, 60, num_tokens=16)
    assert "held_by_leases" in codes(scene.seen())
    scene.host = 90
    scene.lower([*scene.blocks[:30], *scene.blocks[40:]], 1)
    assert diagnose(scene.seen()) == [], "nothing of the device is theirs"


def test_tables_share_what_is_below_too() -> None:
    scene = Scene(host=30)
    prefix = [scene.block(BLOCK_STATE_HELD, 16) for _ in range(4)]
    scene.table(100, shared=prefix)
    scene.table(96, shared=prefix)
    scene.lower(prefix[:3], 0)
    now = scene.seen()
    use = table_use(now.tables, 16, places_of(now.pool))
    assert (measure(now).saved_blocks, use.saved, use.shared, use.below) == (4, 4, 1, 3)
    assert dict(facts(now, measure(now)))["sharing"] == "2 tables; without sharing they would need 4 more blocks"


def test_a_block_on_its_way_down_is_one_block() -> None:
    pool, _, worker = rig(1, 6)
    worker.step(1.0, releases=[worker.serve(tokens(4 * B)).table_id])
    worker.step(1.5, creates=[TableRequest(tokens(2 * B, 3), 2)])
    now = seen(pool)
    assert [one.block_id for one in now.blocks if is_below(one) and not one.sealed], "a copy is under way"
    memd = [one for one in measure(now).holders if not one.table_id and one.worker]
    assert [(one.blocks, one.own_blocks) for one in memd] == [(1, 1)]
    assert adds_up(now)


def test_what_is_below_frees_no_place_as_fp8_blocks() -> None:
    scene = Scene(host=60, counters={"refused_requests": 1})
    scene.cached(60)
    assert "--fp8 pressure" in remedies(finding(scene.seen(), "out_of_blocks"))
    scene.lower(scene.blocks[:55], 0)
    assert "--fp8 pressure" not in remedies(finding(scene.seen(), "out_of_blocks"))


def test_doctor_says_what_is_below_to_people_and_machines() -> None:
    pool, _, worker = rig(1)
    prompt = tokens(4 * B)
    worker.step(2.5, releases=lowered(pool, worker, prompt))
    worker.step(3.0, creates=[TableRequest([*prompt, 1], 5)])
    now = seen(pool)
    assert dict(facts(now, measure(now)))["host tier"] == (
        "4 of 20 places, 2 KiB of 10 KiB; 0 blocks came up and 4 went down since memd's start 2 h ago; 100 % of the "
        "tokens found were there"
    )
    places = {"places": 20, "free_places": 16, "taken_places": 4, "cached_places": 0}
    told = as_json(now, measure(now), diagnose(now))
    assert told["host_tier"] == {**places, "bytes": 20 * 512, "taken_bytes": 4 * 512}
    without = Scene().seen()
    assert "host tier" not in dict(facts(without, measure(without)))
    assert as_json(without, measure(without), [])["host_tier"] is None


def test_a_host_tier_is_advised_for_what_was_evicted_and_a_larger_one_where_it_is_full() -> None:
    def advised(scene: Scene) -> dict[str, str]:
        every = [finding(scene.seen(), code) for code in ("out_of_blocks", "suspended_tables")]
        first, second = ({k: v for k, v in remedies(one).items() if k.startswith("--host-tier")} for one in every)
        assert first == second
        return first

    scene = Scene(counters={"refused_requests": 1, "evicted_blocks": 4}, token_bytes=1 << 16)
    scene.suspended(20)
    assert advised(scene) == {}, "under a twentieth of the pool"
    scene.counters["evicted_blocks"] = 80
    since, there = "since memd's start 2 h ago", "prompts, and requests that had to yield, find them there"
    assert advised(scene) == {"--host-tier 80MiB": f"room for the 80 blocks that were evicted {since}: {there}"}
    scene.counters["evicted_blocks"] = 3000
    words = f"room for 100 of the 3,000 blocks that were evicted {since}: {there}"
    assert advised(scene) == {"--host-tier 100MiB": words}
    scene.host = 40
    scene.cached(38)
    scene.lower(scene.blocks, 1)
    assert advised(scene) == {}, "2 of 40 are free"
    scene.cached(1)
    scene.lower(scene.blocks, 1)
    assert advised(scene) == {"--host-tier 140MiB": f"140 places instead of 40, which are full: {words}"}
    earlier = scene.seen().pool
    assert "--host-tier 140MiB" not in remedies(finding(scene.seen(earlier=[earlier]), "suspended_tables"))


@pytest.mark.parametrize("slab", SLABS)
def test_the_host_tier_that_is_advised_keeps_what_was_evicted(slab: int) -> None:
    def served(num_host: int) -> Observation:
        pool, _, worker = rig(slab, 100, num_host)
        for seed in [*range(30)] * 2:  # 150 full blocks
            worker.step(releases=[worker.serve(tokens(5 * B + 1, seed)).table_id])
            pool.tick(1.0)
            move_all(pool, 1.0)
        return seen(pool)

    short = served(0)
    assert codes(short) == ["prefixes_evicted"]
    effect = remedies(finding(short, "prefixes_evicted"))["--host-tier 1MiB"]
    assert effect.startswith("room for 100 of the 2")
    kept = served(100)
    assert (codes(kept), kept.pool.counters.evicted_blocks, adds_up(kept)) == ([], 0, True)
    full = served(20)
    tier = host_tier(full.pool)
    assert tier is not None
    assert tier.is_full
    assert remedies(finding(full, "prefixes_evicted"))["--host-tier 1MiB"].startswith("120 places instead of 20, which")
    quiet = replace(full, earlier=[full.pool], watched_s=1.0)
    assert codes(quiet) == [], "nothing is evicted any more"
