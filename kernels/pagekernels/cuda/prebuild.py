"""`make kernels`: compiles ahead what popular models ask for, so that nvcc is not needed where they run.

    python -m pagekernels.cuda.prebuild [--arch sm_90 ...] [--folder FOLDER] [--jobs N]

What is not in the list compiles on first use, into the cache.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pagekernels.cuda import build
from pagekernels.cuda.attend import MANY_ROWS, attend_shape
from pagekernels.cuda.compress import compress_defines
from pagekernels.cuda.decode_shape import MAX_QUERY_TOKENS, DecodeShape, Tuning, defines
from pagekernels.cuda.move import move_defines
from pagekernels.cuda.sampling import LOGITS
from pagekernels.layout import LAYOUT_SWIZZLED, Format, LayerShape, PagedLayout

Job = tuple[str, dict[str, int | str], str]
"""Source, defines, architecture."""

SHARED_LIMIT = {"sm_80": 166_912, "sm_86": 101_376, "sm_89": 101_376, "sm_90": 232_448, "sm_100": 232_448}
SMALLEST_LIMIT = 101_376
"""Bytes of shared memory that a thread block may have; sm_120 has the smallest too."""

PLAIN = (
    (1, 64),
    (3, 64),
    (4, 64),
    (7, 64),
    (1, 128),
    (2, 128),
    (3, 128),
    (4, 128),
    (5, 128),
    (6, 128),
    (7, 128),
    (8, 128),
)
"""(query heads of a KV head, head dim) of SmolLM2, Llama 2 and 3, Qwen 2.5 and 3, Mistral and their like."""

WITH_FEATURES = ((8, 64), (2, 256), (4, 256))
"""The same where layers have windows, sinks or a soft-cap: GPT-OSS, Gemma 2 and 3."""

BLOCK_SIZE = 16


def jobs_of(arch: str) -> Iterator[Job]:
    """Everything that is built ahead for an architecture."""
    yield "move.cu", {}, arch
    yield "plan.cu", {}, arch
    for number in LOGITS.values():
        yield "sample.cu", {"LOGITS": number}, arch
        yield "sample_cut.cu", {"LOGITS": number}, arch
    for dim in sorted({dim for _, dim in (*PLAIN, *WITH_FEATURES)}):
        for fmt in (Format.F32, Format.F16, Format.BF16):
            yield from generic_jobs(arch, LayerShape(1, dim, dim), fmt)
    for features, shapes in ((False, PLAIN), (True, WITH_FEATURES)):
        for group, dim in shapes:
            for queries in (1, MAX_QUERY_TOKENS):
                kind = DecodeShape(dim, BLOCK_SIZE, group, Format.BF16, queries, mixed=False, features=features)
                yield decode_job(arch, kind)


def generic_jobs(arch: str, shape: LayerShape, fmt: Format) -> Iterator[Job]:
    """Append, gather and compression of a layer, and for float32, which no tuned kernel takes, its attention."""
    layout = PagedLayout(BLOCK_SIZE, (shape,), fmt, LAYOUT_SWIZZLED)
    yield "compress.cu", compress_defines(layout, shape), arch
    for name in ("append", "gather"):
        yield f"{name}.cu", move_defines(name, layout, shape, int(fmt), aligned=True), arch
    if fmt is Format.F32:
        kinds = dict.fromkeys(attend_shape(shape, (fmt, fmt), rows, shared_limit(arch)) for rows in (1, MANY_ROWS))
        yield from (("attend.cu", kind.defines(), arch) for kind in kinds)


def decode_job(arch: str, shape: DecodeShape) -> Job:
    """The tuned decode kernel of a shape."""
    return "decode.cu", defines(shape, Tuning(mixed=shape.mixed), arch, shared_limit(arch)), arch


def shared_limit(arch: str) -> int:
    """Bytes of shared memory that a thread block may have on an architecture."""
    return SHARED_LIMIT.get(arch, SMALLEST_LIMIT)


def build_all(jobs: list[Job], folder: Path, workers: int) -> int:
    """Compile what is not in the folder yet, several at a time; the number of cubins made. Raises build.BuildError."""

    def make(job: Job) -> int:
        source, macros, arch = job
        path = folder / build.file_name(source, macros, arch)
        if path.is_file():
            return 0
        build.keep(build.compile_cubin(source, macros, arch)[0], path)
        return 1

    with ThreadPoolExecutor(workers) as pool:
        return sum(pool.map(make, jobs))


def main() -> int:
    """Build for the given architectures, by default all of build.ARCHITECTURES."""
    parser = argparse.ArgumentParser(description="Compile the CUDA kernels ahead.")
    parser.add_argument("--arch", nargs="+", default=list(build.ARCHITECTURES), help='as in "sm_90"')
    parser.add_argument("--folder", type=Path, default=build.PREBUILT)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at a time")
    given = parser.parse_args()
    jobs = [job for arch in given.arch for job in jobs_of(arch)]
    try:
        made = build_all(jobs, given.folder, given.jobs)
    except build.BuildError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{len(jobs)} cubins in {given.folder}, {made} of them new\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
