"""The stand on which `pagepool tune` measures: daemons of its own, started as each setting asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from pagepool.errors import PagepoolError, Reason
from pagepool.inferd.v1.generation_service_pb2 import GetModelResponse
from pagepool.memd.v1.types_pb2 import Pool
from pagepool_client.cli.daemons import Daemons
from pagepool_client.cli.tune_flags import Wanted
from pagepool_client.inference import InferenceClient
from pagepool_client.pool import PoolClient
from pagepool_client.tuning.figures import Figures, Objective, figures
from pagepool_client.tuning.grid import Setting
from pagepool_client.tuning.replay import Order, Replay, replay
from pagepool_client.tuning.sample import warm_up
from pagepool_client.workload.format import WorkloadRequest, token_ids


@dataclass(frozen=True, slots=True)
class Place:
    """Where the daemons live and what both are told whatever the setting."""

    folder: Path
    memd_flags: Sequence[str]
    inferd_flags: Sequence[str]


@dataclass(frozen=True, slots=True)
class Load:
    """What a run replays: the requests, when it is cut, if it is, and what serves a request in time."""

    orders: Sequence[Order]
    warm_up: Sequence[Order]
    cut_s: float | None
    objective: Objective
    patience_s: float
    """How long nothing may come though requests wait, before the run counts as failed."""


class Stand:
    """memd and inferd for one setting after another. Leave the `with` block to stop them.

    What two settings have in common keeps running: another batch budget takes another inferd only.
    """

    def __init__(self, place: Place, report: Callable[[str, float], None]) -> None:
        self._place, self._report = place, report
        self._pair: Daemons | None = None
        self._setting: Setting | None = None
        self._replays = 0

    def look(self, block_size: int, batch_tokens: int | None) -> tuple[Pool, GetModelResponse]:
        """Start with the largest pool; what there is then. Without a budget inferd takes its own."""
        budget = ["--max-batch-tokens", str(batch_tokens)] if batch_tokens else []
        pair = self._start(["--block-size", str(block_size)], budget)
        with InferenceClient(pair.inferd.target) as inferd, PoolClient(pair.memd.target) as memd:
            pool, model = memd.pool(), inferd.model()
        if batch_tokens:
            self._setting = Setting(block_size, pool.usage.total_blocks, batch_tokens)
        return pool, model

    def measure(self, setting: Setting, load: Load) -> Figures:
        """Replay the load with a setting. Raises PagepoolError if the daemons do not start, or do not serve it all."""
        try:
            pair = self._serve(setting, load)
            heard = self._replay(pair, load.orders, load)
            return figures(heard.heard, heard.ended_s, load.objective)
        except ValueError as error:
            raise PagepoolError(Reason.INTERNAL_ERROR, f"{error} before the cut") from error
        except BaseException:
            self.stop()  # what went wrong with this run must not be there in the next one
            raise

    def stop(self) -> None:
        """Stop the daemons. Idempotent; they start again when they are needed."""
        pair, self._pair, self._setting = self._pair, None, None
        if pair is not None:
            pair.stop()

    def _serve(self, setting: Setting, load: Load) -> Daemons:
        """Daemons with this setting, warm."""
        if self._pair is not None and self._setting == setting:
            self._pair.require_alive()
            if self._replays:
                return self._pair
        else:
            self._move(setting)
        assert self._pair is not None
        self._replay(self._pair, load.warm_up, replace(load, cut_s=None))
        return self._pair

    def _move(self, setting: Setting) -> None:
        now = self._setting
        budget = ["--max-batch-tokens", str(setting.batch_tokens)]
        if self._pair and now and (now.block_size, now.num_blocks) == (setting.block_size, setting.num_blocks):
            self._setting = None
            self._pair.restart_inferd([*self._place.inferd_flags, *budget])
            self._pair.wait_ready(self._report)
        else:
            size = ["--block-size", str(setting.block_size), "--max-num-blocks", str(setting.num_blocks)]
            self._start(size, budget)
        self._setting = setting

    def _start(self, memd_flags: Sequence[str], inferd_flags: Sequence[str]) -> Daemons:
        self.stop()
        place = self._place
        self._pair = Daemons(place.folder, [*place.memd_flags, *memd_flags], [*place.inferd_flags, *inferd_flags])
        self._pair.wait_ready(self._report)
        return self._pair

    def _replay(self, pair: Daemons, orders: Sequence[Order], load: Load) -> Replay:
        self._replays += 1
        salt = f"tune-{self._replays}".encode()
        return replay(pair.inferd.target, orders, salt, load.cut_s, load.patience_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def load_of(requests: Sequence[WorkloadRequest], model: GetModelResponse, wanted: Wanted) -> Load:
    """What these requests are for this model: token ids that end no text."""
    reserved = frozenset(model.eos_token_ids)

    def orders(some: Sequence[WorkloadRequest]) -> list[Order]:
        return [Order(one.at_s, token_ids(one.prompt, model.vocab_size, reserved), one.output_tokens) for one in some]

    return Load(orders(requests), orders(warm_up(requests)), wanted.cut_s, wanted.objective, wanted.patience_s)
