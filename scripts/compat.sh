#!/usr/bin/env bash
# Runs all of CPython's own tests that use sockets, without the library and with it, on this machine and in a virtual one, and lists the tests whose
# outcomes differ.
# PARTYWALL_COMPAT=test_ssl runs one module.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

echo "compat: CPython's tests, without and with the library"
host=0
cargo test --release -p partywall-preload --test cpython -- --ignored --nocapture || host=$?
echo "compat: the same in a virtual machine"
cargo test --release -p partywall-lab --test guest_cpython -- --ignored --nocapture
exit "$host"
