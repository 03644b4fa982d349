"""Shared memory, sockets and locks: what a process leaves behind, and what it must not touch."""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from memd import slabs
from memd.clock import LivenessClock
from memd.config import MemdConfig
from memd.device import host
from memd.device.host import HostSlab, default_pool_bytes, remove_stale_slabs
from memd.device.locks import LeaseLocks
from memd.runs import Place, Run
from pagepool.errors import PagepoolError, Reason
from pagepool.lifecycle import run, sd_notify
from pagepool.listen import SocketClaim, private_directory


@pytest.fixture
def shm() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="pp-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def one(source: int, target: int, size: int) -> Run:
    return Run(Place(0, source), Place(0, target), size)


def make_slab(directory: Path, size: int = 1 << 20) -> HostSlab:
    slab = HostSlab.create(directory, size, lambda: True)
    assert slab is not None
    return slab


def hold_lock(path: Path, kind: int) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    return descriptor


class TestSlab:
    def test_is_allocated_to_its_last_byte_private_and_zero(self, shm: Path) -> None:
        slab = make_slab(shm, (1 << 20) + 4096)
        info = slab.path.stat()
        assert info.st_size == (1 << 20) + 4096
        assert info.st_blocks * 512 >= info.st_size
        assert info.st_mode & 0o777 == 0o600
        assert not slab.path.read_bytes().strip(b"\0")
        slab.close()
        assert list(shm.iterdir()) == []

    def test_copies_reach_whoever_maps_the_file(self, shm: Path) -> None:
        slab = make_slab(shm)
        with slab.path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as view:
            view[:8] = b"abcdefgh"
            slab.copy([one(0, 4096, 4), one(2, (1 << 20) - 6, 6), one(4096, 8192, 2)])
            assert (view[4096:4101], view[8192:8195], view[-6:]) == (b"abcd\0", b"ab\0", b"cdefgh")
        slab.close()

    def test_names_never_collide_and_the_living_stay(self, shm: Path) -> None:
        slabs = [make_slab(shm) for _ in range(3)]
        assert len({slab.path for slab in slabs}) == 3
        assert remove_stale_slabs(shm) == []
        assert all(slab.path.exists() for slab in slabs)
        for slab in slabs:
            slab.close()

    def test_leftovers_nobody_locks_are_removed(self, shm: Path) -> None:
        living = make_slab(shm)
        script = (
            "import os, sys; from pathlib import Path; from memd.device.host import HostSlab\n"
            "HostSlab.create(Path(sys.argv[1]), 4096, lambda: True); os.kill(os.getpid(), 9)"
        )
        subprocess.run([sys.executable, "-c", script, str(shm)], check=False)
        left = next(path for path in shm.iterdir() if path != living.path)
        assert remove_stale_slabs(shm) == [left]
        assert list(shm.iterdir()) == [living.path]
        living.close()

    def test_a_leftover_that_a_worker_still_maps_is_left_alone(self, shm: Path) -> None:
        slab = make_slab(shm)
        reader = hold_lock(slab.path, fcntl.LOCK_SH)
        os.close(slab._descriptor)
        assert remove_stale_slabs(shm) == []
        os.close(reader)
        assert remove_stale_slabs(shm) == [slab.path]

    def test_other_files_links_and_pipes_are_left_alone(self, shm: Path) -> None:
        prefix = f"pagepool-{os.getuid()}-"
        (shm / "pagepool-other").write_text("x")
        (shm / f"{prefix}a.slab").symlink_to(shm / "pagepool-other")
        os.mkfifo(shm / f"{prefix}b.slab")
        assert remove_stale_slabs(shm) == []
        assert len(list(shm.iterdir())) == 3

    def test_one_that_does_not_fit_is_refused_with_numbers_and_flag(self, shm: Path) -> None:
        with pytest.raises(PagepoolError, match=r"--pool-bytes is \d+, but must be at most the \d+ bytes") as caught:
            make_slab(shm, 1 << 50)
        assert caught.value.reason is Reason.INVALID_FIELD
        assert list(shm.iterdir()) == []

    def test_space_that_runs_out_on_the_way_is_refused_too(self, shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(_descriptor: int, _offset: int, _size: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(host.os, "posix_fallocate", full)
        with pytest.raises(PagepoolError, match="--pool-bytes is 4096"):
            make_slab(shm, 4096)

    def test_making_one_can_be_interrupted(self, shm: Path) -> None:
        assert HostSlab.create(shm, 4096, lambda: False) is None
        assert list(shm.iterdir()) == []

    def test_a_directory_that_is_none_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(PagepoolError, match=r"--slab-dir is .*none"):
            make_slab(tmp_path / "none")

    def test_the_default_size_is_a_share_with_a_cap(self) -> None:
        size = default_pool_bytes(Path("/dev/shm"))
        assert size % (1 << 20) == 0
        assert 1 << 20 <= size <= 4 << 30
        assert size <= shutil.disk_usage("/dev/shm").free // 2


class TestLeaseLocks:
    @pytest.fixture
    def locks(self, tmp_path: Path) -> LeaseLocks:
        return LeaseLocks(tmp_path / "leases")

    def test_the_folder_is_private(self, locks: LeaseLocks) -> None:
        assert locks.directory.stat().st_mode & 0o777 == 0o700

    def test_a_locked_file_is_held_until_its_process_lets_go(self, locks: LeaseLocks) -> None:
        descriptor = hold_lock(locks.directory / "a", fcntl.LOCK_EX)
        locks.hold("a")
        assert not locks.is_free("a")
        os.close(descriptor)
        assert locks.is_free("a")
        locks.drop("a")
        assert list(locks.directory.iterdir()) == []

    def test_probing_never_takes_the_lock_from_its_worker(self, locks: LeaseLocks) -> None:
        descriptor = hold_lock(locks.directory / "a", fcntl.LOCK_EX)
        locks.hold("a")
        os.close(descriptor)
        assert locks.is_free("a")
        again = hold_lock(locks.directory / "a", fcntl.LOCK_EX)
        assert not locks.is_free("a")
        os.close(again)

    def test_an_unlinked_file_still_tells_whether_its_process_lives(self, locks: LeaseLocks) -> None:
        descriptor = hold_lock(locks.directory / "a", fcntl.LOCK_EX)
        locks.hold("a")
        (locks.directory / "a").unlink()
        assert not locks.is_free("a")
        os.close(descriptor)
        assert locks.is_free("a")

    def test_an_unlocked_file_is_refused(self, locks: LeaseLocks) -> None:
        (locks.directory / "a").touch()
        with pytest.raises(PagepoolError, match="lock_file is 'a', but must be locked"):
            locks.hold("a")

    def test_the_name_of_another_living_file_is_refused(self, locks: LeaseLocks) -> None:
        first = hold_lock(locks.directory / "a", fcntl.LOCK_EX)
        locks.hold("a")
        locks.hold("a")
        (locks.directory / "a").unlink()
        second = hold_lock(locks.directory / "a", fcntl.LOCK_EX)
        with pytest.raises(PagepoolError, match="a name that no other file here had"):
            locks.hold("a")
        os.close(first)
        os.close(second)

    @pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "/etc/passwd", "none", "a\0b", "x" * 300])
    def test_names_that_lead_elsewhere_are_refused(self, locks: LeaseLocks, name: str) -> None:
        with pytest.raises(PagepoolError, match="lock_file is ") as caught:
            locks.hold(name)
        assert caught.value.reason is Reason.INVALID_FIELD

    def test_links_folders_and_pipes_are_refused(self, locks: LeaseLocks, tmp_path: Path) -> None:
        (tmp_path / "outside").touch()
        (locks.directory / "link").symlink_to(tmp_path / "outside")
        (locks.directory / "folder").mkdir()
        os.mkfifo(locks.directory / "pipe")
        for name in ("link", "folder", "pipe"):
            with pytest.raises(PagepoolError, match=f"lock_file is '{name}'"):
                locks.hold(name)

    def test_old_unlocked_leftovers_go_and_locked_or_young_ones_stay(self, locks: LeaseLocks) -> None:
        for name in ("old", "locked", "young"):
            (locks.directory / name).touch()
            if name != "young":
                os.utime(locks.directory / name, (time.time() - 999, time.time() - 999))
        descriptor = hold_lock(locks.directory / "locked", fcntl.LOCK_EX)
        locks.remove_leftovers()
        assert sorted(path.name for path in locks.directory.iterdir()) == ["locked", "young"]
        os.close(descriptor)


