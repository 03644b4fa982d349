"""The fence: a word in the worker's lease file that memd writes and the worker reads."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from memd.device.locks import FENCE_BYTES, LeaseLocks
from pagepool_client.mapping import LeaseLock


@pytest.fixture
def locks(tmp_path: Path) -> LeaseLocks:
    return LeaseLocks(tmp_path / "leases")


@pytest.fixture
def worker(locks: LeaseLocks) -> Iterator[LeaseLock]:
    made = LeaseLock(locks.directory, "worker")
    locks.hold(made.name)
    yield made
    made.release()


def test_a_worker_sees_its_fence_as_soon_as_it_is_written(locks: LeaseLocks, worker: LeaseLock) -> None:
    other = LeaseLock(locks.directory, "worker")
    locks.hold(other.name)
    assert not worker.fenced
    assert locks.fence(worker.name, 1 << 40)
    assert worker.fenced
    assert not other.fenced
    other.release()
    assert (locks.directory / worker.name).read_bytes() == (1 << 40).to_bytes(FENCE_BYTES, "little")


def test_an_unlinked_file_still_fences_its_worker(locks: LeaseLocks, worker: LeaseLock) -> None:
    (locks.directory / worker.name).unlink()
    assert locks.fence(worker.name, 1)
    assert worker.fenced


def test_a_fence_says_nothing_once_the_lock_is_dropped(locks: LeaseLocks, worker: LeaseLock) -> None:
    locks.fence(worker.name, 1)
    worker.release()
    assert not worker.fenced
    worker.release()


def test_a_file_without_room_for_a_fence_is_left_as_it_is(locks: LeaseLocks) -> None:
    path = locks.directory / "short"
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    os.write(descriptor, bytes(FENCE_BYTES - 1))
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    locks.hold("short")
    assert not locks.fence("short", 1)
    assert path.read_bytes() == bytes(FENCE_BYTES - 1)
    os.close(descriptor)
