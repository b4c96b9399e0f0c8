# shellcheck shell=bash
# The steps that check the source without running the programs. Sourced by check.sh and test.sh, after steps.sh.

# Optional features are checked too.
readonly FEATURES=(--all-features)
# What runs the checks of this tree's structure and words. A caller that has built it already names it.
[ -v XTASK ] || XTASK=(cargo xtask)

gate() {
    step "format" cargo fmt --all --check
    # It waits for the registry most of the time.
    beside "crates can be published" scripts/publish.sh
    step "lints" cargo clippy --workspace --all-targets "${FEATURES[@]}" -- -D warnings
    for check in layers unsafe edges licences links protocol english examples glossary; do
        step "$check" "${XTASK[@]}" "$check"
    done
    step "advisories" scripts/advisories.sh
    step "documentation" env RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps "${FEATURES[@]}"
    settle
}
