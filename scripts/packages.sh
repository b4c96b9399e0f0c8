#!/usr/bin/env bash
# Tests the packages as a system's administrator uses them: installed, used by services and containers, upgraded while programs run, and purged.
#
# It packages the programs of target/debug, which must be built. The tests run in a minimal Debian system that systemd boots in a container without network, with an
# overlay in memory. So they leave no file behind and use no port of the host. Where such a system cannot be made or booted, they run on a copy of this machine's
# system without systemd, and the output says so. The tests are in scripts/packages/inside.sh.
#
# PACKAGES_SYSTEM=host runs them on the copy in any case.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
: "${TARGET_DIR:=$(realpath -m "${CARGO_TARGET_DIR:-target}")}"
export TARGET_DIR

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
# systemd leaves the control groups of a container behind. Here they are below these.
cgroups=()
clean_up() {
    # Of a run that ends early.
    wait
    rm -rf "$work"
    for cgroup in "${cgroups[@]}"; do
        # The processes of the container have been killed, and may not have ended.
        for _ in $(seq 100); do
            find "$cgroup" -depth -type d -exec rmdir {} + 2> /dev/null || true
            [ -e "$cgroup" ] || break
            sleep 0.1
        done
    done
}
trap clean_up EXIT
mkdir -p "$work/target/release" "$work/new"
for file in partywall partywalld partywall-agent partywall-net partywall-blk partywall-fs partywall-gateway libpartywall_preload.so libpartywall_capi.so; do
    ln -s "$TARGET_DIR/debug/$file" "$work/target/release/$file"
done
# The static library is large, and only carried along: another does.
echo 'int nothing(void) { return 0; }' | cc -xc -c -o "$work/nothing.o" -
ar rc "$work/target/release/libpartywall_capi.a" "$work/nothing.o"
# The systems are made meanwhile, the first time: the one in which an administrator meets the packages, of this machine's release, for the programs were linked
# here; and one of an older release, for containers.
make_base() {
    if ! command -v systemd-nspawn > /dev/null || [ "$(. /etc/os-release && echo "$ID")" != debian ]; then
        echo "this takes Debian, with systemd-container" >&2
        return 1
    fi
    scripts/packages/root.sh "$(. /etc/os-release && echo "$VERSION_CODENAME")" systemd-sysv python3 iproute2 nftables nginx-light podman crun
}
if [ "${PACKAGES_SYSTEM:-}" != host ]; then
    make_base > "$work/base" 2> "$work/base.said" &
    making_base=$!
fi
scripts/packages/root.sh bullseye python3-minimal libpython3-stdlib > "$work/older" 2> "$work/older.said" &
making_older=$!

# As `make portable` builds it, so that containers may have older C libraries.
if scripts/portable.sh debug > "$work/portable" 2>&1; then
    PRELOAD=$TARGET_DIR/$(uname -m)-unknown-linux-gnu/debug/libpartywall_preload.so
    export PRELOAD
else
    echo "NOT TESTED: the library for old C libraries, which cannot be built here: $(tail -n 1 "$work/portable")"
fi
TARGET_DIR=$work/target DEB_DIR=$work/old DEB_BUILD_OPTIONS=noautodbgsym DEB_BUILDDEB_OPTIONS="-Zgzip -z1" scripts/deb.sh
if command -v lintian > /dev/null; then
    lintian --allow-root --fail-on error "$work"/old/*.changes
    echo "test packages_have_no_errors_by_lintian ... ok"
else
    echo "skipped: lintian is not installed, so nobody has checked the packages"
fi
# What `make deb` makes the SBOM of.
known=$(DEB_DIR=$work/old scripts/deb.sh crates | cut -d' ' -f1)
for package in "$work"/old/*.deb; do
    for program in $(dpkg-deb --fsys-tarfile "$package" | tar t | sed -nE 's|^\./usr/s?bin/(.+)|\1|p'); do
        grep -qxF "$program" <<< "$known" || { echo "the SBOM of \`make deb\` lacks $program of $(basename "$package")" >&2; exit 1; }
    done
done
echo "test every_packaged_program_has_a_crate_in_the_sbom ... ok"
echo "test result: ok. 1 passed; 0 failed; 0 ignored"

# A program of a container with musl, if this machine has a compiler for it.
if command -v musl-gcc > /dev/null; then
    mkdir "$work/musl"
    printf '#include <unistd.h>\nint main(void) { return write(1, "the program runs\\n", 17) != 17; }\n' > "$work/program.c"
    musl-gcc -o "$work/musl/program" "$work/program.c"
    cp "$(realpath /lib/ld-musl-x86_64.so.1)" "$work/musl/ld-musl-x86_64.so.1"
fi

# The next release: the same files, another number.
for package in partywall partywalld libpartywall-preload; do
    dpkg-deb --raw-extract "$work/old/${package}"_*.deb "$work/next"
    sed -i -E 's/^(Version: .*|Depends: .*\(= [0-9.]+)$/&/; s/^Version: (.*)/Version: \1+next/; s/libpartywall-preload \(= ([^)]*)\)/libpartywall-preload (= \1+next)/' "$work/next/DEBIAN/control"
    dpkg-deb -Znone --build "$work/next" "$work/new/$package.deb" > /dev/null
    rm -r "$work/next"
done

base=/
if [ "${PACKAGES_SYSTEM:-}" = host ]; then
    echo "packages: on a copy of this machine's system, without systemd, as PACKAGES_SYSTEM says"
elif ! wait "$making_base"; then
    echo "NOT TESTED: packages on a minimal system under systemd: $(cat "$work/base.said"); they are tested on a copy of this system instead"
else
    base=$(cat "$work/base")
fi
old=
if wait "$making_older"; then
    [ -z "${PRELOAD:-}" ] || old=$(cat "$work/older")
else
    echo "NOT TESTED: containers with an old C library: $(cat "$work/older.said")"
fi
# Of the hierarchies of control groups that systemd uses.
while IFS=: read -r _ controllers path; do
    case $controllers in
        "") [ -e /sys/fs/cgroup/cgroup.procs ] && place=/sys/fs/cgroup || place=/sys/fs/cgroup/unified ;;
        name=systemd) place=/sys/fs/cgroup/systemd ;;
        *) continue ;;
    esac
    place=$place${path%/}/$(basename "$work")
    ! mkdir "$place" 2> /dev/null || cgroups+=("$place")
done < /proc/self/cgroup
run() {
    # Ends with everything that was started in it.
    (
        for cgroup in "${cgroups[@]}"; do echo "$BASHPID" > "$cgroup/cgroup.procs"; done
        exec unshare --mount --mount-proc --pid --net --ipc --fork --kill-child scripts/packages/system.sh "$work" "$1" "$old"
    )
}
rc=0
run "$base" || rc=$?
if [ "$base" != / ] && [ "$rc" -eq 66 ]; then
    echo "NOT TESTED: packages on a minimal system under systemd, which does not boot here; they are tested on a copy of this system instead"
    rc=0
    run / || rc=$?
fi
exit "$rc"
