#!/usr/bin/env bash
# Makes a minimal Debian system for scripts/packages.sh, once, in TARGET_DIR/packages: `root.sh SUITE PACKAGE ...` prints its folder.
#
# It has the named packages, what they depend on, and what no Debian system is without. So a program of ours that starts in it has everything that its package
# depends on. A system is used for 30 days. Fails, and says why, if it cannot be made.
set -euo pipefail
: "${TARGET_DIR:?}"
readonly suite=$1
shift
readonly folder=$TARGET_DIR/packages/$suite
wanted=$(printf '%s\n' "$suite" "$@")

# Written last: a system whose making was interrupted has none.
if [ "$(cat "$folder.packages" 2> /dev/null)" = "$wanted" ] && [ -n "$(find "$folder.packages" -mtime -30)" ]; then
    echo "$folder"
    exit
fi
command -v mmdebstrap > /dev/null || { echo "mmdebstrap is not installed" >&2; exit 1; }
mkdir -p "$TARGET_DIR/packages"
rm -rf "$folder.packages" "$folder.making" "$folder"
log=$folder.log
if ! timeout 300 mmdebstrap --mode=root --variant=minbase --include="$(IFS=,; echo "$*")" "$suite" "$folder.making" > "$log" 2>&1; then
    rm -rf "$folder.making"
    { echo "mmdebstrap failed; all it said is in $log:"; tail -n 3 "$log"; } >&2
    exit 1
fi
mv "$folder.making" "$folder"
echo "$wanted" > "$folder.packages"
echo "$folder"
