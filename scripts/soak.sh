#!/usr/bin/env bash
# Soak tests of SOAK_SECONDS (60) each: random sizes, pauses and kills, where all received bytes are compared with the sent ones; peers that store
# false values in every word of their memory, also under AddressSanitizer; Node and Java, compared with the same over TCP; sockets.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
: "${TARGET_DIR:=$(realpath -m "${CARGO_TARGET_DIR:-target}")}"
export PARTYWALL_SOAK_SECONDS=${SOAK_SECONDS:-60}

echo "soak: $PARTYWALL_SOAK_SECONDS s"
cargo build --release --workspace --exclude xtask --bins
cargo test --release -p partywall --test soak -- --ignored --nocapture
PARTYWALL_LIAR_SECONDS=$PARTYWALL_SOAK_SECONDS cargo test --release -p partywall --test liar lies -- --nocapture
# The sanitizer is an unstable option. RUSTC_BOOTSTRAP lets the toolchain in use offer it, as for fuzzing; its runtime may be missing.
# Not optimised, so that overflow checks and assertions are on as well.
host=$(rustc -vV | sed -n 's/^host: //p')
if compgen -G "$(rustc --print target-libdir)/librustc*asan*" > /dev/null; then
    PARTYWALL_LIAR_SECONDS=$PARTYWALL_SOAK_SECONDS RUSTC_BOOTSTRAP=1 RUSTFLAGS="${RUSTFLAGS:-} -Zsanitizer=address" \
        cargo test -p partywall --test liar --target "$host" --target-dir "$TARGET_DIR/asan" lies -- --nocapture
else
    echo "SKIPPED: the liar under AddressSanitizer: this toolchain has no runtime of it for $host; with rustup, \`rustup toolchain install nightly\` and RUSTUP_TOOLCHAIN=nightly have one" >&2
fi
# Node 22 and 24 and Java's asynchronous channels, all answers checked, while the move rules change.
cargo test --release -p partywall-preload --test runtimes runtimes_that_run -- --ignored --nocapture
# Sockets: twenty times the switches, deaths and connections of the tests.
PARTYWALL_ENDURANCE=${ENDURANCE:-20} cargo test --release -p partywall-preload --test endurance -- --nocapture
PARTYWALL_FUZZ_SEEDS=${FUZZ_SEEDS:-1000} cargo test --release -p partywall-preload --test differential -- --nocapture
# All cases of a peer's death; the tests run every seventh.
PARTYWALL_DEATHS_STRIDE=1 cargo test --release -p partywall-preload --test deaths -- --nocapture
# A child that scribbles over what it shares with its parent. Needs root.
PARTYWALL_SCRIBBLE_ROUNDS=${SCRIBBLE_ROUNDS:-30} cargo test --release -p partywall-preload --test own child_of_another_user -- --nocapture
