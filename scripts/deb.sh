#!/usr/bin/env bash
# Makes Debian packages of the programs from `make build`, in DEB_DIR (target/deb): `deb.sh`. `deb.sh release` also makes an SBOM and checksums, and runs lintian.
# Compiles only the note for containers. `deb.sh crates` lists the crate of each program and library in the packages.
#
# PRELOAD: the preloaded library, if not the one of `make build`. DEB_VERSION: in place of the version in debian/changelog, for tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
: "${TARGET_DIR:=$(realpath -m "${CARGO_TARGET_DIR:-target}")}"
: "${DEB_DIR:=$TARGET_DIR/deb}"
export TARGET_DIR
readonly CARGO_CYCLONEDX=0.5.9
readonly tools=$TARGET_DIR/tools

# The crate of each program and library in the packages, as lines of the file, the crate, and the folder of the crate. Fails if a packaged program has no crate.
crates() {
    {
        sed -nE 's|^usr/bin/([^ ]+).*|\1|p' debian/*.install
        # Cargo's names of lib/partywall/libpartywall_preload.so and libpartywall.so.
        printf '%s\n' partywall_preload partywall_capi
    } > "$DEB_DIR/packaged"
    # Perl is there with dpkg-dev.
    cargo metadata --no-deps --offline --format-version 1 | perl -MJSON::PP -e '
        open(my $list, "<", $ARGV[0]) or die "deb: cannot read $ARGV[0]: $!\n";
        chomp(my @packaged = <$list>);
        my %crate;
        for my $package (@{decode_json(join "", <STDIN>)->{packages}}) {
            (my $folder = $package->{manifest_path}) =~ s|/Cargo.toml$||;
            for my $target (@{$package->{targets}}) {
                $crate{$target->{name}} = "$package->{name} $folder" if grep { $_ eq "bin" || $_ eq "cdylib" } @{$target->{kind}};
            }
        }
        for my $file (@packaged) {
            die "deb: debian/*.install packages $file, and no crate makes it\n" unless $crate{$file};
            print "$file $crate{$file}\n";
        }' "$DEB_DIR/packaged"
    rm "$DEB_DIR/packaged"
}
mkdir -p "$DEB_DIR"
if [ "${1:-}" = crates ]; then
    crates
    exit
fi

# debhelper writes into debian/, so it works in a copy, with links to everything else.
tree=$DEB_DIR/tree
rm -rf "$tree"
mkdir -p "$tree"
cp -r debian "$tree"
for entry in *; do
    [ "$entry" = debian ] || [ "$entry" = target ] || ln -s "$PWD/$entry" "$tree/$entry"
done
if [ -n "${DEB_VERSION:-}" ]; then
    sed -i "1s/(.*)/($DEB_VERSION)/" "$tree/debian/changelog"
fi
rm -f "$DEB_DIR"/*.deb "$DEB_DIR"/*.changes "$DEB_DIR"/*.buildinfo "$DEB_DIR"/*.cdx.json
echo "deb: packaging into $DEB_DIR"
(
    cd "$tree"
    # What decides whether members of archives differ between two runs.
    export SOURCE_DATE_EPOCH
    SOURCE_DATE_EPOCH=$(dpkg-parsechangelog --show-field Timestamp)
    dpkg-buildpackage --build=binary --no-sign --no-pre-clean > "$DEB_DIR/log" 2>&1
) || {
    tail -n 30 "$DEB_DIR/log" >&2
    echo "deb: dpkg-buildpackage failed; all it said is in $DEB_DIR/log" >&2
    exit 1
}
rm -rf "$tree"
[ "${1:-}" = release ] || exit 0

if [ ! -x "$tools/bin/cargo-cyclonedx" ]; then
    echo "deb: installing cargo-cyclonedx $CARGO_CYCLONEDX into $tools"
    cargo install --quiet --locked --root "$tools" --version "$CARGO_CYCLONEDX" cargo-cyclonedx
fi
echo "deb: listing the crates that are linked in"
# One file for each member of the workspace, beside its Cargo.toml. The folder of this machine is of no use to readers.
PATH=$tools/bin:$PATH cargo cyclonedx --quiet --format json --spec-version 1.5 --no-build-deps --override-filename partywall-sbom
crates > "$DEB_DIR/crates"
while read -r file name folder; do
    sed "s|file://$PWD/||g" "$folder/partywall-sbom.json" > "$DEB_DIR/$name.cdx.json"
    grep -qE "\"name\": \"$file\"" "$DEB_DIR/$name.cdx.json" || {
        echo "deb: $name.cdx.json does not name $file, which the packages have" >&2
        exit 1
    }
done < "$DEB_DIR/crates"
rm "$DEB_DIR/crates"
find crates xtask -name partywall-sbom.json -delete
(cd "$DEB_DIR" && sha256sum -- *.deb *.cdx.json > SHA256SUMS && sha256sum --check --quiet SHA256SUMS)
if command -v lintian > /dev/null; then
    echo "deb: lintian"
    lintian --allow-root --fail-on error "$DEB_DIR"/*.changes
else
    echo "deb: lintian is not installed, so the packages are not checked" >&2
fi
echo "deb: packages, SBOM and checksums are in $DEB_DIR"
