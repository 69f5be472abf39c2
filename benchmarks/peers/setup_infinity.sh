#!/bin/sh
# Installs Infinity, the server that benchmarks/mesh/throughput.py compares with, into .cache/infinity-venv (about 1.5 GB).
set -eu
cd "$(dirname "$0")/../.."
environment=.cache/infinity-venv
[ -x "$environment/bin/python" ] || "${PYTHON:-python3}" -m venv "$environment"
"$environment/bin/python" -m pip --disable-pip-version-check install --quiet -r benchmarks/peers/requirements-infinity.txt
DO_NOT_TRACK=1 HF_HUB_OFFLINE=1 "$environment/bin/infinity_emb" v2 --help >/dev/null
echo "Infinity is ready: benchmarks/mesh/throughput.py measures it from now on"
