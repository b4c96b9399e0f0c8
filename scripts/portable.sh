#!/usr/bin/env bash
# Builds the preloaded library for old C libraries. A library that is linked here requires the C library of this machine, and a program in a
# container with an older one would not start with it. Also builds the programs for virtual machines, which are static.
# `portable.sh debug` builds the library alone, unoptimised, for tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The oldest C library that Rust supports.
readonly GLIBC=2.17
readonly CARGO_ZIGBUILD=0.24.1
readonly ZIG=0.17.0
readonly tools=$TARGET_DIR/tools
readonly arch=$(uname -m)-unknown-linux-gnu
if [ "${1:-}" = debug ]; then readonly profile=(debug dev); else readonly profile=(release release); fi
readonly built=$TARGET_DIR/$arch/${profile[0]}/libpartywall_preload.so

if [ ! -x "$tools/zig/bin/python-zig" ] || [ ! -x "$tools/zig/bin/cargo-zigbuild" ]; then
    echo "portable: installing ziglang $ZIG, whose linker knows old C libraries, and cargo-zigbuild $CARGO_ZIGBUILD into $tools"
    python3 -m venv "$tools/zig"
    "$tools/zig/bin/pip" --quiet install "ziglang==$ZIG" "cargo-zigbuild==$CARGO_ZIGBUILD"
fi
PATH=$tools/zig/bin:$PATH cargo zigbuild --profile "${profile[1]}" --package partywall-preload --lib --target "$arch.$GLIBC"

newest=$(objdump -T "$built" | grep -oE 'GLIBC_[0-9.]+' | sort -V | tail -n 1)
[ "$(printf '%s\n' "GLIBC_$GLIBC" "$newest" | sort -V | tail -n 1)" = "GLIBC_$GLIBC" ] || {
    echo "portable: the library asks for $newest" >&2
    exit 1
}
echo "portable: $built works with glibc $GLIBC and later (it asks for $newest)"

[ "${1:-}" != debug ] || exit 0

readonly static=$(uname -m)-unknown-linux-musl
cargo build --release --target "$static" --package partywall-agent --package partywall-cli --bins
for program in partywall partywall-agent; do
    ! readelf --program-headers --dynamic --wide "$TARGET_DIR/$static/release/$program" | grep -E 'INTERP|NEEDED' || {
        echo "portable: $program is not static" >&2
        exit 1
    }
done
install -m 644 crates/agent/partywall-agent.service "$TARGET_DIR/$static/release"
echo "portable: partywall and partywall-agent in $TARGET_DIR/$static/release are static, for virtual machines of any distribution; the unit is beside them"
