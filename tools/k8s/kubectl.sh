#!/bin/sh
# tools/k8s/kubectl.sh FOLDER: put kubectl, which renders k8s/ with Kustomize, into FOLDER, unless 1.27 or newer is on the PATH.
# Debian 12's Kustomize lacks components, so it is fetched from Kubernetes' server. (The package of helm.sh has one for x86_64, too.)
set -eu
folder=$1 version=v1.32.4
if command -v kubectl >/dev/null && kubectl version --client 2>/dev/null | grep -q '^Kustomize Version: v5'; then
  exit 0
fi
case $(uname -m) in
  x86_64) architecture=amd64 ;;
  aarch64 | arm64) architecture=arm64 ;;
  *) echo "install kubectl 1.27 or newer" >&2; exit 1 ;;
esac
url=https://dl.k8s.io/release/$version/bin/linux/$architecture/kubectl
mkdir -p "$folder"
cd "$folder"
curl -fsSL --max-time 300 -o kubectl "$url" && curl -fsSL --max-time 30 -o kubectl.sha256 "$url.sha256" || {
  echo "kubectl 1.27 or newer is not on the PATH, and $url cannot be fetched" >&2
  rm -f kubectl kubectl.sha256
  exit 1
}
echo "$(cat kubectl.sha256)  kubectl" | sha256sum --check --quiet || { rm -f kubectl; exit 1; }
chmod +x kubectl
