#!/bin/sh
# tools/debian_package.sh PACKAGE FOLDER [--with-dependencies]: unpack a Debian package into FOLDER without root, without installing
# it. --with-dependencies unpacks its missing dependencies, too.
set -eu
package=$1 folder=$2 dependencies=${3-}
mkdir -p "$folder"
cd "$folder"
if ! command -v apt-get >/dev/null; then
  echo "neither $package nor apt-get is on the PATH: install $package" >&2
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
  echo "$package cannot be fetched: install it by other means" >&2
  exit 1
}
for archive in *.deb; do dpkg-deb -x "$archive" .; done
rm -rf ./*.deb partial
