#!/usr/bin/env bash
# Builds the Python package as a wheel: `wheel.sh` into target/wheels, optimised; `wheel.sh tools` only installs maturin, which builds it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
: "${TARGET_DIR:=$(realpath -m "${CARGO_TARGET_DIR:-target}")}"
readonly MATURIN=1.16.0
readonly tools=$TARGET_DIR/tools/maturin

if [ ! -x "$tools/bin/maturin" ]; then
    echo "wheel: installing maturin $MATURIN into $tools"
    python3 -m venv "$tools"
    "$tools/bin/pip" --quiet install "maturin==$MATURIN"
fi
[ "${1:-}" != tools ] || exit 0
cd crates/python
"$tools/bin/maturin" build --release --target-dir "$TARGET_DIR/wheel" --out "$TARGET_DIR/wheels"
echo "wheel: to install it: pip install $TARGET_DIR/wheels/partywall-*.whl"
