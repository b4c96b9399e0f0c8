#!/usr/bin/env bash
# Soaks for SOAK_SECONDS (60): random sizes, pauses and kills, with everything received checked against what was sent.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PARTYWALL_SOAK_SECONDS=${SOAK_SECONDS:-60}

echo "soak: $PARTYWALL_SOAK_SECONDS s"
cargo build --release --workspace --exclude xtask --bins
cargo test --release -p partywall --test soak -- --ignored --nocapture
# Sockets: twenty times the switches, deaths and connections of the tests.
PARTYWALL_ENDURANCE=${ENDURANCE:-20} cargo test --release -p partywall-preload --test endurance -- --nocapture
PARTYWALL_FUZZ_SEEDS=${FUZZ_SEEDS:-1000} cargo test --release -p partywall-preload --test differential -- --nocapture
