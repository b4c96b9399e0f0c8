#!/usr/bin/env bash
# Model-checks the ring, the wake-up, the channel, the tokens of groups, the records of calls, and the locks, arena and table of the preload library: loom runs each test over every interleaving of its threads.
# It is a separate build, because `--cfg loom` replaces the atomics.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
: "${TARGET_DIR:=$(realpath -m "${CARGO_TARGET_DIR:-target}")}"

echo "loom: every interleaving of ring, wake-up, channel, tokens, records, and the preload library's locks, arena and table"
RUSTFLAGS="${RUSTFLAGS:-} --cfg loom" CARGO_TARGET_DIR="$TARGET_DIR/loom" \
    cargo test --profile loom -p partywall-shm --test loom --test loom_path --test loom_group --test loom_call --test loom_preload -- "$@"
