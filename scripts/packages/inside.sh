#!/usr/bin/env bash
# The tests of scripts/packages.sh, in the throw-away system, one after another. Each test continues from the state that the one before left.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive LC_ALL=C PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
unset PARTYWALL_BROKER PARTYWALL_DOMAIN PARTYWALL_MOVES TMPDIR
ulimit -n "$(ulimit -H -n)"
readonly state=/tmp/state
mkdir -m 777 "$state"
# Whether systemd runs in this system. Otherwise programs are started as it would start them, as far as the tests depend on that.
if [ -d /run/systemd/system ]; then systemd=yes; else systemd=; fi
readonly systemd
echo "on $(. /etc/os-release && echo "$PRETTY_NAME"), $([ -n "$systemd" ] && systemctl --version | head -n 1 || echo "without systemd")"
passed=0
ignored=0

fail() {
    echo "failed: $*" >&2
    broker_log | tail -n 20 >&2
    echo "test result: FAILED. $passed passed; 1 failed; $ignored ignored"
    exit 1
}
# says TEXT COMMAND ...: whether it succeeds, and says the text.
says() {
    local text=$1 said
    shift
    said=$("$@" 2>&1) && [[ $said == *"$text"* ]]
}
# expect TEXT COMMAND ...: it succeeds, and says the text.
expect() {
    local text=$1 said
    shift
    said=$("$@" 2>&1) || fail "$*: exit code $?: $said"
    [[ $said == *"$text"* ]] || fail "$* does not say \"$text\": $said"
}
# refuse CODE TEXT COMMAND ...: it ends with the code, and says the text.
refuse() {
    local code=$1 text=$2 said rc=0
    shift 2
    said=$("$@" 2>&1) || rc=$?
    [ "$rc" -eq "$code" ] || fail "$*: exit code $rc, not $code: $said"
    [[ $said == *"$text"* ]] || fail "$* does not say \"$text\": $said"
}
# A guard against hanging, not a measure.
await() {
    local what=$1
    shift
    local deadline=$((SECONDS + ${AWAIT_SECONDS:-120}))
    while [ "$SECONDS" -lt "$deadline" ]; do
        ! "$@" > /dev/null 2>&1 || return 0
        sleep 0.02
    done
    fail "never: $what; the connections: $(partywall top --once --json 2>&1)"
}
broker_log() {
    if [ -n "$systemd" ]; then
        journalctl --no-pager --unit=partywalld
    else
        cat /tmp/broker.log 2> /dev/null || true
    fi
}
# broker_may OVERRIDE ...: from the broker's next start on, these lines of `systemctl edit partywalld` add to the rights that its unit gives.
overrides=()
broker_may() {
    overrides=("$@")
    [ -n "$systemd" ] || return 0
    local folder=/etc/systemd/system/partywalld.service.d
    rm -rf "$folder"
    if [ $# -gt 0 ]; then
        mkdir "$folder"
        printf '%s\n' '[Service]' "$@" > "$folder/override.conf"
    fi
    systemctl daemon-reload
}
start_broker() {
    if [ -n "$systemd" ]; then
        systemctl start partywalld || fail "systemd cannot start the broker"
        return
    fi
    # What the unit takes from root: all capabilities, and the network.
    local capabilities=-all network=(unshare --net)
    [[ " ${overrides[*]} " != *" CapabilityBoundingSet=CAP_NET_ADMIN "* ]] || capabilities+=,+net_admin
    [[ " ${overrides[*]} " != *" PrivateNetwork=no "* ]] || network=()
    "${network[@]}" setpriv --bounding-set="$capabilities" --inh-caps=-all --no-new-privs partywalld >> /tmp/broker.log 2>&1 &
    broker=$!
    await "the broker answers" partywall list
}
stop_broker() {
    if [ -n "$systemd" ]; then
        systemctl stop partywalld
    else
        kill "$broker"
        wait "$broker" || true
    fi
}
reload_broker() {
    if [ -n "$systemd" ]; then
        systemctl reload partywalld || fail "systemd cannot reload the broker"
    else
        kill -HUP "$broker"
    fi
}
# The variables that systemd gives the programs of a service. Without it: those of the drop-in, which has no escapes here.
variables_of() {
    if [ -n "$systemd" ]; then
        systemctl show --property=Environment --value "$1"
    else
        sed -nE 's/^Environment="(.*)"$/\1/p' "/etc/systemd/system/$1.d/50-partywall.conf"
    fi
}
# start_service UNIT USER COMMAND ...: the user and the command are those of the unit.
start_service() {
    local unit=$1 user=$2
    shift 2
    if [ -n "$systemd" ]; then
        systemctl daemon-reload
        systemctl restart "$unit" || fail "systemd cannot start $unit"
        return
    fi
    # shellcheck disable=SC2046 # a variable a word
    env $(variables_of "$unit") setpriv --reuid "$user" --regid "$user" --clear-groups "$@" > "$state/$unit.log" 2>&1 &
    process_of_service=$!
}
stop_service() {
    if [ -n "$systemd" ]; then
        systemctl stop "$1"
    else
        kill "$2"
    fi
}
rounds() {
    cat "$state/rounds" 2> /dev/null || echo 0
}
goes_on() {
    local before
    before=$(rounds)
    await "the connection carries more ($1)" eval "[ \"\$(rounds)\" -gt $before ]"
}
# Both ends of the connection with this port are on the ring, as `top` shows them.
rings() {
    on_rings "$1" 2
}
# on_rings PORT NUMBER: at least this number of ends of connections with this port are on the ring.
on_rings() {
    partywall top --once --json | python3 -c '
import json, sys
rows = [row for row in json.load(sys.stdin)["connections"] if any(str(row.get(end, "")).endswith(":" + sys.argv[1]) for end in ("local", "peer"))]
sys.exit(0 if len([row for row in rows if row["way"] == "ring"]) >= int(sys.argv[2]) else 1)' "$1" "$2"
}
test_of() {
    "$1"
    passed=$((passed + 1))
    echo "test $1 ... ok"
}

# The process of the broker has no more rights than its unit gives, whichever way it was started.
broker_is_confined() {
    local process=${broker:-}
    [ -z "$systemd" ] || process=$(systemctl show --property=MainPID --value partywalld)
    grep -qE '^CapEff:\s+0{16}$' "/proc/$process/status" || fail "the broker has capabilities: $(grep Cap "/proc/$process/status")"
    grep -qE '^NoNewPrivs:\s+1$' "/proc/$process/status" || fail "the broker may get new rights"
    [ "$(readlink "/proc/$process/ns/net")" != "$(readlink /proc/self/ns/net)" ] || fail "the broker is in the network of the host"
}

packages_install_on_a_system_without_partywall() {
    if [ -n "$systemd" ]; then
        # Without a network: what the packages depend on must be among them, or in a minimal system.
        apt-get install -y --no-install-recommends /mnt/packages/old/*.deb > /tmp/apt.log 2>&1 || fail "$(tail -n 20 /tmp/apt.log)"
        [ "$(systemctl is-active partywalld) $(systemctl is-enabled partywalld)" = "active enabled" ] ||
            fail "the broker does not run after its installation: $(systemctl status --no-pager partywalld 2>&1)"
        broker_is_confined
    else
        dpkg -i /mnt/packages/old/*.deb > /tmp/dpkg.log 2>&1 || fail "$(tail -n 20 /tmp/dpkg.log)"
    fi
    expect "protocol: control" partywall --version
    expect "protocol: control" partywalld --version
    for program in partywall-agent partywall-net partywall-blk partywall-fs partywall-gateway; do
        expect "" "$program" --help
    done
    expect "a good policy" partywalld --check-policy
    expect partywall getent group partywall
    # What a policy is written from.
    expect partywalld.toml.5 dpkg -L partywalld
    expect '[[connect]]' partywalld --print-sample-policy
    expect libpartywall.so.0 ldconfig -p
    [ "$(stat -c %a:%U /run/partywall/containers)" = 755:root ] || fail "the folder for sockets has another mode or owner"
    systemd-analyze verify --man=no /lib/systemd/system/partywalld.service /lib/systemd/system/partywall-net@.service > /tmp/verify.log 2>&1 || fail "$(cat /tmp/verify.log)"
}

# The journal stores what a service says some time later.
log_has_refusal() {
    [[ $(broker_log) =~ "ring denied by policy"[^$'\n']*"no [[connect]] rule" ]]
}

services_of_two_users_meet_once_policy_allows() {
    printf '[Service]\nUser=www-data\nExecStart=/usr/bin/python3 /mnt/here/client.py 7432 %s\n' "$state" > /etc/systemd/system/web.service
    printf '[Service]\nUser=games\nEnvironment=LD_PRELOAD=/usr/lib/x86_64-linux-gnu/libm.so.6\nExecStart=/usr/bin/python3 /mnt/here/server.py 7432\n' \
        > /etc/systemd/system/db.service
    refuse 3 "no service" partywall enable nothing.service
    expect "runs as www-data" partywall --domain web enable web.service
    expect "50-partywall.conf" partywall --domain db enable db
    [ -z "$systemd" ] || systemctl daemon-reload
    [[ $(variables_of db.service) == *libpartywall_preload.so:/usr/lib/*/libm.so.6* ]] || fail "the service's own LD_PRELOAD is gone: $(variables_of db.service)"
    start_broker
    broker_is_confined
    refuse 3 "refused" partywall policy test --from web --to db:tcp-7432 --user www-data
    start_service db.service games /usr/bin/python3 /mnt/here/server.py 7432
    await "the server listens" bash -c 'exec 3<> /dev/tcp/127.0.0.1/7432'
    start_service web.service www-data /usr/bin/python3 /mnt/here/client.py 7432 "$state"
    goes_on "on TCP, refused"
    await "the refusal to join is in top" says "does not let user 33 join as web" partywall top --once --json
    await "the refusal to join is the reason" says "join-refused" partywall why :7432
    refuse 3 "no [[join]] rule" partywall policy test --from web --user www-data
    ! rings 7432 || fail "the connection is on a ring although no rule allows it"
    cat > /etc/partywall/partywalld.toml << 'POLICY'
