#!/usr/bin/env bash
# Installs the results of `make build`, or removes them again: programs, the preloaded library, the library for C, man pages, completions, a sample policy, systemd
# units. PREFIX, DESTDIR; EXTRAS=yes adds the bench and the lab. For packagers: LIBDIR (lib), below PREFIX, for the library for C; KEEP_SYMBOLS=yes;
# PRELOAD, the preloaded library in place of the one that `make build` made.
#
#   install.sh              installs
#   install.sh uninstall    removes the same files, and no others
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
: "${TARGET_DIR:=$(realpath -m "${CARGO_TARGET_DIR:-target}")}"
: "${PREFIX:=/usr/local}"
: "${EXTRAS:=}"
: "${LIBDIR:=lib}"
: "${KEEP_SYMBOLS:=}"
into=${DESTDIR:-}$PREFIX
release=$TARGET_DIR/release
: "${PRELOAD:=$release/libpartywall_preload.so}"
programs=(partywall partywalld partywall-agent partywall-net partywall-blk partywall-fs partywall-gateway)
extras=(partywall-bench partywall-lab partywall-lab-guest)
# What containers get: the library at the places that glibc makes of `$LIB` in LD_PRELOAD (Debian and Ubuntu; Fedora, SUSE and Gentoo; Arch). A loader that does
# not know `$LIB` (musl's) looks for a folder of that very name, and finds a library that only says so.
preload_places=("lib/$(uname -m)-linux-gnu" lib64 lib)

# The names that a man page describes: those of the line after `.SH NAME`, before the dash.
names_of() {
    sed -n '/^\.SH NAME$/{n;s/ \\-.*//;s/,//g;p}' "$1"
}

