"""Rules about workers and their queues. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from pagepool.inferd.v1.generation_service_pb2 import GetModelResponse
from pagepool_client.diagnosis.findings import Case, Finding, Remedy, Severity
from pagepool_client.diagnosis.observation import Observation, WorkerReport
from pagepool_client.diagnosis.words import count, size


def queue_before_a_pool_with_room(case: Case) -> Finding | None:
    """Requests wait although the pool has blocks for them: the workers take no more at once."""
    available, mean = case.figures.available, case.figures.mean_table_blocks
    busiest = max((one.model for one in case.seen.workers if one.model), key=_queued, default=None)
    if case.pressed or busiest is None or not (_queued(busiest) and busiest.running_requests and mean):
        return None
    fitting = int(available / mean)
    more = min(_queued(busiest), fitting)
    limit = 1 << (busiest.running_requests + more - 1).bit_length()
    detail = (
        f"{count(case.seen.waiting, 'request waits', 'requests wait')} and {case.seen.running:,} run, though "
        f"{count(available, 'block')} can be granted, enough for {fitting:,} more like those that run "
        f"({mean:.3g} blocks each)."
    )
    numbers = {
        "waiting_requests": case.seen.waiting,
        "running_requests": case.seen.running,
        "available_blocks": available,
        "mean_table_blocks": mean,
        "fitting_requests": fitting,
    }
    effect = (
        f"instead of the {busiest.running_requests:,} that run at once now, with --max-batch-tokens as large; tables "
        "grow with their tokens, so if some have to yield then, it is too many"
    )
    another = "one more worker on the same pool, which shares its blocks with this one"
    remedies = [
        Remedy("inferd", "--max-num-seqs", f"{limit}", effect),
        Remedy("inferd", "--memd", case.seen.target, another),
    ]
    title = "Requests wait for workers, not for blocks"
    return Finding("workers_are_full", Severity.PROBLEM, title, detail, numbers, remedies)


def _queued(model: GetModelResponse) -> int:
    return model.waiting_requests - model.prefix_waiting_requests


def workers_in_trouble(seen: Observation) -> Iterator[Finding]:
    """Workers that were asked for and do not answer, and workers that are not attached to this pool."""
    for worker in seen.workers:
        if worker.model is None:
            if worker.asked_for:
                yield _silent(seen, worker)
        elif worker.model.pool_epoch != seen.pool.epoch:
            yield _elsewhere(seen, worker)


def pool_without_blocks(seen: Observation) -> Finding:
    """The pool that no worker has attached to."""
    detail = f"Its {size(seen.pool.slab_bytes)} are cut into blocks when a worker declares its model's geometry."
    remedies = [
        Remedy("inferd", "--memd", seen.target, "the first worker that attaches cuts the pool"),
        Remedy("memd", "--geometry", "FILE", "cuts it at start, from what `inferd --print-geometry` writes"),
    ]
    numbers = {"slab_bytes": seen.pool.slab_bytes}
    title = "The pool has no blocks yet"
    told = [f"worker at {worker.target}: {worker.trouble}" for worker in seen.workers if worker.model is None]
    return Finding("no_geometry", Severity.ADVICE, title, detail, numbers, remedies, told)


def _silent(seen: Observation, worker: WorkerReport) -> Finding:
    effect = f"starts a worker there, beside `--listen {worker.target}`"
    return Finding(
        "worker_silent",
        Severity.PROBLEM,
        f"The worker at {worker.target} says nothing of itself",
        f"{worker.trouble}.",
        {},
        [Remedy("inferd", "--memd", seen.target, effect)],
    )


def _elsewhere(seen: Observation, worker: WorkerReport) -> Finding:
    assert worker.model is not None
    epoch = worker.model.pool_epoch
    where = f"attached to the memd life {epoch:016x}" if epoch else "attached to no pool: it waits for its memd"
    return Finding(
        "worker_elsewhere",
        Severity.PROBLEM,
        f"The worker at {worker.target} does not serve from this pool",
        f"It is {where}, while this memd's life is {seen.pool.epoch:016x}.",
        {"pool_epoch": seen.pool.epoch, "worker_epoch": epoch},
        [Remedy("inferd", "--memd", seen.target, "attaches it to this pool, if it has the pool's model")],
    )
