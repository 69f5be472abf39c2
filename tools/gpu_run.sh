#!/usr/bin/env bash
# tools/gpu_run.sh [STEP...] [OPTIONS]: run steps of benchmarks/gpu, default all, on a bare GPU machine without a network.
# It unpacks .gpu/bundle (tools/gpu_bundle.py) into $SHOAL_GPU_SITE if it has changed, and writes results to $OUT, default .gpu/out.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
site=${SHOAL_GPU_SITE:-/tmp/shoal-gpu}
bundle=.gpu/bundle

if [ ! -f "$bundle/bundle.json" ]; then
  echo "$bundle is missing: run 'make gpu' on a machine with a network, and copy .gpu/bundle with the tree" >&2
  exit 2
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))'; then
  echo "$("$python" -V) at $python: the bundle's wheels are for CPython 3.12; name one with PYTHON=" >&2
  exit 2
fi
if ! cmp -s "$bundle/bundle.json" "$site/bundle.json"; then
  echo "unpacking $bundle into $site" >&2
  rm -rf "$site"
  mkdir -p "$site/bin"
  "$python" -m pip --disable-pip-version-check install --quiet --no-index --no-deps --no-compile --no-cache-dir \
    --root-user-action ignore --target "$site/site" "$bundle"/wheels/*.whl
  "$python" - "$bundle" "$site" <<'UNPACK'
import lzma, pathlib, sys, tarfile
bundle, site = map(pathlib.Path, sys.argv[1:])
server = site / "bin/redis-server"
server.write_bytes(lzma.decompress((bundle / "redis-server.xz").read_bytes()))
server.chmod(0o755)
with tarfile.open(bundle / "model.tar.xz") as archive:
    archive.extractall(site / "site", filter="data")
UNPACK
  "$site/bin/redis-server" --version >&2
  cp "$bundle/bundle.json" "$site/bundle.json"
fi

export PATH="$site/bin:$PATH"
export PYTHONPATH="$site/site:$PWD:$PWD/libs/api${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_HUB_DISABLE_PROGRESS_BARS=1 TOKENIZERS_PARALLELISM=true
exec "$python" -m benchmarks.gpu --out "${OUT:-.gpu/out}" "$@"
