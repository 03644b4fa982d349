"""memd's settings. The only place in memd that reads the environment."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from memd.core.fp8 import Fp8, Policy
from pagepool.listen import Listener, UnixListener, default_socket, parse_listener
from pagepool.logs import FORMATS, LEVELS
from pagepool.settings import Loaded, choice, load, parse_device, parse_positive, parse_seconds, parse_size, setting


def parse_block_size(text: str) -> int:
    """A power of two from 8 to 128. Raises ValueError."""
    if text not in {"8", "16", "32", "64", "128"}:
        raise ValueError("a power of two from 8 to 128")
    return int(text)


def parse_count(text: str) -> int:
    """0 or more. Raises ValueError."""
    if not text.isascii() or not text.isdigit():
        raise ValueError("0 or more")
    return int(text)


def parse_share(text: str) -> float:
    """A share of a whole, between 0 and 1. Raises ValueError."""
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 < share < 1:
        raise ValueError("a number between 0 and 1")
    return share


@dataclass(frozen=True, kw_only=True)
class MemdConfig:
    """What memd can be told."""

    listen: tuple[Listener, ...] = setting(
        "where to listen: unix:PATH or tcp:HOST:PORT, repeatable (default: unix:memd.sock in "
        "$XDG_RUNTIME_DIR/pagepool, else in /run/pagepool for root, else in /tmp/pagepool-UID)",
        parse_listener,
        default=(),
        repeatable=True,
    )
    device: str = setting(
        "where the pool lies: cuda or cuda:N for a GPU, cpu for shared memory, auto for the first GPU if there is one",
        parse_device,
        default="auto",
    )
    pool_bytes: int | None = setting(
        "size of the pool, such as 2GiB (default: on a GPU what is free there without --reserve-bytes, else a quarter "
        "of the free memory, at most half of the space in --slab-dir and 4GiB)",
        parse_size,
        default=None,
    )
    reserve_bytes: int | None = setting(
        "GPU memory that is left for the workers' weights and activations (default: half of the GPU's memory)",
        parse_size,
        default=None,
    )
    max_num_blocks: int | None = setting("cut at most so many blocks from the pool", parse_positive, default=None)
    block_size: int = setting("token positions in a block, a power of two from 8 to 128", parse_block_size, default=16)
    geometry: Path | None = setting(
        "cut the pool at start, from the file that `inferd --print-geometry` writes (default: when the first worker "
        "attaches)",
        Path,
        default=None,
    )
    slab_dir: Path = setting("where the shared memory lies", Path, default=Path("/dev/shm"))  # noqa: S108
    heartbeat_timeout: float = setting(
        "seconds without a word after which a worker's lease is lost", parse_seconds, default=10.0
    )
    ack_timeout: float = setting(
        "seconds within which a worker has to acknowledge that no step of it reads a block any more that was merged or "
        "moved; after that its lease is lost (longer than its longest step takes)",
        parse_seconds,
        default=30.0,
    )
    fp8: str = setting(
        "which blocks are stored as FP8 blocks, in half the space: off for none, manual for those that CompressBlocks "
        "names; cold: also those in use by nobody or idle; pressure: those while the pool is full, and if that is not "
        "enough those of running requests; always: all",
        choice("off", *Policy),
        default="off",
    )
    fp8_idle: float = setting(
        "with --fp8 cold: seconds without a word after which a block table is idle", parse_seconds, default=60.0
    )
    fp8_keep_recent: int = setting(
        "no --fp8 but manual compresses the newest so many full blocks of a table, nor its first",
        parse_count,
        default=4,
    )
    fp8_watermark: float = setting(
        "with --fp8 pressure: the share of the pool in use from which on it is full, below 1",
        parse_share,
        default=0.9,
    )
    fp8_step_bytes: int = setting(
        "bytes of blocks that a worker compresses between two of its steps at most", parse_size, default=4 << 20
    )
    host_tier: int | None = setting(
        "bytes of host memory, such as 16GiB, for blocks that nobody uses when the device is full: they move there "
        "instead of being evicted (default: none)",
        parse_size,
        default=None,
    )
    drain_grace: float = setting("seconds that workers have to detach when memd stops", parse_seconds, default=5.0)
    log_level: str = setting(f"least level to log: {', '.join(LEVELS)}", choice(*LEVELS), default="info")
    log_format: str = setting(f"how to log: {', '.join(FORMATS)}", choice(*FORMATS), default="auto")


def fp8_of(config: MemdConfig) -> Fp8 | None:
    """How the pool has FP8 blocks, if it has any."""
    if config.fp8 == "off":
        return None
    policy, recent = Policy(config.fp8), config.fp8_keep_recent
    return Fp8(policy, config.fp8_idle, recent, config.fp8_watermark, config.fp8_step_bytes)


def load_config(argv: Sequence[str]) -> Loaded[MemdConfig]:
    """The settings in force. Raises INVALID_FIELD, naming where the wrong value stands."""
    loaded = load(MemdConfig, "memd", argv, os.environ)
    if loaded.config.listen:
        return loaded
    listener = UnixListener(default_socket("memd", os.environ, os.getuid()))
    return replace(loaded, config=replace(loaded.config, listen=(listener,)))


def notify_address() -> str | None:
    """Where systemd wants to be told, if it does."""
    return os.environ.get("NOTIFY_SOCKET")