[[join]]
domain = "web"
users = ["www-data"]

[[join]]
domain = "db"
users = ["games"]

POLICY
    expect "a good policy" partywalld --check-policy
    reload_broker
    # Both may join, and no rule lets them connect.
    await "the refusal is in the reason" eval 'partywall why :7432 | grep -q "refused: the broker refused"'
    await "the log has the refusal" log_has_refusal
    ! rings 7432 || fail "the connection is on a ring although no rule allows it"
    cat >> /etc/partywall/partywalld.toml << 'POLICY'

[[connect]]
from = "web"
to = "db"
service = "tcp-7432"
POLICY
    expect "a good policy" partywalld --check-policy
    reload_broker
    await "the policy is in force" partywall policy test --from web --to db:tcp-7432 --user www-data
    await "the connection moves to a ring" rings 7432
    expect "[[connect]] rule 1" partywall policy test --from web --to db:tcp-7432 --user www-data
    expect "/etc/partywall/partywalld.toml:" partywall policy test --from web --to db:tcp-7432 --user www-data
}

workers_of_nginx_join_once_policy_allows() {
    if ! command -v nginx > /dev/null; then
        echo "skipped: nginx is not installed"
        ignored=$((ignored + 1))
        return
    fi
    # As Debian has it, except that it stays in the foreground, and one connection lasts.
    cat > /etc/nginx/nginx.conf << 'CONFIGURATION'
user www-data;
worker_processes 2;
pid /run/nginx.pid;
events {}
http {
    access_log off;
    keepalive_requests 100000000;
    server {
        listen 127.0.0.1:7480;
        root /usr/share/common-licenses;
    }
}
CONFIGURATION
    expect 'domain = "nginx-*"' partywall enable nginx.service
    expect 'domain = "front"' partywall --domain front enable nginx.service
    start_service nginx.service root /usr/sbin/nginx -g 'daemon off;'
    local nginx=${process_of_service:-} visitor
    await "nginx listens" bash -c 'exec 3<> /dev/tcp/127.0.0.1/7480'
    refuse 3 "no [[join]] rule" partywall policy test --from front --user www-data
    expect "workers run as www-data" partywall doctor -- /usr/sbin/nginx
    mkdir "$state/of-visitor"
    partywall --domain visitor run python3 /mnt/here/visitor.py 7480 "$state/of-visitor" > "$state/visitor.log" 2>&1 &
    visitor=$!
    await "the workers' refusal is in top" says "does not let user 33 join" partywall top --once --json
    await "the workers' refusal is the reason" says "join-refused" partywall why :7480
    ! rings 7480 || fail "the connection is on a ring although no rule admits the workers"
    # As `enable` prints it. The first process, of root, has another name, so one rule is enough.
    printf '\n[[join]]\ndomain = "front"\nusers = ["www-data"]\n' >> /etc/partywall/partywalld.toml
    expect "a good policy" partywalld --check-policy
    reload_broker
    await "the connection to the worker moves to a ring" rings 7480
    partywall list domains --json | python3 -c 'import json, sys; sys.exit(not any(d["name"] == "front" and d["uid"] == 33 for d in json.load(sys.stdin)["domains"]))' ||
        fail "the workers have another name than the enabled one: $(partywall list domains)"
    touch "$state/of-visitor/stop"
    wait "$visitor" || fail "the visitor got something else than the file: $(cat "$state/visitor.log")"
    stop_service nginx.service "$nginx"
    partywall disable nginx.service > /dev/null
}

