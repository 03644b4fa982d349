"""The peer: vLLM's CPU build in a process of its own, on the same folder of weights, dtype and threads.

Speaks as hf_peer.py does, one JSON object a line: {"prompts": [[token ids], ...], "new_tokens": n} is answered by
{"seconds": s, "tokens": generated in all}. {"memory": true} is answered by {"kv": [[pid, [[address, bytes], ...]],
...]}, where the KV cache lies; who asks can look how much of it is in memory. Threads are bound to the first cores that
this process may use, and Intel's OpenMP, which the package depends on and asks for, is preloaded if it is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def kv_ranges(worker: Any) -> tuple[int, list[tuple[int, int]]]:
    """Within a worker of vLLM: its process, and the address and bytes of each storage of its KV cache."""
    import os

    storages = [cache.untyped_storage() for cache in worker.model_runner.kv_caches]
    return os.getpid(), sorted({(storage.data_ptr(), storage.nbytes()) for storage in storages})


def surroundings(threads: int) -> None:
    """What vLLM reads from its environment; the processes that it starts inherit it."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # for kv_ranges, which is sent to the worker
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # stdout is for the answers
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    if openmp.exists() and "LD_PRELOAD" not in os.environ:
        os.environ["LD_PRELOAD"] = str(openmp)


def measure(llm: Any, prompts: list[list[int]], new_tokens: int) -> dict[str, float]:
    """Time one call, greedy, exactly `new_tokens` for each prompt, all of them there at once."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    begin = time.perf_counter()
    found = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "tokens": sum(len(each.outputs[0].token_ids) for each in found)}


def main() -> None:
    """Serve measurements until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kv-bytes", type=int, default=2 << 30)
    options = parser.parse_args()
    surroundings(options.threads)
    begin = time.perf_counter()
    import vllm

    llm = vllm.LLM(model=options.folder, dtype=options.dtype, kv_cache_memory_bytes=options.kv_bytes)
    print(json.dumps({"vllm": vllm.__version__, "start_s": time.perf_counter() - begin}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        if "memory" in job:
            answer: dict[str, Any] = {"kv": llm.collective_rpc(kv_ranges)}
        else:
            answer = measure(llm, job["prompts"], job["new_tokens"])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
