#!/usr/bin/env bash
# Tests the packages as a system's administrator uses them: installed, used by services and containers, upgraded while programs run, and purged.
#
# It packages the programs of target/debug, which must be built. The tests run on this machine's system, with an overlay in memory and in separate namespaces. So
# they leave no file behind and use no port of the host. The tests are in scripts/packages/inside.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
: "${TARGET_DIR:=$(realpath -m "${CARGO_TARGET_DIR:-target}")}"

skip() {
    echo "skipped: $*"
    echo "test result: ok. 0 passed; 0 failed; 1 ignored"
    exit 0
}
command -v dh > /dev/null && command -v dpkg-buildpackage > /dev/null || skip "packages cannot be made here; install debhelper"
[ "$(id -u)" -eq 0 ] || skip "only root can mount an overlay and install packages in it"
unshare --mount sh -c 'mount -t tmpfs none /mnt && mkdir /mnt/upper /mnt/work /mnt/merged && mount -t overlay none \
    -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work /mnt/merged' 2> /dev/null || skip "this kernel mounts no overlay over the system's files"

work=$(mktemp -d "${TMPDIR:-/tmp}/partywall-packages-XXXXXX")
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/target/release" "$work/new"
for file in partywall partywalld partywall-agent partywall-net partywall-blk partywall-fs libpartywall_preload.so libpartywall_capi.so; do
    ln -s "$TARGET_DIR/debug/$file" "$work/target/release/$file"
done
# The static library is large, and only carried along: another does.
echo 'int nothing(void) { return 0; }' | cc -xc -c -o "$work/nothing.o" -
ar rc "$work/target/release/libpartywall_capi.a" "$work/nothing.o"
TARGET_DIR=$work/target DEB_DIR=$work/old DEB_BUILD_OPTIONS=noautodbgsym DEB_BUILDDEB_OPTIONS="-Zgzip -z1" scripts/deb.sh
if command -v lintian > /dev/null; then
    lintian --allow-root --fail-on error "$work"/old/*.changes
    echo "test packages_have_no_errors_by_lintian ... ok"
else
    echo "skipped: lintian is not installed, so nobody has checked the packages"
fi

# The next release: the same files, another number.
for package in partywall partywalld libpartywall-preload; do
    dpkg-deb --raw-extract "$work/old/${package}"_*.deb "$work/next"
    sed -i -E 's/^(Version: .*|Depends: .*\(= [0-9.]+)$/&/; s/^Version: (.*)/Version: \1+next/; s/libpartywall-preload \(= ([^)]*)\)/libpartywall-preload (= \1+next)/' "$work/next/DEBIAN/control"
    dpkg-deb -Znone --build "$work/next" "$work/new/$package.deb" > /dev/null
    rm -r "$work/next"
done
# Ends with everything that was started in it.
unshare --mount --pid --net --ipc --fork --kill-child scripts/packages/system.sh "$work"
