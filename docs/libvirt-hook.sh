#!/bin/sh
# A libvirt hook for machines that are attached to Partywall. Install it as /etc/libvirt/hooks/qemu.d/partywall, executable, on each host.
#
# libvirt calls it as: NAME OPERATION SUB-OPERATION EXTRA, with the machine's XML on its standard input.
#
#   started begin   the machine runs here, started or arrived by migration: attach it
#   stopped end     the machine has ended here, or has left by migration: detach it
#
# A hook cannot release the windows before a migration, because libvirt calls no hook at the source before the migration begins. So migrate by:
#
#   partywall vm detach NAME --for-migration &&
#       { virsh migrate --live NAME URI || partywall vm attach NAME --resume; }
#
# The output of `partywall vm args NAME --libvirt` names the sockets that are used here. PARTYWALL_LIBVIRT_SOCKETS names another folder for the
# folders of the machines. A machine that cannot be attached is reported to the system log.

name=$1
sockets=${PARTYWALL_LIBVIRT_SOCKETS:-/var/lib/libvirt/qemu}/domain-$name

# Only machines that have Partywall's port.
[ -S "$sockets/partywall.port" ] || [ "$2" = stopped ] || exit 0

case $2/$3 in
started/begin)
    # The monitor answers a moment later, and a hook that waits for it would make libvirt wait.
    (
        for _ in 1 2 3 4 5 6 7 8 9 10; do
            why=$(partywall vm attach "$name" --qmp "$sockets/monitor.sock" --port "$sockets/partywall.port" --migratable 2>&1) && exit
            sleep 1
        done
        logger -t partywall "cannot attach $name: $why"
    ) </dev/null >/dev/null 2>&1 &
    ;;
stopped/end)
    # It fails for a machine that was not attached.
    partywall vm detach "$name" </dev/null >/dev/null 2>&1
    ;;
esac
exit 0
