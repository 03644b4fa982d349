"""The CUDA kernels compile, without a GPU, and the tuned ones keep their values in registers."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator

import pytest

from pagekernels.cuda import build
from pagekernels.cuda.attend import FEW_ROWS, MANY_ROWS, AttendShape, attend_shape
from pagekernels.cuda.compress import compress_defines
from pagekernels.cuda.decode_shape import MAX_QUERY_TOKENS, DecodeShape, Tuning, defines
from pagekernels.cuda.move import move_defines
from pagekernels.cuda.prebuild import LOGITS, SHARED_LIMIT, Job, jobs_of, shared_limit
from pagekernels.layout import LAYOUT_SWIZZLED, Format, LayerShape, PagedLayout

ARCHITECTURES = ("sm_90", *(pytest.param(each, marks=pytest.mark.full) for each in ("sm_80", "sm_100", "sm_120")))
NATIVE = LayerShape(4, 128, 128)
ODD = LayerShape(3, 20, 7)

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="nvcc needs g++, which is not installed")


def decode_jobs(arch: str) -> Iterator[Job]:
    """The tuned decode kernel where it needs most registers, and where most models are."""
    for dim, group, queries, native, mixed, features in (
        (128, 4, 1, Format.BF16, False, False),
        (128, 7, MAX_QUERY_TOKENS, Format.BF16, False, False),
        (128, 1, 1, Format.BF16, True, False),
        (128, 4, 1, Format.F16, True, False),
        (128, 4, 1, Format.BF16, True, True),
        (128, 8, 1, Format.BF16, True, False),
        (128, 8, 1, Format.BF16, True, True),
        (256, 16, MAX_QUERY_TOKENS, Format.BF16, True, True),
    ):
        shape = DecodeShape(dim, 16, group, native, queries, mixed=mixed, features=features)
        yield "decode.cu", defines(shape, Tuning(mixed=mixed), arch, shared_limit(arch)), arch


def other_jobs(arch: str) -> Iterator[Job]:
    """Each other kernel on a usual shape and on an odd one."""
    yield "move.cu", {}, arch
    yield "plan.cu", {}, arch
    yield "sample.cu", {"LOGITS": LOGITS["bfloat16"]}, arch
    yield "sample_cut.cu", {"LOGITS": LOGITS["float32"]}, arch
    for shape, fmt, element, aligned in (
        (NATIVE, Format.BF16, Format.BF16, True),
        (ODD, Format.F16, Format.F32, False),
    ):
        layout = PagedLayout(16, (shape,), fmt, LAYOUT_SWIZZLED)
        yield "compress.cu", compress_defines(layout, shape), arch
        for name in ("append", "gather"):
            yield f"{name}.cu", move_defines(name, layout, shape, int(element), aligned=aligned), arch
    yield "attend.cu", attend_shape(NATIVE, (Format.F32, Format.F32), MANY_ROWS, shared_limit(arch)).defines(), arch
    yield "attend.cu", attend_shape(ODD, (Format.BF16, Format.F32), FEW_ROWS, shared_limit(arch)).defines(), arch


def kernels(log: str) -> dict[str, int]:
    """Bytes that each kernel spills, of what `ptxas -v` says."""
    pattern = r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
    return {name: int(stores) + int(loads) for name, stores, loads in re.findall(pattern, log, re.DOTALL)}


@needs_compiler
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_tuned_decode_kernel_compiles_and_spills_no_register(arch: str) -> None:
    for source, macros, _ in decode_jobs(arch):
        cubin, log = build.compile_cubin(source, macros, arch)
        assert cubin.startswith(b"\x7fELF")
        assert kernels(log) == {"decode": 0}, f"{macros}\n{log}"


@needs_compiler
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_other_kernel_compiles(arch: str) -> None:
    sources = set()
    for source, macros, _ in other_jobs(arch):
        cubin, log = build.compile_cubin(source, macros, arch)
        assert cubin.startswith(b"\x7fELF")
        assert kernels(log)
        sources.add(source)
    assert sources | {"decode.cu"} == {path.name for path in build.SOURCES.glob("*.cu")}


@needs_compiler
def test_what_nvcc_refuses_is_told_with_its_words_and_the_macros() -> None:
    with pytest.raises(
        build.BuildError, match=r"did not compile append.cu for sm_90 with \{'FORMAT': 9\}:(.|\n)*K_DIM"
    ):
        build.compile_cubin("append.cu", {"FORMAT": 9}, "sm_90")


@needs_compiler
def test_a_cubin_is_compiled_once_and_prebuilt_ones_come_first(tmp_path, monkeypatch) -> None:
    compiled = []
    compile_cubin = build.compile_cubin
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setattr(build, "compile_cubin", lambda *job: compiled.append(job) or compile_cubin(*job))
    first = build.cubin("move.cu", {}, "sm_90", tmp_path / "cache")
    assert build.cubin("move.cu", {}, "sm_90", tmp_path / "cache") == first
    assert len(compiled) == 1
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".cubin"]
    build.keep(b"prebuilt", tmp_path / "prebuilt" / build.file_name("move.cu", {}, "sm_90"))
    assert build.cubin("move.cu", {}, "sm_90", tmp_path / "cache") == b"prebuilt"
    assert len(compiled) == 1


def test_a_cubins_name_changes_with_whatever_decides_its_bytes(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    (tmp_path / "a.cu").write_text('#include "b.cuh"\n')
    (tmp_path / "b.cuh").write_text('#include "c.cuh"\n')
    (tmp_path / "c.cuh").write_text("int x;\n")
    names = [
        build.file_name("a.cu", {}, "sm_90"),
        build.file_name("a.cu", {"N": 1}, "sm_90"),
        build.file_name("a.cu", {"N": 2}, "sm_90"),
        build.file_name("a.cu", {}, "sm_80"),
        build.file_name("a.cu", {}, "sm_90", "another compiler"),
    ]
    (tmp_path / "c.cuh").write_text("int y;\n")
    names.append(build.file_name("a.cu", {}, "sm_90"))
    (tmp_path / "a.cu").write_text('// nvcc: --use_fast_math\n#include "b.cuh"\n')
    names.append(build.file_name("a.cu", {}, "sm_90"))
    assert len(set(names)) == len(names)
    assert build.file_name("a.cu", {}, "sm_90") == names[-1]


def test_without_nvcc_the_error_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setattr(build, "_nvcc_folders", lambda: iter(()))
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    build.nvcc.cache_clear()
    with pytest.raises(build.BuildError, match=r"pip install 'nvidia-cuda-nvcc==13.0.\*'"):
        build.nvcc()
    build.nvcc.cache_clear()


@pytest.mark.parametrize("arch", build.ARCHITECTURES)
def test_what_is_prebuilt_fits_into_the_shared_memory_of_its_architecture(arch: str) -> None:
    jobs = list(jobs_of(arch))
    assert len({build.file_name(*job) for job in jobs}) == len(jobs)
    assert all(int(macros.get("SHARED_BYTES", 0)) <= shared_limit(arch) for _, macros, _ in jobs)


@pytest.mark.parametrize("dims", [(512, 512), (256, 256), (128, 128), (1, 1), (192, 128)], ids=str)
def test_generic_attention_fits_into_the_smallest_shared_memory(dims) -> None:
    shape = attend_shape(LayerShape(1, *dims), (Format.F32, Format.F32), MANY_ROWS, min(SHARED_LIMIT.values()))
    assert shape.shared_bytes <= min(SHARED_LIMIT.values())
    assert attend_shape(LayerShape(1, *dims), (Format.F32, Format.F32), 7, 1 << 20).rows == FEW_ROWS
    assert AttendShape(Format.F32, Format.F32, (128, 128), MANY_ROWS).tokens == 32
