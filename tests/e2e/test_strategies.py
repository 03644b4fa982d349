"""Several continuations of one prompt by the default model through real daemons and the Python client."""

from __future__ import annotations

from pagepool.memd.v1 import pool_service_pb2 as memd_pb
from pagepool.memd.v1.types_pb2 import BlockTable
from pagepool_client import InferenceClient
from tests.e2e.conftest import Memd, wait_until
from tests.e2e.workers import Worker

PROMPT = "The three largest cities of Europe, by the number of people who live there, and what each is known for:"


def eight_tables(memd: Memd, shared: int) -> list[BlockTable]:
    """As memd lists them once it has heard of all, and each writes to a block of its own behind the shared ones."""

    def listed() -> list[BlockTable]:
        tables = list(memd.pool().ListBlockTables(memd_pb.ListBlockTablesRequest()).block_tables)
        own = {block for table in tables for block in table.block_ids[shared:]}
        return tables if len(tables) == 8 and len(own) >= 8 else []

    found: list[BlockTable] = wait_until(listed)
    return found


def test_samples_share_the_prompts_blocks_and_are_those_of_single_requests(worker: Worker, default_memd: Memd) -> None:
    with InferenceClient(worker.target) as client:
        prompt = client.tokenize(PROMPT, add_special_tokens=True).token_ids
        shared = len(prompt) // client.model().block_size
        generation = client.generate(PROMPT, n=8, seed=5, max_tokens=24, ignore_eos=True)
        started: set[int] = set()
        while len(started) < 8:  # a sample that has tokens has a table
            event = next(generation)
            started |= {event.index} if hasattr(event, "token_ids") else set()
        listed = eight_tables(default_memd, shared)
        heads = [tuple(table.block_ids[:shared]) for table in listed]
        assert shared > 0
        assert len(set(heads)) == 1, "all of the prompt's full blocks are the same physical ones"
        samples = generation.all()
        assert len({sample.text for sample in samples}) > 1
        for index in (0, 7):
            alone = client.generate(PROMPT, seed=5, sample_index=index, max_tokens=24, ignore_eos=True)
            assert alone.text() == samples[index].text
        assert generation.finished is not None
        assert generation.finished.usage.generated_tokens == 8 * 24
    wait_until(lambda: not default_memd.pool().ListBlockTables(memd_pb.ListBlockTablesRequest()).block_tables)


def test_beams_and_the_best_of_several_come_best_first_with_their_scores(worker: Worker) -> None:
    with InferenceClient(worker.target) as client:
        greedy = client.generate(PROMPT, temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
        text = greedy.text()
        likely = sum(each.logprob for each in greedy.logprobs) / 12
        one = client.generate(PROMPT, beam={"width": 1}, max_tokens=12, ignore_eos=True)
        assert one.text() == text, "one beam is greedy search"
        beams = client.generate(
            PROMPT, beam={"width": 4, "num_return_sequences": 3}, max_tokens=12, ignore_eos=True
        ).all()
        scores = [beam.finished.score for beam in beams if beam.finished]
        assert scores == sorted(scores, reverse=True)
        assert len(set(map(tuple, (beam.token_ids for beam in beams)))) == 3
        assert scores[0] >= likely - 1e-4, "beams find what is at least as likely"
        best = client.generate(PROMPT, n=2, best_of=6, seed=1, max_tokens=12, ignore_eos=True, logprobs=0).all()
        for each in best:
            assert each.finished is not None
            assert abs(each.finished.score - sum(token.logprob for token in each.logprobs) / 12) < 1e-5
        assert best[0].finished is not None
        assert best[1].finished is not None
        assert best[0].finished.score >= best[1].finished.score
