#!/usr/bin/env bash
# Mounts a throw-away copy of this system and runs inside.sh in it. Called by scripts/packages.sh in separate namespaces, with the folder of the packages.
set -euo pipefail
work=$1
here=$(dirname "$(realpath "${BASH_SOURCE[0]}")")
layers=$work/layers
mkdir "$layers"
mount --make-rprivate /
mount -t tmpfs tmpfs "$layers"
mkdir "$layers"/{upper,work,system}
system=$layers/system
mount -t overlay overlay -o "lowerdir=/,upperdir=$layers/upper,workdir=$layers/work" "$system"
mount --rbind /dev "$system/dev"
mount -t proc proc "$system/proc"
mount -t sysfs sysfs "$system/sys"
# crun refuses hosts that have both versions of cgroups.
mount -t cgroup2 cgroup2 "$system/sys/fs/cgroup" 2> /dev/null || true
for folder in run tmp var/lib/containers mnt; do
    mkdir -p "$system/$folder"
    mount -t tmpfs -o mode=1777 tmpfs "$system/$folder"
done
mkdir "$system"/mnt/{packages,upper,here}
mount --bind "$work" "$system/mnt/packages"
mount --bind "$layers/upper" "$system/mnt/upper"
mount --bind "$here" "$system/mnt/here"
ip link set lo up
# As if Partywall had never been on this machine.
rm -rf "$system/etc/partywall" "$system/etc/cdi"
rm -f "$system"/usr/local/bin/partywall* "$system"/usr/local/lib/libpartywall*
rc=0
chroot "$system" /bin/bash /mnt/here/inside.sh || rc=$?
exit "$rc"
