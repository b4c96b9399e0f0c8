#!/usr/bin/env bash
# Runs all of CPython's own tests that use sockets, without the library and with it, and lists the tests whose outcomes differ.
# PARTYWALL_COMPAT=test_ssl runs one module.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

echo "compat: CPython's tests, without and with the library"
cargo test --release -p partywall-preload --test cpython -- --ignored --nocapture
