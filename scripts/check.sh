#!/usr/bin/env bash
# The quick gate: run it before each commit.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/steps.sh
source scripts/gate.sh

gate
step "unit tests of the lower layers" cargo test --quiet -p partywall-shm -p partywall-region --lib
summary
