"""Is a worker's process gone? It is when the lock on its lease file is free; that works across PID namespaces."""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from pagepool.errors import PagepoolError, invalid_field

FENCE_BYTES = 8
"""The start of a lease file, zeros unless its lease is lost."""

_LEFTOVER_AGE_S = 60.0


class LeaseLocks:
    """The folder of lease files, mode 0700, beside the Unix socket.

    A worker makes a file there, locks it with flock(LOCK_EX) for as long as it may touch the pool, and names it in
    Hello. memd keeps each named file open, so that it can still be asked after somebody has unlinked it.
    What is in the file is the fence: see `fence`.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(mode=0o700, exist_ok=True)
        self.directory = directory
        self._open: dict[str, int] = {}

    def hold(self, name: str) -> None:
        """Opens a worker's lease file; raises INVALID_FIELD unless the worker has it locked."""
        descriptor = self._opened(name)
        try:
            if not _is_locked(descriptor):
                raise _refused(name, "locked by the worker with flock(LOCK_EX)", "lock it before attaching")
            known = self._open.get(name)
            if known is not None and not os.path.sameopenfile(known, descriptor):
                raise _refused(name, "a name that no other file here had", "make a file with a unique name")
        except BaseException:
            os.close(descriptor)
            raise
        if known is None:
            self._open[name] = descriptor
        else:
            os.close(descriptor)

    def is_free(self, name: str) -> bool:
        """Whether the process that locked a held file is gone."""
        return not _is_locked(self._open[name])

    def fence(self, name: str, lease_id: int) -> bool:
        """Writes the fence word of a held file; False if it is too short to have one.

        Its worker, which looks there after each step, lets nothing out that it computed from then on.
        """
        descriptor = self._open[name]
        if os.fstat(descriptor).st_size < FENCE_BYTES:
            return False
        os.pwrite(descriptor, lease_id.to_bytes(FENCE_BYTES, "little"), 0)
        return True

    def drop(self, name: str) -> None:
        """Closes a held file and removes it; its lock must be free, or its worker have detached."""
        descriptor = self._open.pop(name, None)
        if descriptor is None:
            return
        if not _is_locked(descriptor):
            (self.directory / name).unlink(missing_ok=True)
        os.close(descriptor)

    def remove_leftovers(self) -> None:
        """Removes unlocked files of former lives; young ones may be about to be locked and stay."""
        for path, descriptor in self._files():
            if time.time() - os.fstat(descriptor).st_mtime > _LEFTOVER_AGE_S and not _is_locked(descriptor):
                path.unlink(missing_ok=True)

    def locked(self) -> set[str]:
        """The lease files of all processes that may touch a pool of this directory, a former memd's too."""
        return {path.name for path, descriptor in self._files() if _is_locked(descriptor)}

    def _files(self) -> Iterator[tuple[Path, int]]:
        """Each file there, open for as long as it is looked at."""
        for path in self.directory.iterdir():
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError:  # a worker has just removed it, or it is no file: neither is ours to look at
                continue
            try:
                yield path, descriptor
            finally:
                os.close(descriptor)

    def _opened(self, name: str) -> int:
        if not name or name != os.path.basename(name) or name in {".", ".."} or "\0" in name:  # noqa: PTH119
            raise _refused(name, f"the bare name of a file in {self.directory}", "make the file there")
        try:
            descriptor = os.open(self.directory / name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            limit = f"a file in {self.directory} ({error.strerror})"
            raise _refused(name, limit, "make it and lock it before attaching") from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise _refused(name, "a regular file", "make one")
        return descriptor


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def _refused(name: str, limit: str, remedy: str) -> PagepoolError:
    return invalid_field("lock_file", repr(name), limit, remedy)
