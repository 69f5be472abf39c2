#!/bin/sh
# tools/debian_package.sh PACKAGE FOLDER: unpacks a Debian package into FOLDER, without root and without installing it.
set -eu
package=$1 folder=$2
mkdir -p "$folder"
cd "$folder"
if ! command -v apt-get >/dev/null; then
  echo "there is no $package on the PATH, and no apt-get to fetch it with: install $package" >&2
  exit 1
fi
apt-get download -q "$package" >/dev/null 2>&1 || { apt-get update -q >/dev/null 2>&1 && apt-get download -q "$package" >/dev/null; } || {
  echo "$package could not be fetched: install it by other means" >&2
  exit 1
}
dpkg-deb -x "$package"_*.deb .
rm -f "$package"_*.deb
