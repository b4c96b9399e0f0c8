#!/usr/bin/env bash
# Runs everything: the gate, all tests, the models, a few seconds of fuzzing, and the programs as a user runs them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/steps.sh
# Built with the programs: alone, it would be built of other parts.
XTASK=("$TARGET_DIR/debug/xtask")
source scripts/gate.sh

# Programs of this tree that run now: whatever more there are at the end was left behind.
running() {
    local process program
    for process in /proc/[0-9]*; do
        program=$(readlink "$process/exe") || continue
        case $program in
            "$TARGET_DIR"/*/partywall*) echo "process ${process#/proc/} of $program" ;;
            */qemu-system-*)
                ! grep -qzF "$TARGET_DIR/lab/" "$process/cmdline" || echo "process ${process#/proc/}, a machine of the lab" ;;
        esac
    done 2> /dev/null
}
spaces() {
    PATH=$PATH:/usr/sbin:/sbin ip netns list 2> /dev/null | sed "s/^/network namespace /" || true
}
nothing_left() {
    local left
    left=$(comm -13 <(sort <<< "$1") <({ running; spaces; } | sort))
    [ -z "$left" ] || { printf 'left behind:\n%s\n' "$left"; return 1; }
    echo "no program and no network namespace was left behind"
}
# A disk that fills up ends each later step with an error of its own, none of which is about Partywall.
room_on_disk() {
    local needed=10 kept free
    mkdir -p "$TARGET_DIR"
    kept=$(du -sBG "$TARGET_DIR" | cut -f1)
    free=$(df --output=avail -BG "$TARGET_DIR" | tail -1 | tr -d ' ')
    # What an earlier run left is used again, but old parts of it may lie there too.
    [ "${free%G}" -ge 3 ] && [ $((${kept%G} + ${free%G})) -ge "$needed" ] || {
        echo "the tests need ${needed} GiB in $TARGET_DIR: $kept are there already and only $free are free; make room, or set CARGO_TARGET_DIR to a folder on a larger disk"
        return 1
    }
    echo "$free are free in $TARGET_DIR, which has $kept already; a whole run needs ${needed} GiB"
}
export -f running spaces nothing_left room_on_disk
before=$({ running; spaces; })

step "room on the disk" bash -c room_on_disk
[ ${#steps_broken[@]} -eq 0 ] || { summary; exit 1; }
# Tests start the programs, so they are built first, of the parts that the tests themselves are made of. No test waits for a compiler then.
# With the library for C, which packages have.
step "programs, for tests" cargo build --workspace --bins --lib --examples "${FEATURES[@]}"
gate
# In place of what the step above has made of it.
step "the preloaded library, for tests" cargo build --package partywall-preload
# shellcheck disable=SC2016 # expanded by the inner shell
step "the static agent, for tests" bash -c '
    if [ -d "$(rustc --print target-libdir --target "$1" 2> /dev/null)" ]; then
        cargo build --package partywall-agent --target "$1"
    else
        echo "skipped: Rust has no target $1 here; install it with: rustup target add $1"
    fi' bash "$(uname -m)-unknown-linux-musl"
# Apart from running them, so that neither takes nearly as long as a step may.
step "tests, built" cargo test --workspace --all-targets --no-run "${FEATURES[@]}"
# The profile for tests (fuzz/Cargo.toml).
export FUZZ_BUILD_ARGS="--dev"
# Half of the processors' time is free while tests wait: the tests of the lab and all others run at the same time. What only computes has the time
# that both leave.
# shellcheck disable=SC2016 # expanded by the inner shell
beside "tests of the lab, and as on an older kernel" bash -c '
    rc=0
    scripts/tests.sh lab "$@" || rc=$?
    if ! /usr/bin/python3 -c "import seccomp" || [ "$(id -u)" != 0 ]; then
        echo "skipped: tests as on an older kernel need root and the package python3-seccomp"
    else
        scripts/tests.sh older "$@" || rc=$?
    fi
    exit "$rc"' bash "${FEATURES[@]}"
beside "models (loom), and fuzz targets built" env CARGO_BUILD_JOBS=1 RUST_TEST_THREADS=1 nice -n 19 bash -c '
    rc=0
    scripts/loom.sh || rc=$?
    scripts/fuzz.sh --build || rc=$?
    exit "$rc"'
step "tests" scripts/tests.sh others "${FEATURES[@]}"
step "packages and containers" scripts/packages.sh
settle
beside "fuzzing, in short" env FUZZ_SECONDS="${FUZZ_SMOKE_SECONDS:-5}" FUZZ_ARGS="-verbosity=0 -print_final_stats=1" scripts/fuzz.sh
# shellcheck disable=SC2016 # expanded by the inner shell
step "gRPC and Cap'n Proto over streams" bash -c '
    without=()
    command -v capnp > /dev/null || {
        echo "skipped: Cap'"'"'n Proto over streams, since the program capnp is missing; it is in the package capnproto"
        without=(--exclude partywall-capnp)
    }
    cargo test --workspace "${without[@]}" --manifest-path examples/Cargo.toml --target-dir "$TARGET_DIR"'
step "examples in the documentation" cargo test --workspace --doc "${FEATURES[@]}"
settle
# What a user's first command runs, of the programs that are there. `make demo` builds the same sources with an optimiser, for minutes.
step "demo, in short" "$TARGET_DIR/debug/partywall" demo --quick
# shellcheck disable=SC2016 # expanded by the inner shell
step "nothing left behind" bash -c 'nothing_left "$1"' bash "$before"
summary
