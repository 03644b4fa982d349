"""The settings that are tried: block sizes, pool sizes and batch budgets, in every combination. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pagepool.errors import PagepoolError, Reason
from pagepool_client.tuning.trials import Point


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    """What memd and inferd are told."""

    block_size: int
    """Token positions in a block: memd's --block-size."""
    num_blocks: int
    """Blocks of the pool: memd's --max-num-blocks."""
    batch_tokens: int
    """Tokens of a step: inferd's --max-batch-tokens."""

    @property
    def flags(self) -> str:
        """For people."""
        return (
            f"--block-size {self.block_size} --max-num-blocks {self.num_blocks} --max-batch-tokens {self.batch_tokens}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """A `Space` of settings. The values of each axis are distinct, ascending, and at least one."""

    block_sizes: tuple[int, ...]
    pool_tokens: tuple[int, ...]
    """Pool sizes in tokens, so that they mean the same for every block size."""
    batch_tokens: tuple[int, ...]
    block_size: int
    """The practitioners' choice, which stays where there is no difference."""
    budget: int
    """inferd's own batch budget, from which the search begins."""

    @property
    def axes(self) -> tuple[tuple[int, ...], ...]:
        """The values of the three axes, in the order of a point."""
        return self.block_sizes, self.pool_tokens, self.batch_tokens

    @property
    def sizes(self) -> Sequence[int]:
        """Values on each axis."""
        return [len(axis) for axis in self.axes]

    @property
    def points(self) -> Iterator[Point]:
        """All of them."""
        blocks, pools, budgets = map(range, self.sizes)
        return itertools.product(blocks, pools, budgets)

    @property
    def start(self) -> Point:
        """The default block size and budget, or what is nearest to them, and the largest pool."""
        return (
            _nearest(self.block_sizes, self.block_size),
            len(self.pool_tokens) - 1,
            _nearest(self.batch_tokens, self.budget),
        )

    def preference(self, point: Point) -> tuple[int, ...]:
        """The block size nearest to the default, then the smaller pool, then the smaller budget."""
        return abs(point[0] - self.start[0]), *point

    def setting(self, point: Point) -> Setting:
        """What a point stands for."""
        block_size = self.block_sizes[point[0]]
        return Setting(block_size, self.pool_tokens[point[1]] // block_size, self.batch_tokens[point[2]])


def pools(shares: Sequence[float], tokens: int, longest: int, block_sizes: Sequence[int]) -> tuple[int, ...]:
    """Pool sizes in tokens: these shares of `tokens`, but for those that a request of `longest` tokens does not fit.

    Raises REQUEST_TOO_LARGE if it fits none.
    """
    coarsest = max(block_sizes)
    least = coarsest * math.ceil(longest / coarsest)
    fitting = sorted({size for share in shares if (size := int(share * tokens)) >= least})
    if not fitting:
        message = (
            f"the workload has a request of {longest:,} tokens, but the largest pool of --pool-shares has "
            f"{int(max(shares) * tokens):,} and needs {least:,}; raise --pool-bytes, or cut the workload"
        )
        raise PagepoolError(Reason.REQUEST_TOO_LARGE, message, tokens=longest, limit=tokens)
    return tuple(fitting)


def _nearest(values: Sequence[int], wanted: int) -> int:
    """The index of the value with the ratio nearest to 1."""
    return min(range(len(values)), key=lambda index: abs(math.log(values[index] / wanted)))