def little_room(monkeypatch: pytest.MonkeyPatch, shm: Path, room: int) -> None:
    """A file system for slabs with so many bytes in all."""
    monkeypatch.setattr(host, "_free_bytes", lambda _: room - sum(path.stat().st_size for path in shm.iterdir()))


async def test_a_memd_that_comes_back_waits_for_the_memory_that_workers_still_map(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slabs, "FORMER_POLL_S", 0.01)
    little_room(monkeypatch, shm, 3 << 20)
    worker = lock_of_a_worker(make_slab(shm, 2 << 20))
    config = MemdConfig(slab_dir=shm, pool_bytes=2 << 20)
    coming = asyncio.create_task(slabs._host_slab(config, asyncio.Event()))
    await asyncio.sleep(0.1)
    assert not coming.done()
    os.close(worker)
    slab = await asyncio.wait_for(coming, 5)
    assert slab is not None
    assert slabs_in(shm) == [slab.path]
    slab.close()


async def test_what_would_not_fit_into_an_empty_directory_is_refused_at_once(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    little_room(monkeypatch, shm, 1 << 20)
    with pytest.raises(PagepoolError, match="--pool-bytes"):
        await asyncio.wait_for(slabs._host_slab(MemdConfig(slab_dir=shm, pool_bytes=2 << 20), asyncio.Event()), 1)


async def test_a_slab_that_its_last_worker_lets_go_later_is_removed_in_time(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slabs, "SWEEP_S", 0.01)
    worker = lock_of_a_worker(make_slab(shm))
    sweeping = asyncio.create_task(slabs.keep_sweeping(shm))
    await asyncio.sleep(0.1)
    assert slabs_in(shm)
    os.close(worker)
    for _ in range(500):
        await asyncio.sleep(0.01)
        if not slabs_in(shm):
            break
    sweeping.cancel()
    assert not slabs_in(shm)


async def test_nobody_waits_while_the_memory_of_a_former_slab_is_given_back(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as the kernel likes: here until others have had their turn."""
    monkeypatch.setattr(slabs, "SWEEP_S", 0.0)
    begun, go_on = threading.Event(), threading.Event()

    def remove(_: Path) -> list[Path]:
        begun.set()
        assert go_on.wait(5.0), "nobody else had a turn"
        return []

    monkeypatch.setattr(slabs, "remove_stale_slabs", remove)
    sweeping = asyncio.create_task(slabs.keep_sweeping(shm))
    assert await asyncio.to_thread(begun.wait, 5.0)
    go_on.set()
    sweeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sweeping


def slabs_in(shm: Path) -> list[Path]:
    return list(shm.iterdir())


def lock_of_a_worker(slab: HostSlab) -> int:
    """A worker's hold on a slab whose memd was killed."""
    held = os.open(slab.path, os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_SH)
    os.close(slab._descriptor)
    return held


class TestSocketClaim:
    def test_makes_a_private_directory(self, tmp_path: Path) -> None:
        claim = SocketClaim(tmp_path / "run" / "x.sock")
        assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
        claim.release()

    def test_an_open_directory_is_refused_with_the_remedy(self, tmp_path: Path) -> None:
        (tmp_path / "open").mkdir()
        (tmp_path / "open").chmod(0o755)
        with pytest.raises(PagepoolError, match=r"mode 755; run `chmod 700 .*open`"):
            SocketClaim(tmp_path / "open" / "x.sock")

    def test_a_directory_that_everybody_shares_is_not_to_be_closed(self, tmp_path: Path) -> None:
        (tmp_path / "tmp").mkdir()
        (tmp_path / "tmp").chmod(0o1777)
        with pytest.raises(PagepoolError, match=r"mode 1777; choose a directory of its own, such as .*/tmp/pagepool"):
            SocketClaim(tmp_path / "tmp" / "x.sock")

    def test_a_directory_that_cannot_be_made_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(PagepoolError, match=r"can be made .*choose a directory of your own"):
            SocketClaim(tmp_path / "file" / "run" / "x.sock")

    def test_a_directory_of_another_user_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        private_directory(tmp_path / "theirs")
        owner = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: owner + 1)
        with pytest.raises(PagepoolError, match=f"belongs to user {owner}"):
            SocketClaim(tmp_path / "theirs" / "x.sock")

    def test_a_linked_directory_is_refused(self, tmp_path: Path) -> None:
        private_directory(tmp_path / "real")
        (tmp_path / "link").symlink_to(tmp_path / "real")
        with pytest.raises(PagepoolError, match="must be in a directory"):
            SocketClaim(tmp_path / "link" / "x.sock")

    def test_two_claims_never_share_a_path(self, tmp_path: Path) -> None:
        first = SocketClaim(tmp_path / "run" / "x.sock")
        with pytest.raises(PagepoolError, match=r"x\.sock, but must be a free socket path.*--listen"):
            SocketClaim(tmp_path / "run" / "x.sock")
        first.release()
        SocketClaim(tmp_path / "run" / "x.sock").release()

    def test_a_stale_socket_is_removed_and_a_living_one_is_not(self, tmp_path: Path) -> None:
        private_directory(tmp_path / "run")
        path = tmp_path / "run" / "x.sock"
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
            server.listen()
            with pytest.raises(PagepoolError, match="a living server has this one"):
                SocketClaim(path)
        claim = SocketClaim(path)
        assert not path.exists()
        claim.release()

    def test_a_file_in_its_place_is_not_removed(self, tmp_path: Path) -> None:
        private_directory(tmp_path / "run")
        (tmp_path / "run" / "x.sock").write_text("precious")
        with pytest.raises(PagepoolError, match="that is a file"):
            SocketClaim(tmp_path / "run" / "x.sock")
        assert (tmp_path / "run" / "x.sock").read_text() == "precious"


def test_time_in_which_memd_did_not_run_counts_against_nobody() -> None:
    now = [100.0]
    clock = LivenessClock(lambda: now[0])
    times = []
    for step in (0.1, 0.9, 3600.0, 0.1):
        now[0] += step
        times.append(round(clock(), 6))
    assert times == [100.1, 101.0, 102.0, 102.1]


def test_systemd_is_told_on_its_socket_and_nobody_without_one(tmp_path: Path) -> None:
    sd_notify("READY=1", None)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
        notified.bind(str(tmp_path / "notify"))
        sd_notify("READY=1", str(tmp_path / "notify"))
        assert notified.recv(64) == b"READY=1"


@pytest.mark.parametrize(
    ("reason", "code"),
    [(Reason.INVALID_FIELD, 2), (Reason.GEOMETRY_MISMATCH, 2), (Reason.ENGINE_FAILED, 1), (Reason.POOL_LOST, 1)],
)
def test_only_what_a_daemon_was_told_wrong_is_worth_no_second_try(
    reason: Reason, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    async def serve(_stop: asyncio.Event) -> None:
        raise PagepoolError(reason, "words")

    assert run("program", serve) == code
    assert capsys.readouterr().err == "program: words\n"
