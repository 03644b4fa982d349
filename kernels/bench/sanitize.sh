#!/bin/sh
# Every CUDA kernel on the shapes of tests/gpu/sanitize.py under compute-sanitizer: memcheck, then initcheck.
# Some virtualised GPUs refuse the tool; a refused run is not a pass.
set -eu
cd "$(dirname "$0")/../.."
command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is not on the PATH; it comes with the CUDA toolkit"; exit 1; }
export PYTHONPATH="$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}"
for tool in memcheck initcheck; do
  echo "== $tool"
  compute-sanitizer --tool "$tool" --error-exitcode 1 "${PYTHON:-python3}" -m tests.gpu.sanitize
done
