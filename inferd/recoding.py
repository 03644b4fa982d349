"""Recodes: blocks that memd wants stored in another format, which the engine's model does between two steps.

They are launched in the order in which memd tells them, behind whatever was launched before, and answered in that order
when the device is done. A busy engine looks after each step, an idle one waits for them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import structlog

from inferd.surroundings import Attachment, DeviceLostError, Model, Recode, Recoding

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Unlaunched:
    """In the place of a recoding whose launch failed."""

    error: Exception

    def done(self) -> bool:
        """True."""
        return True

    def errors(self) -> list[float]:
        """Raise what the launch raised."""
        raise self.error


class Recodings:
    """The Recodes of one lease that were launched and are not answered, oldest first. Not thread-safe.

    One that fails is answered as such, and logged. What is raised is DeviceLostError.
    """

    def __init__(self) -> None:
        self._launched: deque[tuple[Recode, Recoding]] = deque()

    def __len__(self) -> int:
        return len(self._launched)

    def serve(self, attachment: Attachment) -> int:
        """Launch what memd has told, and answer what the device is done with; how many steps say so."""
        if attachment.recodes is None:
            return 0
        for recode in attachment.recodes.take_recodes():
            self._launched.append((recode, _launch(attachment.model, recode)))
        num_answered = 0
        while self._launched and self._launched[0][1].done():
            recode, errors = self._finish()
            attachment.recodes.answer_recode(recode.sequence, errors or (), failed=errors is None)
            num_answered += 1
        return num_answered

    def wait(self) -> bool:
        """Wait until the oldest is over, so that `serve` answers it; False if there is none."""
        if not self._launched:
            return False
        recode, recoding = self._launched[0]
        try:
            recoding.errors()
        except DeviceLostError:
            raise
        except Exception as error:  # noqa: BLE001 (raised again where it is answered)
            self._launched[0] = recode, Unlaunched(error)
        return True

    def abandon(self) -> None:
        """Wait until none runs any more, and answer nothing: the lease is over."""
        while self._launched:
            self._finish()

    def _finish(self) -> tuple[Recode, list[float] | None]:
        """Wait for the oldest; what its blocks have lost, None if it failed."""
        recode, recoding = self._launched.popleft()
        try:
            return recode, recoding.errors()
        except DeviceLostError:
            raise
        except Exception:
            log.exception("recoding failed", sequence=recode.sequence, blocks=len(recode.sources))
            return recode, None


def _launch(model: Model, recode: Recode) -> Recoding:
    try:
        return model.recode(recode.sources, recode.targets)
    except DeviceLostError:
        raise
    except Exception as error:  # noqa: BLE001 (raised again where it is answered)
        return Unlaunched(error)
