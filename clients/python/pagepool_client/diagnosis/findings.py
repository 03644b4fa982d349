"""What a finding is: figures, what they mean, and what to change. Plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from pagepool_client.diagnosis.figures import Figures
from pagepool_client.diagnosis.observation import Observation


class Severity(StrEnum):
    """How much a finding matters."""

    PROBLEM = "problem"
    """Requests wait, fail or are slow because of it now."""
    ADVICE = "advice"
    """Memory or time is lost, but nothing suffers yet."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """One thing to change: a flag of memd or inferd, a field of a request, or a call by a client."""

    where: str
    """Whose it is: "memd", "inferd", "request" or "client"."""
    name: str
    """The flag, field or call."""
    value: str
    """The value to try."""
    effect: str
    """What it should do, in figures where there are any."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about a pool that its operator can change."""

    code: str
    """Its name for machines, such as out_of_blocks."""
    severity: Severity
    title: str
    detail: str
    figures: Mapping[str, int | float]
    """Every figure of the detail, exact."""
    remedies: Sequence[Remedy]
    """At least one, the best first."""
    evidence: Sequence[str] = ()
    """Lines that belong to it, such as what holds the blocks."""

    def as_json(self) -> dict[str, object]:
        """All of it as plain JSON values."""
        return {**asdict(self), "severity": self.severity.value, "figures": dict(self.figures)}


@dataclass(frozen=True, slots=True)
class Case:
    """A pool that is cut into blocks, with its figures: what every rule looks at."""

    seen: Observation
    figures: Figures

    @property
    def total(self) -> int:
        """Blocks of the pool."""
        return self.seen.pool.usage.total_blocks

    @property
    def pressed(self) -> bool:
        """Whether blocks are short now: under 5 % can be granted, or requests wait for more than there are.

        A queue before a pool with room for the average table is not the pool's fault.
        """
        nearly_none = 20 * self.figures.least_available < self.total
        return nearly_none or (self.seen.waiting > 0 and self.figures.available < self.figures.mean_table_blocks)

    @property
    def severity(self) -> Severity:
        """Of what loses or keeps blocks: a problem while requests wait for some or were refused some."""
        suffers = self.pressed and (self.seen.counted("refused_requests") > 0 or self.seen.waiting > 0)
        return Severity.PROBLEM if suffers else Severity.ADVICE