list_of_programs_holds_while_services_run() {
    printf '\n[programs]\ndeny = ["python3*"]\n' >> /etc/partywall/partywalld.toml
    expect "a good policy" partywalld --check-policy
    reload_broker
    await "the connection returns to TCP" eval 'partywall why :7432 | grep -q program-not-listed'
    goes_on "on TCP, not listed"
    ! rings 7432 || fail "the connection is on a ring although its program is denied"
    refuse 3 '`deny` of [programs]' partywall policy test --program "$(realpath /usr/bin/python3)"
    sed -i '/^\[programs\]/,$d' /etc/partywall/partywalld.toml
    expect "a good policy" partywalld --check-policy
    reload_broker
    await "the connection is on a ring again" rings 7432
}

upgrade_of_broker_and_library_leaves_connections_alone() {
    local library=/usr/lib/partywall/libpartywall_preload.so before process
    before=$(stat -L -c %i "$library")
    process=$([ -z "$systemd" ] || systemctl show --property=MainPID --value partywalld)
    dpkg -i --force-confold /mnt/packages/new/*.deb > /tmp/dpkg.log 2>&1 || fail "$(tail -n 20 /tmp/dpkg.log)"
    [ "$(dpkg-query -W -f '${Version}' partywalld)" = 0.1.0+next ] || fail "the broker was not upgraded"
    [ "$(stat -L -c %i "$library")" != "$before" ] || fail "the library was written in place, under programs that use it"
    grep -q 'tcp-7432' /etc/partywall/partywalld.toml || fail "the upgrade replaced the policy"
    goes_on "after the upgrade of the library"
    if [ -n "$systemd" ]; then
        [ "$(systemctl show --property=MainPID --value partywalld)" != "$process" ] || fail "the upgrade does not restart the broker"
        await "the connection is listed by the broker that the upgrade started" rings 7432
    fi
    stop_broker
    goes_on "without a broker"
    start_broker
    await "the connection is listed by the new broker" rings 7432
    goes_on "after the upgrade of the broker"
}

metrics_have_connection() {
    python3 -c 'import sys, urllib.request as r; sys.stdout.write(r.urlopen("http://127.0.0.1:9464/metrics").read().decode())' > "$1"
    grep -q '^partywall_channels{kind="tcp",state="open"} 1$' "$1"
}

# The journal stores what a service says some time later.
journal_has_remedy() {
    [[ $(journalctl --no-pager --unit=partywalld --priority=err) == *"RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6"* ]]
}

metrics_graph_the_services() {
    local page=/tmp/metrics totals=/tmp/totals.prom
    printf '\n[metrics]\nlisten = "127.0.0.1:9464"\n' >> /etc/partywall/partywalld.toml
    expect "a good policy" partywalld --check-policy
    stop_broker
    if [ -n "$systemd" ]; then
        # The unit gives the broker no port.
        start_broker
        await "the journal has the broker's remedy for metrics without a port" journal_has_remedy
        goes_on "served without metrics"
        stop_broker
    fi
    # As docs/metrics.md says.
    broker_may PrivateNetwork=no "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6"
    start_broker
    # The programs report the connection to the new broker once they have joined it again, later than `top` finds it in their own memory.
    await "the metrics have the connection" metrics_have_connection "$page"
    grep -q '^partywall_relay_bell_seconds_count' "$page" || fail "the metrics lack the relays' latency"
    partywall stat --total --metrics "$totals" > /tmp/totals.txt
    grep -q '^partywall_connections{kind="socket",way="ring"} 2$' "$totals" || fail "the totals lack the connection: $(cat "$totals")"
}

# A firewall that looks at the state of connections, so the kernel tracks each of them.
track_connections() {
    if command -v nft > /dev/null; then
        nft 'add table ip filter; add chain ip filter input { type filter hook input priority 0; }; add rule ip filter input ct state established accept'
    else
        iptables -A INPUT -m conntrack --ctstate ESTABLISHED -j ACCEPT
    fi
}

tracked_connections_of_two_users_need_net_admin() {
    if ! track_connections > /tmp/firewall.log 2>&1; then
        echo "skipped: this kernel cannot be made to track connections: $(tail -n 1 /tmp/firewall.log)"
        ignored=$((ignored + 1))
        return
    fi
    # With the rights that the unit gives.
    stop_broker
    sed -i '/^\[metrics\]/,$d' /etc/partywall/partywalld.toml
    broker_may
    start_broker
    broker_is_confined
    expect "lacks CAP_NET_ADMIN" partywall doctor
    expect "CapabilityBoundingSet=CAP_NET_ADMIN" partywall doctor
    # A client that asks earlier finds no listener.
    await "the server has joined the new broker" eval 'partywall list domains | grep -qw db'
    # The first connection is older than the firewall; this one is tracked.
    mkdir -m 777 "$state/of-tracked"
    env $(variables_of web.service) setpriv --reuid www-data --regid www-data --clear-groups \
        python3 /mnt/here/client.py 7432 "$state/of-tracked" > "$state/tracked.log" 2>&1 &
    local client=$!
    await "the tracked connection carries bytes" test -s "$state/of-tracked/rounds"
    await "the tracked connection is ambiguous" eval 'partywall why :7432 | grep -q ambiguous'
    expect "CAP_NET_ADMIN" partywall why :7432
    ! on_rings 7432 4 || fail "a tracked connection of two users is on a ring, and nobody has read its sequence numbers"
    stop_broker
    broker_may CapabilityBoundingSet=CAP_NET_ADMIN
    start_broker
    expect "has CAP_NET_ADMIN" partywall doctor
    await "the tracked connection moves to a ring" on_rings 7432 4
    touch "$state/of-tracked/stop"
    wait "$client" || fail "the client of the tracked connection: $(cat "$state/tracked.log")"
}

record_of_numbers_replaces_net_admin() {
    if [ ! -e "$state/of-tracked" ]; then
        echo "skipped: without connections that the kernel tracks, nothing needs the record"
        ignored=$((ignored + 1))
        return
    fi
    stop_broker
    broker_may
    start_broker
    broker_is_confined
    await "the server has joined the broker without rights" eval 'partywall list domains | grep -qw db'
    # systemd mounts it on a host. In a container of nspawn nobody does, and /sys is a file system in memory that lacks the folder.
    if ! mountpoint -q /sys/fs/bpf; then
        [ -d /sys/fs/bpf ] || { mount -o remount,rw /sys && mkdir /sys/fs/bpf && mount -o remount,ro /sys; }
        mount -t bpf bpf /sys/fs/bpf
    fi
    if [ -n "$systemd" ]; then
        systemctl start partywall-numbers || fail "systemd cannot start the record: $(journalctl --no-pager --unit=partywall-numbers)"
    else
        partywall numbers on
    fi
    expect "on:" partywall numbers
    mkdir -m 777 "$state/of-recorded"
    env $(variables_of web.service) setpriv --reuid www-data --regid www-data --clear-groups \
        python3 /mnt/here/client.py 7432 "$state/of-recorded" > "$state/recorded.log" 2>&1 &
    local client=$!
    await "the recorded connection moves to a ring" on_rings 7432 4
    touch "$state/of-recorded/stop"
    wait "$client" || fail "the client of the recorded connection: $(cat "$state/recorded.log")"
    if [ -n "$systemd" ]; then systemctl stop partywall-numbers; else partywall numbers off; fi
    expect "off:" partywall numbers
}

switch_of_a_unit_has_the_ports_of_its_file() {
    if [ -z "$systemd" ]; then
        echo "skipped: the unit of a switch needs systemd"
        ignored=$((ignored + 1))
        return
    fi
    local file=/etc/partywall/net/lan.toml port='[[port]]\nname = "%s"\nowner = "www-data"\n'
    install -d /etc/partywall/net
    # shellcheck disable=SC2059 # the format has no words of others
    printf "$port" a > "$file"
    systemctl start partywall-net@lan || fail "systemd cannot start the switch: $(journalctl --no-pager --unit=partywall-net@lan)"
    [ "$(stat -c '%U %a' /run/partywall/net/lan/a.port)" = "www-data 600" ] || fail "the port is not its owner's"
    refuse 1 "$file" partywall net add lan b
    # shellcheck disable=SC2059
    printf "$port" b >> "$file"
    systemctl reload partywall-net@lan || fail "systemd cannot reload the switch: $(journalctl --no-pager --unit=partywall-net@lan)"
    [ -S /run/partywall/net/lan/b.port ] || fail "the reload brings no port"
    systemctl stop partywall-net@lan
    [ ! -e /run/partywall/net/lan/a.port ] || fail "the switch leaves its socket"
    rm -r /etc/partywall/net
}

sysdump_has_no_payload_and_no_secrets() {
    export SECRET_OF_TEST=in-an-environment-4711
    python3 -c 'import time; time.sleep(600)' in-an-argument-4712 &
    local sleeper=$!
    expect "wrote" partywall sysdump --output /tmp/dump.tar
    kill "$sleeper"
    [ "$(stat -c %a /tmp/dump.tar)" = 600 ] || fail "others may read the dump"
    refuse 1 "exist" partywall sysdump --output /tmp/dump.tar
    mkdir /tmp/dump
    tar -xf /tmp/dump.tar -C /tmp/dump
    for entry in version.txt doctor.json top.json list.json programs.txt broker-version.txt files/etc/partywall/partywalld.toml; do
        [ -s "/tmp/dump/partywall-sysdump/$entry" ] || fail "the dump has no $entry"
    done
    python3 -m json.tool /tmp/dump/partywall-sysdump/top.json > /dev/null || fail "top.json is no JSON"
    grep -q 'libpartywall_preload' /tmp/dump/partywall-sysdump/programs.txt || fail "programs.txt lacks the programs"
    [ -z "$systemd" ] || grep -q 'serving' /tmp/dump/partywall-sysdump/broker-log.txt || fail "the dump lacks the broker's log"
    # Whole, since numbers of the system's can contain any few digits.
    local secrets='in-an-(environment-4711|argument-4712)'
    ! grep -rqE "$secrets" /tmp/dump || fail "the dump has secrets: $(grep -rE "$secrets" /tmp/dump)"
}

# This system's programs as an image.
make_image() {
    mkdir -p "$1"/{usr,etc,dev,proc,sys,run,tmp,here}
    for folder in bin lib lib64; do ln -s "usr/$folder" "$1/$folder"; done
}

containers_get_library_and_socket_from_the_specification() {
    # The monitor of a virtual machine: a process that reaches it commands the machine.
    touch /run/partywall/a.qmp
    expect "wrote /etc/cdi/partywall.json" partywall container setup
    # As docs/containers.md says.
    stop_broker
    broker_may CapabilityBoundingSet=CAP_NET_ADMIN
    start_broker
    [ -S /run/partywall/containers/broker.sock ] || fail "the broker has no socket for containers"
    cat >> /etc/partywall/partywalld.toml << 'POLICY'

# Root of containers is not root of the host.
[[join]]
domain = "container-*"
users = ["root"]

[[connect]]
from = "container-*"
to = "container-*"
POLICY
    reload_broker
    # Without an engine, so that every machine tests what the specification gives.
    local image=/tmp/plain-image
    make_image "$image"
    local contain=(unshare --mount --pid --fork --kill-child python3 /mnt/here/contain.py "$image")
    [ "$("${contain[@]}" container-a /bin/ls -A /run/partywall)" = broker.sock ] || fail "a container sees more than the broker's socket"
    refuse 1 "Read-only" "${contain[@]}" container-a /bin/rm -f /run/partywall/broker.sock
    expect '/usr/lib/partywall/$LIB/libpartywall_preload.so' "${contain[@]}" container-a /bin/sh -c 'echo "$LD_PRELOAD"'
    expect libpartywall_preload.so "${contain[@]}" container-a /bin/cat /proc/self/maps
    "${contain[@]}" container-server /usr/bin/python3 /here/server.py 7434 > "$state/plain-server" 2>&1 &
    local server=$!
    await "the container listens" bash -c 'exec 3<> /dev/tcp/127.0.0.1/7434'
    mkdir "$state/of-plain"
    "${contain[@]}" container-client /usr/bin/python3 /here/client.py 7434 /state/of-plain > "$state/plain-client" 2>&1 &
    local client=$!
    await "the connection between two containers moves to a ring" rings 7434
    touch "$state/of-plain/stop"
    wait "$client" || fail "the client in the container: $(cat "$state/plain-client")"
    kill "$server"
}

podman_runs=yes
containers_use_partywall_by_one_flag() {
    local image=/tmp/image
    make_image "$image"
    local run=(podman --cgroup-manager=cgroupfs run --rm --cgroups=disabled --network=host --ulimit nofile=1024:1024 --ulimit nproc=1000:1000
        --volume /usr:/usr:ro --volume /mnt/here:/here:ro --volume "$state:/state")
    if ! "${run[@]}" --rootfs "$image" /bin/true > /tmp/podman.log 2>&1; then
        echo "skipped: podman runs no container here: $(tail -n 1 /tmp/podman.log)"
        podman_runs=
        ignored=$((ignored + 1))
        return
    fi
    local device=(--device partywall.dev/host=all)
    expect "No such file" "${run[@]}" --rootfs "$image" /bin/sh -c 'ls /run/partywall 2>&1 || true'
    [ "$("${run[@]}" "${device[@]}" --rootfs "$image" /bin/ls -A /run/partywall)" = broker.sock ] || fail "a container sees more than the broker's socket"
    refuse 1 "Read-only" "${run[@]}" "${device[@]}" --rootfs "$image" /bin/rm -f /run/partywall/broker.sock
    expect '/usr/lib/partywall/$LIB/libpartywall_preload.so' "${run[@]}" "${device[@]}" --rootfs "$image" /bin/sh -c 'echo "$LD_PRELOAD"'
    "${run[@]}" "${device[@]}" --env PARTYWALL_DOMAIN=container-server --rootfs "$image" /usr/bin/python3 /here/server.py 7433 > "$state/container" 2>&1 &
    await "the container listens" bash -c 'exec 3<> /dev/tcp/127.0.0.1/7433'
    mkdir "$state/of-container"
    "${run[@]}" "${device[@]}" --env PARTYWALL_DOMAIN=container-client --rootfs "$image" /usr/bin/python3 /here/client.py 7433 /state/of-container > "$state/client" 2>&1 &
    await "the connection between two containers moves to a ring" rings 7433
    touch "$state/of-container/stop"
}

programs_of_an_old_c_library_are_accelerated() {
    local image=/mnt/old here there
    if [ ! -e "$image/usr/bin/python3" ]; then
        echo "skipped: there is no system with an older C library here"
        ignored=$((ignored + 1))
        return
    fi
    local contain=(unshare --mount --pid --fork --kill-child python3 /mnt/here/contain.py)
    here=$(getconf GNU_LIBC_VERSION) there=$("${contain[@]}" "$image" container-old /usr/bin/getconf GNU_LIBC_VERSION 2>&1) || fail "$there"
    [ "$here" != "$there" ] || fail "the container has the same C library: $there"
    make_image /tmp/new-image
    "${contain[@]}" /tmp/new-image container-new /usr/bin/python3 /here/server.py 7435 > "$state/new-server" 2>&1 &
    local server=$!
    await "the container with $here listens" bash -c 'exec 3<> /dev/tcp/127.0.0.1/7435'
    mkdir "$state/of-old"
    "${contain[@]}" "$image" container-old /usr/bin/python3 /here/client.py 7435 /state/of-old > "$state/old-client" 2>&1 &
    local client=$!
    await "the connection between containers with $there and $here moves to a ring" rings 7435
    touch "$state/of-old/stop"
    wait "$client" || fail "the client in the container: $(cat "$state/old-client")"
    kill "$server"
}

programs_of_musl_run_in_containers_and_report_tcp() {
    local image=/tmp/musl
    if [ ! -e /mnt/packages/musl/program ]; then
        echo "skipped: a program for musl cannot be made here; install musl-tools"
        ignored=$((ignored + 1))
        return
    fi
    mkdir -p "$image"/{lib,dev,proc,sys,run,tmp,etc}
    cp /mnt/packages/musl/program "$image/program"
    cp /mnt/packages/musl/ld-musl-x86_64.so.1 "$image/lib/"
    # Without an engine.
    local contain=(unshare --mount --pid --fork --kill-child python3 /mnt/here/contain.py "$image" container-musl /program)
    expect "the program runs" "${contain[@]}"
    expect "not glibc, so its connections stay on TCP" "${contain[@]}"
    # On the host, whose loaders may include that of musl.
    [ -e /lib/ld-musl-x86_64.so.1 ] || cp /mnt/packages/musl/ld-musl-x86_64.so.1 /lib/
    expect "it uses musl" partywall run "$image/program"
    expect "the program runs" partywall run "$image/program"
    [ -n "$podman_runs" ] || return 0
    local run=(podman --cgroup-manager=cgroupfs run --rm --cgroups=disabled --network=host --ulimit nofile=1024:1024 --ulimit nproc=1000:1000)
    local device=(--device partywall.dev/host=all)
    expect "the program runs" "${run[@]}" "${device[@]}" --rootfs "$image" /program
    expect "not glibc, so its connections stay on TCP" "${run[@]}" "${device[@]}" --rootfs "$image" /program
    # Why it is not the library that is named: musl's loader takes it, and the program does not start.
    refuse 127 "Error" "${run[@]}" --volume /usr/lib/partywall:/usr/lib/partywall:ro --env LD_PRELOAD=/usr/lib/partywall/libpartywall_preload.so --rootfs "$image" /program
}

purge_leaves_nothing() {
    touch "$state/stop"
    partywall disable web.service > /dev/null
    echo '# mine' >> /etc/systemd/system/db.service.d/50-partywall.conf
    refuse 1 "is not as" partywall disable db.service
    sed -i '$d' /etc/systemd/system/db.service.d/50-partywall.conf
    partywall disable db.service > /dev/null
    [ ! -e /etc/systemd/system/db.service.d ] || fail "the folder of the drop-in stays"
    refuse 3 "not enabled" partywall disable db.service
    [ ! -e /etc/cdi/partywall.json ] || partywall container remove > /dev/null
    rm /etc/systemd/system/{web,db}.service
    stop_broker
    broker_may
    dpkg --purge partywall partywalld partywall-agent partywall-gateway libpartywall-preload libpartywall0 libpartywall-dev > /tmp/dpkg.log 2>&1 || fail "$(tail -n 20 /tmp/dpkg.log)"
    local left
    left=$(find /mnt/upper -name '*partywall*' ! -type c -not -path '*/tmp/*') || true
    [ -z "$left" ] || fail "the purge leaves $left"
    left=$(find /run -name '*partywall*' -o -name 'broker.sock*')
    [ "$left" = /run/partywall ] || fail "the purge leaves $left (the socket of a virtual machine is all that should stay)"
    ! getent group partywall || fail "the purge leaves the group"
    # The two are what groupdel keeps of the files before it.
    ! grep -rl partywall /etc 2> /dev/null | grep -vE '^/etc/g(roup|shadow)-$' || fail "the purge leaves traces in /etc"
}

test_of packages_install_on_a_system_without_partywall
test_of services_of_two_users_meet_once_policy_allows
test_of workers_of_nginx_join_once_policy_allows
test_of list_of_programs_holds_while_services_run
test_of upgrade_of_broker_and_library_leaves_connections_alone
test_of metrics_graph_the_services
test_of tracked_connections_of_two_users_need_net_admin
test_of record_of_numbers_replaces_net_admin
test_of switch_of_a_unit_has_the_ports_of_its_file
test_of sysdump_has_no_payload_and_no_secrets
test_of containers_get_library_and_socket_from_the_specification
test_of containers_use_partywall_by_one_flag
test_of programs_of_an_old_c_library_are_accelerated
test_of programs_of_musl_run_in_containers_and_report_tcp
test_of purge_leaves_nothing
echo "test result: ok. $passed passed; 0 failed; $ignored ignored"
