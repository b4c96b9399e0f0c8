#!/usr/bin/env bash
# Fuzzes each target for FUZZ_SECONDS (60), or only the targets that are named: `fuzz.sh wire_decode`. `fuzz.sh --build` builds all and runs none.
#
# Fuzzing needs a sanitizer and coverage, which rustc offers to nightly only; RUSTC_BOOTSTRAP lets the toolchain in use
# offer them too, so no nightly toolchain is needed. FUZZ_BUILD_ARGS are options of `cargo fuzz` for each build.
# New inputs are kept in fuzz/corpus, failing ones in fuzz/artifacts.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export RUSTC_BOOTSTRAP=1
read -ra built <<< "${FUZZ_BUILD_ARGS:-}"
if [ "${1:-}" = --build ]; then exec cargo fuzz build "${built[@]}"; fi
seconds=${FUZZ_SECONDS:-60}
# More of libFuzzer's options.
read -ra more <<< "${FUZZ_ARGS:-}"

if [ $# -gt 0 ]; then targets=("$@"); else mapfile -t targets < <(cargo fuzz list); fi
[ ${#targets[@]} -gt 0 ] || { echo "fuzz: no targets" >&2; exit 1; }
cargo fuzz build "${built[@]}"

# The runtime of a target ends without dropping anything, so what a target makes in the temporary folder stays.
left=$(mktemp -d)
trap 'rm -rf "$left"' EXIT
failed=()
for target in "${targets[@]}"; do
    echo "fuzz: $target for $seconds s"
    # The corpus grows; fuzz/seeds holds inputs worth starting from, and is read only.
    folders=("fuzz/corpus/$target")
    mkdir -p "${folders[0]}"
    [ ! -d "fuzz/seeds/$target" ] || folders+=("fuzz/seeds/$target")
    TMPDIR=$left cargo fuzz run "${built[@]}" "$target" "${folders[@]}" -- -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 "${more[@]}" ||
        failed+=("$target")
done
[ ${#failed[@]} -eq 0 ] || { echo "fuzz: failed: ${failed[*]}" >&2; exit 1; }
echo "fuzz: ${#targets[@]} targets ran $seconds s each, none failed"
