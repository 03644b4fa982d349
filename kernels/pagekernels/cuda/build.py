"""From a .cu file of this folder to a cubin: prebuilt, from the cache, or by nvcc. Needs no GPU.

A cubin is named by a digest of everything that decides its bytes, so a stale one is never found. `make kernels` fills
PREBUILT, which needs no nvcc where it is used; what is not there is compiled once and kept in a cache folder.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parent
PREBUILT = SOURCES / "prebuilt"
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
"""What `make kernels` builds for. Others compile on first use."""

FLAGS = ("-O3", "-std=c++17", "-lineinfo", "-Xptxas=-v", "-diag-suppress=177")
ARCH_SPECIFIC = {"sm_90": "90a", "sm_100": "100a"}
"""Architectures whose own instructions (wgmma and its like) want the suffix."""

_INCLUDE = re.compile(r'^\s*#include\s+"([\w./]+)"', re.MULTILINE)
_OWN_FLAGS = re.compile(r"^// nvcc: (.+)$", re.MULTILINE)

Defines = Mapping[str, int | str]


class BuildError(RuntimeError):
    """nvcc is missing, or did not take a source. The message says what to do, or what nvcc said."""


@cache
def nvcc() -> Path:
    """The compiler: of this interpreter's nvidia-cuda-nvcc wheel, of $CUDA_HOME, or on the PATH.

    Raises BuildError, naming what to install, where there is none.
    """
    for folder in _nvcc_folders():
        if (folder / "nvcc").is_file():
            return folder / "nvcc"
    found = shutil.which("nvcc")
    if found is None:
        raise BuildError(
            "nvcc is neither beside this Python's packages, nor in $CUDA_HOME/bin, nor on the PATH, but a kernel must "
            "be compiled: pip install 'nvidia-cuda-nvcc==13.0.*' 'nvidia-cuda-crt==13.0.*' 'nvidia-nvvm==13.0.*' "
            "nvidia-cuda-runtime nvidia-cuda-cccl, or ship cubins made by `make kernels`"
        )
    return Path(found)


def _nvcc_folders() -> Iterator[Path]:
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        yield from sorted(Path(root).glob("cu*/bin"), reverse=True)
    if home := os.environ.get("CUDA_HOME"):
        yield Path(home) / "bin"


@cache
def nvcc_version() -> str:
    """The last line that `nvcc --version` prints, which names the build. Raises BuildError as nvcc()."""
    done = _run([nvcc(), "--version"])
    if done.returncode:
        raise BuildError(f"{nvcc()} --version failed: {done.stderr.strip()}")
    return done.stdout.strip().splitlines()[-1]


def default_cache() -> Path:
    """Where cubins are kept if nobody says otherwise: pagepool/kernels in $XDG_CACHE_HOME, else in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pagepool" / "kernels"


def cubin(source: str, defines: Defines, arch: str, cache_dir: Path | None = None) -> bytes:
    """The cubin of SOURCES/`source` with `defines` as -D flags, for `arch` ("sm_90").

    Looks in PREBUILT, then in `cache_dir` (default: default_cache()), then compiles and keeps it there; the cache may
    be shared by processes that compile the same at once. Raises BuildError.
    """
    prebuilt = PREBUILT / file_name(source, defines, arch)
    if prebuilt.is_file():
        return prebuilt.read_bytes()
    kept = (cache_dir or default_cache()) / file_name(source, defines, arch, nvcc_version())
    if kept.is_file():
        return kept.read_bytes()
    built, _ = compile_cubin(source, defines, arch)
    keep(built, kept)
    return built


def file_name(source: str, defines: Defines, arch: str, compiler: str = "") -> str:
    """What a cubin is called: changes with the source, what it includes, the defines, the flags and the compiler."""
    digest = hashlib.sha256()
    for part in _texts(source, set()):
        digest.update(part.encode() + b"\0")
    for word in (*_command(source, defines, arch), compiler):
        digest.update(word.encode() + b"\0")
    return f"{Path(source).stem}-{arch}-{digest.hexdigest()[:32]}.cubin"


def compile_cubin(source: str, defines: Defines, arch: str) -> tuple[bytes, str]:
    """(cubin, what ptxas -v said of registers and spills). Raises BuildError with what nvcc said."""
    with tempfile.TemporaryDirectory(prefix="pagekernels-") as folder:
        target = Path(folder) / "kernel.cubin"
        command = [str(nvcc()), *_command(source, defines, arch), f"-I{SOURCES}", "-o", str(target)]
        done = _run([*command, SOURCES / source])
        if done.returncode:
            said = (done.stderr or done.stdout).strip()
            raise BuildError(f"nvcc did not compile {source} for {arch} with {dict(defines)}:\n{said}")
        return target.read_bytes(), done.stderr + done.stdout


def keep(built: bytes, path: Path) -> None:
    """Write a cubin so that nobody ever reads half of it: under another name first, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        file.write(built)
    Path(file.name).chmod(0o644)
    Path(file.name).replace(path)


def _run(command: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  # nvcc and flags of ours


def _command(source: str, defines: Defines, arch: str) -> list[str]:
    """The flags that decide the result; a source asks for more by a line `// nvcc: FLAGS`."""
    number = ARCH_SPECIFIC.get(arch, arch.removeprefix("sm_"))
    target = f"-gencode=arch=compute_{number},code=sm_{number}"
    own = _OWN_FLAGS.findall((SOURCES / source).read_text())
    names = [f"-D{name}={value}" for name, value in sorted(defines.items())]
    return ["-cubin", target, *FLAGS, *(flag for line in own for flag in line.split()), *names]


def _texts(name: str, seen: set[str]) -> Iterator[str]:
    """The text of a source and of what it includes from this folder, each once."""
    if name in seen or not (SOURCES / name).is_file():
        return
    seen.add(name)
    text = (SOURCES / name).read_text()
    yield text
    for included in _INCLUDE.findall(text):
        yield from _texts(included, seen)
