#!/usr/bin/env bash
# Builds the preloaded library for old C libraries. A library that is linked here requires the C library of this machine, and a program in a
# container with an older one would not start with it. Also builds the programs for virtual machines, which are static.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The oldest C library that Rust supports.
readonly GLIBC=2.17
readonly CARGO_ZIGBUILD=0.24.1
readonly ZIG=0.17.0
readonly tools=$TARGET_DIR/tools
readonly arch=$(uname -m)-unknown-linux-gnu
readonly built=$TARGET_DIR/$arch/release/libpartywall_preload.so

if [ ! -x "$tools/zig/bin/python-zig" ]; then
    echo "portable: installing ziglang $ZIG, whose linker knows old C libraries, into $tools"
    python3 -m venv "$tools/zig"
    "$tools/zig/bin/pip" --quiet install "ziglang==$ZIG"
fi
if [ ! -x "$tools/bin/cargo-zigbuild" ]; then
    echo "portable: installing cargo-zigbuild $CARGO_ZIGBUILD into $tools"
    cargo install --quiet --locked --root "$tools" --version "$CARGO_ZIGBUILD" cargo-zigbuild
fi
PATH=$tools/bin:$tools/zig/bin:$PATH cargo zigbuild --release --package partywall-preload --lib --target "$arch.$GLIBC"

newest=$(objdump -T "$built" | grep -oE 'GLIBC_[0-9.]+' | sort -V | tail -n 1)
[ "$(printf '%s\n' "GLIBC_$GLIBC" "$newest" | sort -V | tail -n 1)" = "GLIBC_$GLIBC" ] || {
    echo "portable: the library asks for $newest" >&2
    exit 1
}
echo "portable: $built works with glibc $GLIBC and later (it asks for $newest)"

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
