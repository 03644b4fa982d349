"""A slab of memd in this process's memory, and the certainty that it is gone again."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import weakref
from pathlib import Path

from pagepool.errors import PagepoolError, Reason

_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_FENCE_BYTES = 8
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class SlabMapping:
    """A slab file, mapped read-write and locked with flock(LOCK_SH) until `close`.

    `view` is all of it, as writable bytes; arrays and tensors may be made over it. After `close` those that are still
    alive read zeros and write to private memory: they can neither fault nor reach the pool. That is why `mmap.mmap` is
    not used here: it cannot be closed while an array lives, and torch.frombuffer, which keeps no export, would be left
    pointing at unmapped addresses. The address range itself goes back with the last view.

    Raises PagepoolError (POOL_LOST) if the file is missing or smaller than memd said.
    """

    def __init__(self, path: str, size_bytes: int) -> None:
        self._size = size_bytes
        with contextlib.ExitStack() as undo:
            try:
                self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                undo.callback(os.close, self._fd)
                self._check_size(path)
                fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                self._address = _map(None, size_bytes, mmap.MAP_SHARED, self._fd)
            except OSError as error:
                message = f"memd's slab {path} cannot be mapped ({error.strerror}); attach again when memd is back"
                raise PagepoolError(Reason.POOL_LOST, message, path=path) from error
            undo.pop_all()
        self._closed = False
        memory = (ctypes.c_ubyte * size_bytes).from_address(self._address)
        # Not at exit: threads of a kernel may still be running then, and the kernel's exit unmaps everything anyway.
        weakref.finalize(memory, _libc.munmap, self._address, size_bytes).atexit = False
        self.view = memoryview(memory).cast("B")

    def _check_size(self, path: str) -> None:
        # Touching a page beyond the file's end would be a SIGBUS, which nothing can catch.
        actual = os.fstat(self._fd).st_size
        if actual < self._size:
            message = f"memd's slab {path} has {actual} bytes, but memd said {self._size}; attach again"
            raise PagepoolError(Reason.POOL_LOST, message, path=path, actual=actual, expected=self._size)

    def close(self) -> None:
        """Make the pool unreachable from this process, whatever still refers to `view`. Idempotent."""
        if self._closed:
            return
        self._closed = True
        _map(self._address, self._size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE, -1)
        self.view = memoryview(b"")
        os.close(self._fd)


def _map(address: int | None, size_bytes: int, flags: int, fd: int) -> int:
    mapped = _libc.mmap(address, size_bytes, _READ_WRITE, flags, fd, 0)
    if mapped is None or mapped == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot map {size_bytes} bytes: {os.strerror(code)}")
    return int(mapped)


class LeaseLock:
    """The file in memd's lease directory that this process holds locked for as long as it may touch the pool.

    It begins with the fence, a word that memd writes when the lease is lost. memd takes a free lock (or a missing file)
    as proof that the process is gone. Raises PagepoolError (POOL_LOST) if there is no lease directory, that is, if no
    memd ever ran there.
    """

    def __init__(self, directory: Path, worker_name: str) -> None:
        safe = "".join(char if char.isalnum() else "-" for char in worker_name)[:32] or "worker"
        self.name = f"{safe}-{os.getpid()}-{os.urandom(4).hex()}.lock"
        self._path = directory / self.name
        try:
            self._fd = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
            os.pwrite(self._fd, bytes(_FENCE_BYTES), 0)  # a file without room for it would kill whoever looks there
        except OSError as error:
            message = f"the lease file {self._path} cannot be made ({error.strerror}); is memd running there?"
            raise PagepoolError(Reason.POOL_LOST, message, path=self._path) from error
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._map = mmap.mmap(self._fd, _FENCE_BYTES, prot=mmap.PROT_READ)
        self._fence = memoryview(self._map).cast("Q")
        self._held = True

    @property
    def fenced(self) -> bool:
        """Whether memd has given up the lease, and away what this process may be reading: one look into memory."""
        return self._held and self._fence[0] != 0

    def release(self) -> None:
        """Remove the file and free the lock. Idempotent. Only after the mapping is closed."""
        if not self._held:
            return
        self._held = False
        self._fence.release()
        self._map.close()
        self._path.unlink(missing_ok=True)
        os.close(self._fd)
