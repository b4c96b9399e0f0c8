# shellcheck shell=bash
# The steps that look at the source without running it. Sourced by check.sh and test.sh, after steps.sh.

# What is optional is checked too.
readonly FEATURES=(--all-features)

gate() {
    step "format" cargo fmt --all --check
    step "lints" cargo clippy --workspace --all-targets "${FEATURES[@]}" -- -D warnings
    for check in layers unsafe licences links protocol english examples glossary; do
        step "$check" cargo xtask "$check"
    done
    step "advisories" scripts/advisories.sh
    step "crates can be published" scripts/publish.sh
    step "documentation" env RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps "${FEATURES[@]}"
}
