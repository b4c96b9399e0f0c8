#!/usr/bin/env bash
# Installs what the build needs and this machine lacks: `setup.sh`, or `setup.sh fuzz` for cargo-fuzz as well.
# Does nothing, and says nothing, when nothing is missing. What it may not or cannot install, it names with the command.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Each line: the package, and a command or file that shows it is there.
readonly NEEDS="
gcc              gcc
g++              g++
libc6-dev        /usr/include/stdio.h
make             make
iproute2         ip
ca-certificates  /etc/ssl/certs/ca-certificates.crt
"
readonly CARGO_FUZZ=0.13.2

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

packages() {
    local package sign missing=()
    while read -r package sign; do
        [ -z "$package" ] || present "$sign" || missing+=("$package")
    done <<< "$NEEDS"
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
    "${as[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" > /dev/null
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

packages
rust
[ "${1:-}" != fuzz ] || cargo_fuzz
