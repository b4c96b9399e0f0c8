#!/usr/bin/env bash
# CPython's own tests of everything that has sockets, without the library and with it, to the last one: what ends differently is
# listed. PARTYWALL_COMPAT=test_ssl runs one module.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

echo "compat: CPython's tests, without and with the library"
cargo test --release -p partywall-preload --test cpython -- --ignored --nocapture
