"""A slab of shared memory: one file that memd and its workers map. For machines without a GPU."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from memd.runs import Run
from pagekernels.layout import LAYOUT_LINEAR
from pagepool.errors import PagepoolError, invalid_field

_CHUNK = 64 << 20
_MAX_DEFAULT_BYTES = 4 << 30


class HostSlab:
    """Zeroed memory in `path`, mode 0600, allocated to its last byte, locked with flock(LOCK_SH) by this process.

    The file is made without a name and gets one, which never occurs twice, only when it is locked: whatever lies in
    the directory unlocked is a leftover, and two memds that are the same pid in two namespaces stay apart.
    """

    layout_version = LAYOUT_LINEAR

    def __init__(self, path: Path, size_bytes: int, descriptor: int) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self._descriptor = descriptor

    @classmethod
    def create(
        cls, directory: Path, size_bytes: int, keep_going: Callable[[], bool], flag: str = "--pool-bytes"
    ) -> HostSlab | None:
        """Makes a slab; None if `keep_going` says no on the way. Raises INVALID_FIELD (`flag`) if it does not fit."""
        descriptor = _nameless_file(directory)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if not _allocate(descriptor, directory, (size_bytes, flag), keep_going):
                os.close(descriptor)
                return None
            path = directory / f"{_prefix()}{secrets.token_hex(16)}.slab"
            _give_name(descriptor, path)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(path, size_bytes, descriptor)

    def __str__(self) -> str:
        return str(self.path)

    def copy(self, runs: Sequence[Run]) -> None:
        """Carries out copies within this slab, in order; whoever maps the file sees it at once."""
        for source, target, size in runs:
            _write(self._descriptor, _read(self._descriptor, source.offset, size), target.offset)

    def close(self) -> None:
        """Unlinks the file; the memory goes with its last mapping."""
        self.path.unlink(missing_ok=True)
        os.close(self._descriptor)


def default_pool_bytes(directory: Path) -> int:
    """A quarter of the free memory, at most half of the directory's free space and 4 GiB, in whole MiB."""
    with Path("/proc/meminfo").open(encoding="ascii") as lines:
        sizes = {name: int(rest.split()[0]) << 10 for name, rest in (line.split(":") for line in lines)}
    size = min(sizes["MemAvailable"] // 4, _free_bytes(directory) // 2, _MAX_DEFAULT_BYTES)
    return max(size >> 20, 1) << 20


def remove_stale_slabs(directory: Path) -> list[Path]:
    """Unlinks this user's slabs that no process has locked, and says which."""
    return [path for path in directory.glob(f"{_prefix()}*.slab") if _remove_if_stale(path)]


def living_bytes(directory: Path) -> int:
    """Bytes of this user's slabs in the directory."""
    total = 0
    for path in directory.glob(f"{_prefix()}*.slab"):
        with suppress(FileNotFoundError):  # its memd has just stopped
            total += path.stat().st_size
    return total


def _remove_if_stale(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # gone already, or not ours
        return False
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.getuid():
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def _read(descriptor: int, offset: int, size: int) -> bytes:
    pieces: list[bytes] = []
    while size and (piece := os.pread(descriptor, size, offset)):
        pieces.append(piece)
        offset, size = offset + len(piece), size - len(piece)
    return b"".join(pieces)


def _write(descriptor: int, data: bytes, offset: int) -> None:
    left = memoryview(data)
    while left:
        written = os.pwrite(descriptor, left, offset)
        offset, left = offset + written, left[written:]


def _prefix() -> str:
    return f"pagepool-{os.getuid()}-"


def _nameless_file(directory: Path) -> int:
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        limit = f"a writable directory on a file system with O_TMPFILE ({error.strerror})"
        raise invalid_field("--slab-dir", directory, limit, "use /dev/shm or another tmpfs") from error


def _give_name(descriptor: int, path: Path) -> None:
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:  # only with a directory does os.link follow the link in /proc, as is needed here
        os.link(f"/proc/self/fd/{descriptor}", path.name, src_dir_fd=directory, dst_dir_fd=directory)
    finally:
        os.close(directory)


def _allocate(descriptor: int, directory: Path, wanted: tuple[int, str], keep_going: Callable[[], bool]) -> bool:
    """Takes the bytes that a flag asks for."""
    free, (size_bytes, flag) = _free_bytes(directory), wanted
    if size_bytes > free:
        raise _does_not_fit(directory, flag, size_bytes, free)
    try:
        for offset in range(0, size_bytes, _CHUNK):
            if not keep_going():
                return False
            os.posix_fallocate(descriptor, offset, min(_CHUNK, size_bytes - offset))
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM}:
            raise
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
        raise _does_not_fit(directory, flag, size_bytes, _free_bytes(directory)) from error
    return True


def _free_bytes(directory: Path) -> int:
    try:
        info = os.statvfs(directory)
    except OSError as error:
        raise invalid_field("--slab-dir", directory, f"a directory ({error.strerror})", "use /dev/shm") from error
    return info.f_bavail * info.f_frsize


def _does_not_fit(directory: Path, flag: str, size_bytes: int, free: int) -> PagepoolError:
    limit = f"at most the {free} bytes that are free in {directory}"
    remedy = "lower it, make that file system larger, or choose another one with --slab-dir"
    return invalid_field(flag, size_bytes, limit, remedy)
