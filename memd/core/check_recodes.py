"""What must be true of blocks that are being stored in another format. A part of check."""

from __future__ import annotations

from memd.core.check_store import require
from memd.core.recodes import Recode
from memd.core.state import PoolState
from memd.core.store import BlockStore
from memd.core.values import LeaseState


def check_recodes(state: PoolState, store: BlockStore) -> None:
    """Raise InvariantError, saying what is broken, where and how. Changes nothing."""
    waiting: dict[int, Recode] = {}
    targets = set[int]()
    for lease in state.leases.values():
        name, sequences = f"lease {lease.lease_id}", [recode.sequence for recode in lease.recodes]
        last = lease.last_recode
        require(sequences == list(range(last - len(sequences) + 1, last + 1)), f"{name} waits for Recodes {sequences}")
        moves = lease is state.mover
        live = moves or (lease.takes_recodes and lease.state is not LeaseState.LOST)
        for recode in lease.recodes:
            require(recode.is_over is not live, f"{name}, live or not, has a Recode that is over, or is not")
            require(not (recode.is_over and recode.sources), f"{name} has sources of a Recode that is over")
            waiting.update(dict.fromkeys(recode.sources, recode))
            targets.update(recode.targets)
            _check_one(store, recode, moves=moves)
    require(waiting == state.recoding, f"places {sorted(waiting)} are recoded, counted {sorted(state.recoding)}")
    for place in (place for frame in store.units for place in store.units.blocks_in(frame)):
        sealed = store.blocks.prefixes[place] != 0
        require(sealed is (place not in targets), f"the block in unit {place} is not sealed, or is and is a target")


def _check_one(store: BlockStore, recode: Recode, *, moves: bool) -> None:
    blocks, name = store.blocks, f"Recode {recode.sequence} of lease {recode.lease_id}"
    if moves:
        for source, target in zip(recode.sources, recode.targets, strict=True):
            same, other = store.format_of(source) is store.format_of(target), store.units.is_host(source)
            require(same and other is not store.units.is_host(target), f"{name} moves {source} to {target}")
    for place in recode.sources:
        require(blocks.prefixes[place] != 0, f"{name} has a source in place {place} that is not sealed")
        wrong = store.units.is_unit(place) is recode.to_units and not moves
        require(not wrong, f"{name} has a source of the wrong format")
    for place in recode.targets:
        empty = not blocks.prefixes[place] and not blocks.num_tokens[place]
        require(empty, f"{name} has a target in place {place} that is not empty")
        wrong = store.units.is_unit(place) is not recode.to_units and not moves
        require(not wrong, f"{name} has a target of the wrong format")
