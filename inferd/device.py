"""The device that an engine computes on: its memd's, settled before the engine touches a GPU.

An engine calls `settle` first of all, before anything starts CUDA or loads a model: CUDA maps no memory between
processes of one PID value, which is seen only by comparing (two containers are both PID 1), and whatever else is wrong
with the device is better said before minutes of loading. What memd has at each attach is checked again by PoolSession:
a memd that came back on another device is refused with DEVICE_MISMATCH, and one that came back with this engine's PID
ends the engine, if it attaches `with respawning()`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pagekernels.cuda.identity import CudaUnavailableError, Driver, Gpu, on_wsl2, open_driver, visible_gpus
from pagepool.errors import Code, PagepoolError, Reason
from pagepool.pool_values import CudaDevice

EXIT_RESPAWN = 75
"""Exit code of an engine process that has memd's PID value: the front starts another one at once."""

ASK_TIMEOUT_S = 2.0
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.2, 2.0


class RespawnError(Exception):
    """This process has memd's PID and must not start CUDA. Let it leave `serve`: engine_process does the rest."""


def settle(
    flag: str,
    memd: str,
    tell: Callable[[str], None],
    rest: Callable[[float], object] = time.sleep,
    ask: Callable[[str], CudaDevice | None] | None = None,
) -> int | None:
    """CUDA's number of the device to compute on; None is the CPU.

    flag    --device: auto (memd's device), cpu, cuda (the pool's GPU) or cuda:N
    memd    the target of its Unix socket; where a GPU may be meant, this waits until memd is there
    tell    takes a line about the wait
    rest    waits so many seconds, and raises what shall end the wait

    Raises RespawnError, or PagepoolError (DEVICE_MISMATCH, INVALID_FIELD) naming both devices and the way out.
    """
    pool = _wait_for_pool(flag, memd, tell, rest, ask or pool_device)
    if pool is not None and must_respawn(os.getpid(), pool.memd_pid):
        raise RespawnError
    index = choose_device(flag, pool)
    if index is not None:
        _require_torch(flag)
    return index


@contextmanager
def respawning() -> Iterator[None]:
    """Within it an attach that is refused because a new memd has this process's PID raises RespawnError."""
    try:
        yield
    except PagepoolError as error:
        if error.reason is Reason.DEVICE_MISMATCH and "memd_pid" in error.metadata:
            raise RespawnError from error
        raise


def pool_device(memd: str) -> CudaDevice | None:
    """The GPU of memd's pool, by GetPool; None for shared memory. Raises PagepoolError (UNAVAILABLE: try again)."""
    from pagepool_client.pool import PoolClient  # late: the front, which imports this module, needs no client

    with PoolClient(memd, timeout_s=ASK_TIMEOUT_S) as client:
        pool = client.pool()
    if not pool.HasField("cuda_device"):
        return None
    device = pool.cuda_device
    return CudaDevice(device.uuid, device.memd_pid, device.name)


def must_respawn(own_pid: int, memd_pid: int) -> bool:
    """Whether a worker with this PID cannot map memd's GPU memory; each PID is seen in its own PID namespace."""
    return own_pid == memd_pid


def choose_device(
    flag: str, pool: CudaDevice | None, open_: Callable[[], Driver] | None = None, *, wsl2: bool | None = None
) -> int | None:
    """CUDA's number here of the pool's GPU; None is the CPU, where the pool lies in shared memory (None).

    Raises DEVICE_MISMATCH if `--device` says something else, or if this process cannot use that GPU, with the reason.
    """
    if pool is None:
        if flag in {"auto", "cpu"}:
            return None
        raise _mismatch(
            flag, "memd's pool lies in shared memory", "memd with --device cuda, or inferd with auto or cpu"
        )
    place = f"memd's pool lies on {pool.name} ({pool.uuid})"
    if flag == "cpu":
        raise _mismatch(flag, place, "inferd with --device auto, or memd with --device cpu")
    try:
        if on_wsl2() if wsl2 is None else wsl2:
            raise CudaUnavailableError("this is WSL 2, where CUDA maps no memory of other processes")
        gpus = visible_gpus((open_ or open_driver)())
    except CudaUnavailableError as error:
        raise _mismatch(
            flag, f"{place}, but {error}", "inferd where that can be used, or memd with --device cpu"
        ) from error
    own = _own_gpu(flag, pool, place, gpus)
    if flag.startswith("cuda:") and flag != f"cuda:{own.index}":
        remedy = f"inferd with --device cuda:{own.index} or auto, or another memd on the other GPU"
        raise _mismatch(flag, f"{place}, which is cuda:{own.index} here", remedy)
    return own.index


def _require_torch(flag: str) -> None:
    import torch  # late: the front imports this module too

    if not torch.cuda.is_available():
        what = f"torch {torch.__version__} cannot use the GPU of memd's pool (torch.cuda.is_available() is false)"
        raise _mismatch(flag, what, "inferd with a torch that was built for CUDA, or memd with --device cpu")


def _own_gpu(flag: str, pool: CudaDevice, place: str, gpus: list[Gpu]) -> Gpu:
    for gpu in gpus:
        if gpu.uuid == pool.uuid:
            return gpu
    seen = ", ".join(f"cuda:{gpu.index} {gpu.name} ({gpu.uuid})" for gpu in gpus) or "no GPU"
    mig = any(each.startswith("MIG-") for each in (pool.uuid, *(gpu.uuid for gpu in gpus)))
    why = "; CUDA maps no memory between MIG instances, or between one and its whole GPU" if mig else ""
    remedy = f"inferd where that device is visible (CUDA_VISIBLE_DEVICES={pool.uuid}), or memd on one that is"
    raise _mismatch(flag, f"{place}, but this process sees {seen}{why}", remedy)


def _wait_for_pool(
    flag: str,
    memd: str,
    tell: Callable[[str], None],
    rest: Callable[[float], object],
    ask: Callable[[str], CudaDevice | None],
) -> CudaDevice | None:
    pause = _FIRST_PAUSE_S
    while True:
        try:
            return ask(memd)
        except PagepoolError as error:
            # UNKNOWN is a memd that does not answer in time.
            if error.code not in {Code.UNAVAILABLE, Code.UNKNOWN}:
                raise
            if not may_be_cuda(flag):  # and memd will refuse it if the pool turns out to lie on a GPU
                return None
            tell(f"waiting for memd, whose device decides this worker's: {error.message}")
        rest(pause)
        pause = min(2 * pause, _LAST_PAUSE_S)


def may_be_cuda(flag: str) -> bool:
    """Whether a GPU may be what `--device` means, as far as can be said without a memd."""
    if flag != "auto":
        return flag != "cpu"
    try:
        open_driver()
    except CudaUnavailableError:
        return False
    return True


def _mismatch(flag: str, what: str, remedy: str) -> PagepoolError:
    message = f"--device is {flag}, but {what}; start {remedy}"
    return PagepoolError(Reason.DEVICE_MISMATCH, message, field="--device", value=flag, what=what)
