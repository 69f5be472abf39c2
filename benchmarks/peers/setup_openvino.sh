#!/bin/sh
# Installs OpenVINO, which benchmarks/mesh/throughput.py compares the forward pass with, into .cache/openvino-venv (about 200 MB),
# and converts all-MiniLM-L6-v2 for it. That environment also sees the packages of the project's own, for torch and transformers,
# which converting needs: neither environment changes the other.
set -eu
cd "$(dirname "$0")/../.."
project="${VENV:-.venv}/bin/python"
environment=.cache/openvino-venv
[ -x "$environment/bin/python" ] || "$project" -m venv "$environment"
site=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$project" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$site/project.pth"
# Without dependencies: numpy is the project's, and openvino-telemetry, which sends usage data, is left out.
"$environment/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps -r benchmarks/peers/requirements-openvino.txt
HF_HUB_OFFLINE=1 HF_HUB_DISABLE_PROGRESS_BARS=1 "$environment/bin/python" -W ignore -m benchmarks.peers.openvino_model "$environment/minilm.xml"
echo "OpenVINO is ready: benchmarks/mesh/throughput.py measures it from now on"
