"""inferd's settings. The only place in inferd that reads the environment."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from inferd.core.speculation import MAX_SPECULATE_TOKENS
from pagepool.errors import invalid_field
from pagepool.listen import Listener, UnixListener, default_socket, parse_listener
from pagepool.logs import FORMATS, LEVELS
from pagepool.settings import Loaded, choice, load, parse_bool, parse_device, parse_positive, parse_seconds, setting

DTYPES = ("auto", "float32", "bfloat16", "float16")
SPINS = ("auto", "on", "off")
SWITCH = ("on", "off")
MAX_NAME_BYTES = 128


def parse_memd(text: str) -> str:
    """The gRPC target of memd's socket. Raises INVALID_FIELD unless it is unix:PATH."""
    listener = parse_listener(text)
    if not isinstance(listener, UnixListener):
        remedy = "give memd's Unix socket, since the pool's memory is not handed out over TCP"
        raise invalid_field("memd", text, "unix:PATH", remedy)
    return str(listener)


def parse_name(text: str) -> str:
    """A worker's name. Raises ValueError."""
    if not 1 <= len(text.encode()) <= MAX_NAME_BYTES:
        raise ValueError(f"from 1 to {MAX_NAME_BYTES} bytes long")
    return text


def parse_wait(text: str) -> float:
    """Seconds, or 0. Raises ValueError."""
    try:
        return 0.0 if text in {"0", "0s"} else parse_seconds(text)
    except ValueError:
        raise ValueError("0, or a time such as 10s or 500ms") from None


def parse_speculate_tokens(text: str) -> int:
    """The longest draft. Raises ValueError."""
    if not (text.isascii() and text.isdigit() and int(text) <= MAX_SPECULATE_TOKENS):
        raise ValueError(f"a whole number from 0, which is off, to {MAX_SPECULATE_TOKENS}")
    return int(text)


@dataclass(frozen=True, kw_only=True)
class InferdConfig:
    """What inferd can be told."""

    model: str = setting("a hub id, a folder, a GGUF file, or smollm2", default="smollm2")
    memd: str = setting("memd's socket, unix:PATH (default: memd's own default)", parse_memd, default="")
    listen: tuple[Listener, ...] = setting(
        "where to listen: unix:PATH or tcp:HOST:PORT, repeatable (default: unix:inferd.sock in "
        "$XDG_RUNTIME_DIR/pagepool, else in /run/pagepool for root, else in /tmp/pagepool-UID)",
        parse_listener,
        default=(),
        repeatable=True,
    )
    name: str = setting("the worker's name, for people (default: inferd-PID)", parse_name, default="")
    device: str = setting(
        "what to compute on: cuda for the GPU that memd's pool lies on, cuda:N to insist on its number here, cpu for a "
        "pool in shared memory, auto for whatever memd has",
        parse_device,
        default="auto",
    )
    dtype: str = setting(
        f"of weights and pool: {', '.join(DTYPES)} (auto: the model's own, but float32 on a CPU without 16-bit "
        "arithmetic)",
        choice(*DTYPES),
        default="auto",
    )
    threads: int = setting("threads of the engine's arithmetic (default: one per core)", parse_positive, default=0)
    spin: str = setting(
        "whether those threads wait for each other awake: on is fastest on an idle machine, off on one whose cores "
        "others use too; auto: awake for a moment, then asleep",
        choice(*SPINS),
        default="auto",
    )
    max_batch_tokens: int | None = setting(
        "tokens of one step, prompts and continuations together; at least --max-num-seqs (default: 8192 on a GPU, 512 "
        "on a CPU)",
        parse_positive,
        default=None,
    )
    max_num_seqs: int | None = setting(
        "requests that run at once (default: 256 on a GPU, 64 on a CPU)", parse_positive, default=None
    )
    max_queue: int = setting("requests that wait; more are refused", parse_positive, default=1024)
    enable_chunked_prefix: bool = setting(
        "take from the pool what it has of a prompt, whoever computed it, and prefill the rest in chunks; without it, "
        "every prompt is computed whole",
        parse_bool,
        default=True,
    )
    prefix_wait: float = setting(
        "seconds that a request waits at most for a prefix which another one is computing, on whatever worker, instead "
        "of computing it too (0: it never waits)",
        parse_wait,
        default=10.0,
    )
    kv_precision: str = setting(
        "how the KV of requests is stored that do not say: exact for none in FP8, any for whatever memd's --fp8 does",
        choice("any", "exact"),
        default="any",
    )
    speculate_tokens: int = setting(
        "tokens that a request guesses a step from what followed the same words before, where it does not say itself; "
        f"the tokens are the same with and without (0, the default, is off; at most {MAX_SPECULATE_TOKENS})",
        parse_speculate_tokens,
        default=0,
    )
    compile: str = setting(
        "whether a GPU runs the model through torch.compile: off starts sooner, and every step takes longer",
        choice(*SWITCH),
        default="on",
    )
    graphs: str = setting(
        "whether a GPU replays small steps as CUDA graphs: off starts sooner, and every token takes longer",
        choice(*SWITCH),
        default="on",
    )
    warmup: bool = setting("run all shapes before health says SERVING", parse_bool, default=True)
    cache_dir: Path | None = setting(
        "converted models, tokenizers and compiled kernels (default: pagepool in $XDG_CACHE_HOME, else in ~/.cache)",
        Path,
        default=None,
    )
    drain_grace: float = setting("seconds that requests have to end when inferd stops", parse_seconds, default=10.0)
    print_geometry: bool = setting(
        "print the model's geometry for `memd --geometry`, and exit", parse_bool, default=False
    )
    log_level: str = setting(f"least level to log: {', '.join(LEVELS)}", choice(*LEVELS), default="info")
    log_format: str = setting(f"how to log: {', '.join(FORMATS)}", choice(*FORMATS), default="auto")


def load_config(argv: Sequence[str]) -> Loaded[InferdConfig]:
    """The settings in force. Raises INVALID_FIELD, naming where the wrong value stands."""
    loaded = load(InferdConfig, "inferd", argv, os.environ)
    given, uid = loaded.config, os.getuid()
    cores = len(os.sched_getaffinity(0))
    config = replace(
        given,
        memd=given.memd or f"unix:{default_socket('memd', os.environ, uid)}",
        listen=given.listen or (UnixListener(default_socket("inferd", os.environ, uid)),),
        name=given.name or f"inferd-{os.getpid()}",
        threads=given.threads or cores,
        cache_dir=given.cache_dir or _cache_dir(),
    )
    return replace(loaded, config=config)


def engine_environment(config: InferdConfig) -> dict[str, str]:
    """The environment of an engine process: OpenMP reads its settings before any of our code runs.

    Threads that wait awake are faster on an idle machine, and stall a step forty times over where a neighbour takes a
    core. "auto" leaves it to OpenMP, which waits awake for some milliseconds.
    """
    threads = str(config.threads)
    policy = {"on": "ACTIVE", "off": "PASSIVE"}.get(config.spin)
    waiting = {} if policy is None else {"OMP_WAIT_POLICY": policy}
    return {
        **os.environ,
        **waiting,
        "OMP_NUM_THREADS": threads,
        "NUMBA_NUM_THREADS": threads,
        "NUMBA_THREADING_LAYER": "omp",
        # Else it is a folder in /tmp, and after the next boot a start takes half a minute longer.
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", f"{config.cache_dir}/inductor"),
        "TOKENIZERS_PARALLELISM": "false",
    }


def notify_address() -> str | None:
    """Where systemd wants to be told, if it does."""
    return os.environ.get("NOTIFY_SOCKET")


def _cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pagepool"
