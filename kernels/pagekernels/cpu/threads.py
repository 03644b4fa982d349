"""How many threads the kernels use, and whose.

torch brings an OpenMP runtime of its own; numba's would be a second one, and the waiting threads of the two pools spin
against each other on the same cores. So numba joins torch's: its kernels call OpenMP by symbol names, which resolve to
whichever runtime is global when the first kernel loads. Measured on 2 idle cores (torch linear layer 1 x 576 x 1536 and
a 60,000-element numba loop, in turn, 2 threads, us for both):

    two runtimes 813      numba's workqueue 261      one runtime 193 (of which torch 141)

On cores that others keep busy, a pool that spins (the default) stalls for whole time slices: 15 to 40 ms were seen for
a call of 0.1 ms on 2 threads. So small calls (plan.GRAIN) stay on the caller's thread; where the daemons and clients
leave no core free, configure one thread, or set OMP_WAIT_POLICY=PASSIVE before the process starts.
"""

from __future__ import annotations

import ctypes
import importlib
import re
from pathlib import Path

import numba


def configure(threads: int) -> None:
    """Choose how many threads the CpuOps made from now on use. Import torch first; call in the thread that makes them.

    Raises ValueError outside 1 .. numba.config.NUMBA_NUM_THREADS (the cores, unless the environment says otherwise).
    """
    prepare()
    most = numba.config.NUMBA_NUM_THREADS
    if not 1 <= threads <= most:
        raise ValueError(f"threads is {threads}, but must be from 1 to {most}, the value of NUMBA_NUM_THREADS")
    numba.set_num_threads(threads)


def prepare() -> None:
    """Select numba's threading layer before it loads a kernel: OpenMP, by the runtime that is loaded already.

    Without an OpenMP runtime on the machine it is numba's own workqueue, which is correct but slower beside torch.
    """
    runtimes = re.findall(r"/\S*/libgomp\S*", Path("/proc/self/maps").read_text(encoding="utf-8"))
    runtimes.sort(key=lambda path: "/torch/" not in path)
    if runtimes:
        ctypes.CDLL(runtimes[0], mode=ctypes.RTLD_GLOBAL)
    try:
        importlib.import_module("numba.np.ufunc.omppool")
    except ImportError:
        numba.config.THREADING_LAYER = "workqueue"
    else:
        numba.config.THREADING_LAYER = "omp"
