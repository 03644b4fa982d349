"""Remaps and their acknowledgements on the wire, from either side to the other."""

from __future__ import annotations

from memd.core.lease import Remap as CoreRemap
from memd.messages import step_from
from memd.sessions import remap_message
from pagepool.pool_values import Remap, Step
from pagepool_client.wire import remap_event, step_message


def test_news_of_a_block_that_moved_arrive_as_they_were_sent() -> None:
    message = remap_message(CoreRemap(1 << 40, 2, 3, 4, 5, 6))
    assert message.WhichOneof("message") == "remap"
    assert remap_event(message.remap) == Remap(1 << 40, 2, 3, 4, 5, 6)


def test_an_acknowledgement_is_a_step_of_its_own_if_need_be() -> None:
    assert not Step()
    assert Step(acknowledged=7)
    assert step_from(step_message(1, Step(acknowledged=7)).step).acknowledged == 7
    assert step_from(step_message(1, Step(frees=[3])).step).acknowledged == 0
