#!/usr/bin/env bash
# Mounts a throw-away system and runs inside.sh in it: `system.sh FOLDER BASE OLD`. Called by scripts/packages.sh in separate namespaces, with the folder of the
# packages, the folder with the files of the system, and that of an older one for containers, or nothing. If that is `/`, the system is a copy of this one, without systemd. Otherwise systemd boots it; the exit
# code is 66 if it does not.
set -euo pipefail
work=$1
base=$2
old=$3
here=$(dirname "$(realpath "${BASH_SOURCE[0]}")")
layers=$work/layers
mkdir -p "$layers"
mount --make-rprivate /
mount -t tmpfs tmpfs "$layers"
mkdir -p "$layers"/{upper,work,system} "$layers"/old/{upper,work,image}
image=$layers/old/image
[ -z "$old" ] || mount -t overlay overlay -o "lowerdir=$old,upperdir=$layers/old/upper,workdir=$layers/old/work" "$image"
system=$layers/system
mount -t overlay overlay -o "lowerdir=$base,upperdir=$layers/upper,workdir=$layers/work" "$system"
# As if Partywall had never been on this machine.
rm -rf "$system/etc/partywall" "$system/etc/cdi"
rm -f "$system"/usr/local/bin/partywall* "$system"/usr/local/lib/libpartywall*

if [ "$base" != / ]; then
    # The administrator at work is a service, so the system ends with the end of the tests, and with their exit code.
    cat > "$system/etc/systemd/system/administrator.service" << 'UNIT'
[Unit]
SuccessAction=exit
FailureAction=exit
[Service]
Type=oneshot
ExecStart=/bin/bash /mnt/here/inside.sh
StandardOutput=append:/mnt/packages/output
StandardError=inherit
# The containers of the tests have first processes, which ignore SIGTERM.
KillSignal=SIGKILL
[Install]
WantedBy=multi-user.target
UNIT
    mkdir -p "$system"/etc/systemd/system/multi-user.target.wants "$system"/mnt/{packages,upper,here,old}
    ln -s /etc/systemd/system/administrator.service "$system/etc/systemd/system/multi-user.target.wants/"
    # What nspawn keeps of its containers.
    mount -t tmpfs -o mode=755 tmpfs /run
    : > "$work/output"
    tail -n +1 -s 0.1 -f "$work/output" &
    rc=0
    # Podman's containers need all capabilities, and system calls that nspawn's filter refuses. crun refuses systems that have both versions of cgroups.
    # A system that hangs must not use up the time of the whole suite.
    SYSTEMD_SECCOMP=0 SYSTEMD_NSPAWN_UNIFIED_HIERARCHY=1 timeout --kill-after=10 600 systemd-nspawn --quiet --boot --directory="$system" --machine=packages --register=no --keep-unit --link-journal=no --private-network \
        --capability=all --console=pipe --resolv-conf=off --tmpfs=/var/lib/containers \
        --bind="$work:/mnt/packages" --bind="$layers/upper:/mnt/upper" --bind-ro="$here:/mnt/here" --bind="$image:/mnt/old" > "$work/boot" 2>&1 < /dev/null || rc=$?
    sleep 0.3
    kill $!
    if [ ! -s "$work/output" ]; then
        tail -n 30 "$work/boot" >&2
        rc=66
    elif ! grep -q '^test result:' "$work/output"; then
        echo "the tests ended early (exit code $rc)" >&2
        rc=1
    fi
    exit "$rc"
fi

mount --rbind /dev "$system/dev"
mount -t proc proc "$system/proc"
mount -t sysfs sysfs "$system/sys"
# crun refuses hosts that have both versions of cgroups.
mount -t cgroup2 cgroup2 "$system/sys/fs/cgroup" 2> /dev/null || true
for folder in run tmp var/lib/containers mnt; do
    mkdir -p "$system/$folder"
    mount -t tmpfs -o mode=1777 tmpfs "$system/$folder"
done
mkdir "$system"/mnt/{packages,upper,here,old}
mount --bind "$image" "$system/mnt/old"
mount --bind "$work" "$system/mnt/packages"
mount --bind "$layers/upper" "$system/mnt/upper"
mount --bind "$here" "$system/mnt/here"
ip link set lo up
rc=0
chroot "$system" /bin/bash /mnt/here/inside.sh || rc=$?
exit "$rc"
