#!/bin/sh
# tools/debian_package.sh PACKAGE FOLDER [--with-dependencies]: unpacks a Debian package into FOLDER, without root and without
# installing it; with its dependencies, what it needs that is not installed here, too.
set -eu
package=$1 folder=$2 dependencies=${3-}
mkdir -p "$folder"
cd "$folder"
if ! command -v apt-get >/dev/null; then
  echo "there is no $package on the PATH, and no apt-get to fetch it with: install $package" >&2
  exit 1
fi
fetch() {
  if [ -z "$dependencies" ]; then
    apt-get download -q "$package"
  else
    mkdir -p partial
    apt-get install -q -y --no-install-recommends --download-only -o Acquire::Retries=3 -o Debug::NoLocking=1 \
      -o Dir::Cache::archives="$PWD/" "$package"
  fi >/dev/null 2>&1
}
fetch || { apt-get update -q >/dev/null 2>&1 && fetch; } || {
  echo "$package could not be fetched: install it by other means" >&2
  exit 1
}
for archive in *.deb; do dpkg-deb -x "$archive" .; done
rm -rf ./*.deb partial
