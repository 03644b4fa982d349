#!/bin/sh
# Generates the stubs anew beside the committed ones and fails where they differ.
set -eu
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
python -m grpc_tools.protoc -I proto --python_out="$fresh" --pyi_out="$fresh" --grpc_python_out="$fresh" \
  $(cd proto && find pagepool -name '*.proto')
stale=0
for stub in $(cd "$fresh" && find . -type f); do
  cmp -s "$fresh/$stub" "proto/$stub" || { echo "stale: proto/${stub#./}; run make proto"; stale=1; }
done
for stub in $(cd proto && find . -name '*_pb2*.py*' -not -path '*/__pycache__/*'); do
  [ -e "$fresh/$stub" ] || { echo "orphan: proto/${stub#./}; its .proto is gone"; stale=1; }
done
exit $stale