if [ "${1:-}" = uninstall ]; then
    echo "uninstall: from below $into"
    for program in "${programs[@]}" "${extras[@]}"; do
        rm -f "$into/bin/$program"
    done
    rm -f "$into"/share/man/man1/partywall.1 "$into"/share/man/man1/partywall-*.1
    rm -f "$into"/share/man/man8/partywall-gateway*.8
    rm -f "$into/share/man/man8/partywalld.8" "$into/share/man/man5/partywalld.toml.5" "$into/share/man/man5/partywall-gateway.toml.5"
    rm -f "$into/share/man/man5/partywall-net.toml.5" "$into/share/doc/partywall/net.toml"
    for program in partywall partywalld partywall-gateway; do
        rm -f "$into/share/bash-completion/completions/$program" "$into/share/zsh/site-functions/_$program"
        rm -f "$into/share/fish/vendor_completions.d/$program.fish"
    done
    for unit in partywalld partywall-agent partywall-gateway partywall-numbers partywall-net@; do
        rm -f "$into/lib/systemd/system/$unit.service"
    done
    rm -f "$into/$LIBDIR"/libpartywall.so "$into/$LIBDIR"/libpartywall.so.0 "$into/$LIBDIR"/libpartywall.so.0.* "$into/$LIBDIR/libpartywall.a"
    rm -f "$into/include/partywall.h" "$into/include/partywall_rpc.h" "$into/include/partywall_rpc_back.h" "$into/$LIBDIR/pkgconfig/partywall.pc"
    for page in crates/capi/man/*.3; do
        rm -f "$into/share/man/man3/$(basename "$page")"
        for name in $(names_of "$page"); do
            rm -f "$into/share/man/man3/$name.3"
        done
    done
    rm -f "$into"/share/doc/partywall/examples/*.c
    rm -f "$into/lib/partywall/libpartywall_preload.so" "$into/share/doc/partywall/partywalld.toml" "$into/share/doc/partywall/gateway.toml"
    container=lib/partywall/container
    rm -f "$into/$container/libpartywall_preload.so" "$into/$container/\$LIB/libpartywall_preload.so"
    for place in "${preload_places[@]}"; do
        rm -f "$into/$container/$place/libpartywall_preload.so"
    done
    for folder in "$container/\$LIB" "${preload_places[@]/#/$container/}" "$container" lib/partywall share/doc/partywall/examples share/doc/partywall; do
        [ ! -d "$into/$folder" ] || rmdir --ignore-fail-on-non-empty "$into/$folder"
    done
    echo "uninstall: done; a policy in /etc/partywall is yours and stays"
    exit
fi

[ "$EXTRAS" != yes ] || programs+=("${extras[@]}")
missing=
for file in "${programs[@]}" libpartywall_preload.so libpartywall_capi.so libpartywall_capi.a; do
    [ -e "$release/$file" ] || missing=$file
done
# What root compiled would belong to root, in a tree that is often a user's. So root installs what is there.
if [ "$(id -u)" -ne 0 ]; then
    "${MAKE:-make}" build
elif [ -n "$missing" ] && [ -n "${SUDO_USER:-}" ]; then
    echo "install: $release/$missing is not built; run \`make build\` as $SUDO_USER first, then \`sudo make install\`" >&2
    exit 1
elif [ -n "$missing" ]; then
    "${MAKE:-make}" build
else
    echo "install: what \`make build\` made on $(date -r "$release/partywall" '+%F %T')"
fi

echo "install: below $into"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Without the symbols that only a debugger uses: they are most of the size.
place() {
    install -D -m "$1" "$2" "$3"
    [ -n "$KEEP_SYMBOLS" ] || ! command -v strip > /dev/null || strip --strip-unneeded "$3"
}
for program in "${programs[@]}"; do
    place 755 "$release/$program" "$into/bin/$program"
done
container=$into/lib/partywall/container
place 644 "$PRELOAD" "$container/libpartywall_preload.so"
ln -sf container/libpartywall_preload.so "$into/lib/partywall/libpartywall_preload.so"
for place in "${preload_places[@]}"; do
    mkdir -p "$container/$place"
    ln -sfr "$container/libpartywall_preload.so" "$container/$place/libpartywall_preload.so"
done
if command -v cc > /dev/null; then
    # Without any library of here, of C either.
    cc -Os -fPIC -ffreestanding -fno-stack-protector -fno-asynchronous-unwind-tables -nostdlib -shared -Wl,-z,relro,-z,now,-z,noexecstack,--hash-style=both \
        -Wl,-soname,libpartywall_preload.so -o "$work/note" crates/preload/container/note.c
    place 644 "$work/note" "$container/\$LIB/libpartywall_preload.so"
else
    echo "install: there is no C compiler; containers with another C library than glibc will not be told that they stay on TCP"
fi

# The library for C, under the name that programs ask for (its SONAME), the name that linkers look for, and its version.
version=$(sed -nE 's/^version = "(.*)"/\1/p' Cargo.toml)
soname=libpartywall.so.0
place 755 "$release/libpartywall_capi.so" "$into/$LIBDIR/libpartywall.so.$version"
ln -sf "libpartywall.so.$version" "$into/$LIBDIR/$soname"
ln -sf "$soname" "$into/$LIBDIR/libpartywall.so"
install -D -m 644 "$release/libpartywall_capi.a" "$into/$LIBDIR/libpartywall.a"
! command -v strip > /dev/null || strip --strip-debug "$into/$LIBDIR/libpartywall.a"
install -D -m 644 crates/capi/include/partywall.h "$into/include/partywall.h"
install -D -m 644 crates/capi/include/partywall_rpc.h "$into/include/partywall_rpc.h"
install -D -m 644 crates/capi/include/partywall_rpc_back.h "$into/include/partywall_rpc_back.h"
sed "s|@PREFIX@|$PREFIX|; s|/lib\$|/$LIBDIR|; s|@VERSION@|$version|" crates/capi/partywall.pc.in > "$work/pc"
install -D -m 644 "$work/pc" "$into/$LIBDIR/pkgconfig/partywall.pc"
for page in crates/capi/man/*.3; do
    install -D -m 644 "$page" "$into/share/man/man3/$(basename "$page")"
    for name in $(names_of "$page"); do
        [ "$name.3" = "$(basename "$page")" ] || echo ".so man3/$(basename "$page")" > "$into/share/man/man3/$name.3"
    done
done
for example in crates/capi/examples/*.c; do
    install -D -m 644 "$example" "$into/share/doc/partywall/examples/$(basename "$example")"
done

"$release/partywall" man "$work"
for page in "$work"/*.1; do
    install -D -m 644 "$page" "$into/share/man/man1/$(basename "$page")"
done
"$release/partywalld" --print-manual > "$work/page"
install -D -m 644 "$work/page" "$into/share/man/man8/partywalld.8"
"$release/partywalld" --print-manual=policy > "$work/page"
install -D -m 644 "$work/page" "$into/share/man/man5/partywalld.toml.5"
for page in gateway certificates; do
    "$release/partywall-gateway" "--print-manual=$page" > "$work/page"
    name=partywall-gateway
    [ "$page" = gateway ] || name=partywall-gateway-$page
    install -D -m 644 "$work/page" "$into/share/man/man8/$name.8"
done
"$release/partywall-gateway" --print-manual=config > "$work/page"
install -D -m 644 "$work/page" "$into/share/man/man5/partywall-gateway.toml.5"
"$release/partywall-gateway" --print-sample-config > "$work/config"
install -D -m 644 "$work/config" "$into/share/doc/partywall/gateway.toml"
"$release/partywall-net" --print-manual > "$work/page"
install -D -m 644 "$work/page" "$into/share/man/man5/partywall-net.toml.5"
"$release/partywall-net" --print-sample-config > "$work/config"
install -D -m 644 "$work/config" "$into/share/doc/partywall/net.toml"
"$release/partywalld" --print-sample-policy > "$work/policy"
install -D -m 644 "$work/policy" "$into/share/doc/partywall/partywalld.toml"

complete() {
    "$release/partywall" completions "$1" > "$work/completion"
    install -D -m 644 "$work/completion" "$into/share/$2"
    "$release/partywalld" --print-completions "$1" > "$work/completion"
    install -D -m 644 "$work/completion" "$into/share/$3"
    "$release/partywall-gateway" --print-completions "$1" > "$work/completion"
    install -D -m 644 "$work/completion" "$into/share/$4"
}
complete bash bash-completion/completions/partywall bash-completion/completions/partywalld bash-completion/completions/partywall-gateway
complete zsh zsh/site-functions/_partywall zsh/site-functions/_partywalld zsh/site-functions/_partywall-gateway
complete fish fish/vendor_completions.d/partywall.fish fish/vendor_completions.d/partywalld.fish fish/vendor_completions.d/partywall-gateway.fish
for unit in daemon/partywalld agent/partywall-agent gateway/partywall-gateway cli/partywall-numbers vhost/partywall-net@; do
    sed "s|/usr/local|$PREFIX|" "crates/$unit.service" > "$work/unit"
    install -D -m 644 "$work/unit" "$into/lib/systemd/system/${unit#*/}.service"
done
# A loader that has a cache of libraries finds this one after the next look.
if [ -z "${DESTDIR:-}" ] && [ "$(id -u)" -eq 0 ]; then
    ! PATH=$PATH:/usr/sbin:/sbin command -v ldconfig > /dev/null || PATH=$PATH:/usr/sbin:/sbin ldconfig
fi
echo "install: done; to start the broker with the machine: systemctl enable --now partywalld; a sample policy: $PREFIX/share/doc/partywall/partywalld.toml"
