"""What tables are about to compute: the full blocks of their prompts that are not sealed yet, by their digests to be.

A request that would find much more of its prompt once another table has computed it need not compute that too: it is
told to wait, and its worker hears when the last block that it waits for is sealed, or will not be. Who waits holds
nothing, and who is waited for has all the blocks that it needs: so nobody waits in a circle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

MIN_TOKENS = 64
"""What a wait must save: fewer tokens are computed within one step, mostly beside others."""
PATIENCE_S = 5.0
"""Nobody waits for a table that has committed nothing for so long."""


class Promises:
    """Promised blocks by digest and by table, and the leases that wait for them.

    `is_kept_up` says of a table whether it still works on what it promised.
    """

    __slots__ = ("_digests", "_tables", "_waiting", "_woken", "min_tokens", "patience_s")

    def __init__(self) -> None:
        self.min_tokens, self.patience_s = MIN_TOKENS, PATIENCE_S
        self._tables: dict[bytes, tuple[int, ...]] = {}  # by digest: who will seal such a block
        self._digests: dict[int, list[bytes]] = {}  # by table: of the blocks to come, the last one first
        self._waiting: dict[bytes, set[int]] = {}  # by digest: leases
        self._woken: set[int] = set()  # leases

    def __bool__(self) -> bool:
        return bool(self._tables)

    def make(self, table_id: int, digests: Iterable[bytes]) -> None:
        """A table will seal blocks with these digests, in this order."""
        made = list(digests)
        if made:
            self._digests[table_id] = made[::-1]
            for digest in made:
                self._tables[digest] = (*self._tables.get(digest, ()), table_id)

    def sealed(self, table_id: int, digest: bytes) -> None:
        """A table has sealed a block: what all have promised of it is kept. Another block than promised ends it all."""
        to_come = self._digests.get(table_id)
        if to_come is None:
            return
        if to_come[-1] != digest:
            self.drop(table_id)
            return
        to_come.pop()
        if not to_come:
            del self._digests[table_id]
        self._tables.pop(digest, None)
        self._wake(digest)

    def drop(self, table_id: int) -> None:
        """A table will not seal what it promised, or has not promised anything."""
        for digest in self._digests.pop(table_id, ()):
            left = tuple(one for one in self._tables.get(digest, ()) if one != table_id)
            if left:
                self._tables[digest] = left
            elif digest in self._tables:
                del self._tables[digest]
                self._wake(digest)

    def longest(self, digests: Iterable[bytes], is_kept_up: Callable[[int], bool]) -> tuple[bytes, int]:
        """The last of the first digests that are all promised, and how many they are."""
        last, count = b"", 0
        for digest in digests:
            if not any(map(is_kept_up, self._tables.get(digest, ()))):
                break
            last, count = digest, count + 1
        return last, count

    def wait(self, lease_id: int, digest: bytes) -> None:
        """Have a lease woken once the promised block with this digest is sealed, or will not be."""
        self._waiting.setdefault(digest, set()).add(lease_id)

    def wake(self, lease_id: int) -> None:
        """Have a lease woken for another reason: it may not have heard."""
        self._woken.add(lease_id)

    def tick(self, is_kept_up: Callable[[int], bool]) -> None:
        """Wake those who wait for blocks that nobody works on any more."""
        for digest in list(self._waiting):
            if not any(map(is_kept_up, self._tables[digest])):
                self._wake(digest)

    def take_woken(self, is_live: Callable[[int], bool], is_there: Callable[[int], bool]) -> list[int]:
        """The live leases that were woken, by rising id. Those that may be live again are told then."""
        woken = sorted(filter(is_live, self._woken))
        self._woken = {lease_id for lease_id in self._woken if is_there(lease_id) and not is_live(lease_id)}
        return woken

    def by_table(self) -> dict[int, list[bytes]]:
        """Digests of the blocks that each table has promised and not sealed, and nobody else has; for `check`."""
        made: dict[int, list[bytes]] = {}
        for digest, tables in self._tables.items():
            for table_id in tables:
                made.setdefault(table_id, []).append(digest)
        return made

    @property
    def awaited(self) -> set[bytes]:
        """Digests that somebody waits for; for `check`."""
        return set(self._waiting)

    def _wake(self, digest: bytes) -> None:
        self._woken |= self._waiting.pop(digest, set())
