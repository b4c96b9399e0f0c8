#!/usr/bin/env bash
# Installs what `make build` made: programs, the preloaded library, man pages, shell completions, the systemd unit. PREFIX, DESTDIR.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
: "${TARGET_DIR:=$(realpath -m "${CARGO_TARGET_DIR:-target}")}"
: "${PREFIX:=/usr/local}"
into=${DESTDIR:-}$PREFIX
partywall=$TARGET_DIR/release/partywall

echo "install: below $into"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

for program in partywall partywalld partywall-bench partywall-agent partywall-lab partywall-lab-guest; do
    install -D -m 755 "$TARGET_DIR/release/$program" "$into/bin/$program"
done
install -D -m 755 "$TARGET_DIR/release/libpartywall_preload.so" "$into/lib/partywall/libpartywall_preload.so"
"$partywall" man "$work"
for page in "$work"/*.1; do
    install -D -m 644 "$page" "$into/share/man/man1/$(basename "$page")"
done
complete() {
    "$partywall" completions "$1" > "$work/completion"
    install -D -m 644 "$work/completion" "$into/share/$2"
}
complete bash bash-completion/completions/partywall
complete zsh zsh/site-functions/_partywall
complete fish fish/vendor_completions.d/partywall.fish
sed "s|/usr/local|$PREFIX|" crates/daemon/partywalld.service > "$work/unit"
install -D -m 644 "$work/unit" "$into/lib/systemd/system/partywalld.service"
sed "s|/usr/local|$PREFIX|" crates/agent/partywall-agent.service > "$work/unit"
install -D -m 644 "$work/unit" "$into/lib/systemd/system/partywall-agent.service"
echo "install: done; to start the broker with the machine: systemctl enable --now partywalld"
