#!/usr/bin/env bash
# The tests of scripts/packages.sh, in the throw-away system, one after another. Each test continues from the state that the one before left.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive LC_ALL=C PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
unset PARTYWALL_BROKER PARTYWALL_DOMAIN PARTYWALL_MOVES TMPDIR
ulimit -n "$(ulimit -H -n)"
readonly state=/tmp/state
mkdir -m 777 "$state"
passed=0
ignored=0

fail() {
    echo "failed: $*" >&2
    [ ! -s /tmp/broker.log ] || tail -n 20 /tmp/broker.log >&2
    echo "test result: FAILED. $passed passed; 1 failed; $ignored ignored"
    exit 1
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
    for _ in $(seq 6000); do
        ! "$@" > /dev/null 2>&1 || return 0
        sleep 0.02
    done
    fail "never: $what"
}
start_broker() {
    partywalld >> /tmp/broker.log 2>&1 &
    broker=$!
    await "the broker answers" partywall list
}
stop_broker() {
    kill "$broker"
    wait "$broker" || true
}
# The variables that systemd would give the programs of a service: those of its drop-in, which has no escapes here.
variables_of() {
    sed -nE 's/^Environment="(.*)"$/\1/p' "/etc/systemd/system/$1.d/50-partywall.conf"
}
run_service() {
    local unit=$1 user=$2
    shift 2
    env $(variables_of "$unit") setpriv --reuid "$user" --regid "$user" --clear-groups "$@" > "$state/$unit.log" 2>&1 &
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
    partywall top --once --json | python3 -c '
import json, sys
rows = [row for row in json.load(sys.stdin)["connections"] if any(str(row.get(end, "")).endswith(":" + sys.argv[1]) for end in ("local", "peer"))]
sys.exit(0 if len([row for row in rows if row["way"] == "ring"]) >= 2 else 1)' "$1"
}
test_of() {
    "$1"
    passed=$((passed + 1))
    echo "test $1 ... ok"
}

packages_install_on_a_system_without_partywall() {
    dpkg -i /mnt/packages/old/*.deb > /tmp/dpkg.log 2>&1 || fail "$(tail -n 20 /tmp/dpkg.log)"
    expect "protocol: control" partywall --version
    expect "protocol: control" partywalld --version
    expect "a good policy" partywalld --check-policy
    expect partywall getent group partywall
    # What a policy is written from.
    expect partywalld.toml.5 dpkg -L partywalld
    expect '[[connect]]' partywalld --print-sample-policy
    expect libpartywall.so.0 ldconfig -p
    [ "$(stat -c %a:%U /run/partywall/containers)" = 755:root ] || fail "the folder for sockets has another mode or owner"
    systemd-analyze verify --man=no /lib/systemd/system/partywalld.service > /tmp/verify.log 2>&1 || fail "$(cat /tmp/verify.log)"
}

services_of_two_users_meet_once_policy_allows() {
    printf '[Service]\nUser=www-data\nExecStart=/usr/bin/python3 /mnt/here/client.py 7432 %s\n' "$state" > /etc/systemd/system/web.service
    printf '[Service]\nUser=games\nEnvironment=LD_PRELOAD=/usr/lib/x86_64-linux-gnu/libm.so.6\nExecStart=/usr/bin/python3 /mnt/here/server.py 7432\n' \
        > /etc/systemd/system/db.service
    refuse 3 "no service" partywall enable nothing.service
    expect "runs as www-data" partywall --domain web enable web.service
    expect "50-partywall.conf" partywall --domain db enable db
    [[ $(variables_of db.service) == *libpartywall_preload.so:/usr/lib/*/libm.so.6* ]] || fail "the service's own LD_PRELOAD is gone: $(variables_of db.service)"
    start_broker
    refuse 3 "refused" partywall policy test --from web --to db:tcp-7432 --user www-data
    run_service db.service games /usr/bin/python3 /mnt/here/server.py 7432
    await "the server listens" bash -c 'exec 3<> /dev/tcp/127.0.0.1/7432'
    run_service web.service www-data /usr/bin/python3 /mnt/here/client.py 7432 "$state"
    goes_on "on TCP, refused"
    expect "does not let user 33 join as web" partywall top --once --json
    expect "join-refused" partywall why :7432
    refuse 3 "no [[join]] rule" partywall policy test --from web --user www-data
    ! rings 7432 || fail "the connection is on a ring although no rule allows it"
    cat > /etc/partywall/partywalld.toml << 'POLICY'
[[join]]
domain = "web"
users = ["www-data"]

[[join]]
domain = "db"
users = ["games"]

[[connect]]
from = "web"
to = "db"
service = "tcp-7432"
POLICY
    expect "a good policy" partywalld --check-policy
    kill -HUP "$broker"
    await "the policy is in force" partywall policy test --from web --to db:tcp-7432 --user www-data
    await "the connection moves to a ring" rings 7432
    expect "[[connect]] rule 1" partywall policy test --from web --to db:tcp-7432 --user www-data
    expect "/etc/partywall/partywalld.toml:" partywall policy test --from web --to db:tcp-7432 --user www-data
}

list_of_programs_holds_while_services_run() {
    printf '\n[programs]\ndeny = ["python3*"]\n' >> /etc/partywall/partywalld.toml
    expect "a good policy" partywalld --check-policy
    kill -HUP "$broker"
    await "the connection returns to TCP" eval 'partywall why :7432 | grep -q program-not-listed'
    goes_on "on TCP, not listed"
    ! rings 7432 || fail "the connection is on a ring although its program is denied"
    refuse 3 '`deny` of [programs]' partywall policy test --program "$(realpath /usr/bin/python3)"
    # The broker reads where to serve metrics when it starts: with the upgrade below.
    sed -i '/^\[programs\]/,$d' /etc/partywall/partywalld.toml
    printf '[metrics]\nlisten = "127.0.0.1:9464"\n' >> /etc/partywall/partywalld.toml
    expect "a good policy" partywalld --check-policy
    kill -HUP "$broker"
    await "the connection is on a ring again" rings 7432
}

upgrade_of_broker_and_library_leaves_connections_alone() {
    local library=/usr/lib/partywall/libpartywall_preload.so before
    before=$(stat -L -c %i "$library")
    dpkg -i --force-confold /mnt/packages/new/*.deb > /tmp/dpkg.log 2>&1 || fail "$(tail -n 20 /tmp/dpkg.log)"
    [ "$(dpkg-query -W -f '${Version}' partywalld)" = 0.1.0+next ] || fail "the broker was not upgraded"
    [ "$(stat -L -c %i "$library")" != "$before" ] || fail "the library was written in place, under programs that use it"
    grep -q 'tcp-7432' /etc/partywall/partywalld.toml || fail "the upgrade replaced the policy"
    goes_on "after the upgrade of the library"
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

metrics_graph_the_services() {
    local page=/tmp/metrics totals=/tmp/totals.prom
    # The programs report the connection to the new broker once they have joined it again, later than `top` finds it in their own memory.
    await "the metrics have the connection" metrics_have_connection "$page"
    grep -q '^partywall_relay_bell_seconds_count' "$page" || fail "the metrics lack the relays' latency"
    partywall stat --total --metrics "$totals" > /tmp/totals.txt
    grep -q '^partywall_connections{kind="socket",way="ring"} 2$' "$totals" || fail "the totals lack the connection: $(cat "$totals")"
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
    ! grep -rqE '471[12]' /tmp/dump || fail "the dump has secrets: $(grep -rE '471[12]' /tmp/dump)"
}

containers_use_partywall_by_one_flag() {
    # The monitor of a virtual machine: a process that reaches it commands the machine.
    touch /run/partywall/a.qmp
    expect "wrote /etc/cdi/partywall.json" partywall container setup
    [ -S /run/partywall/containers/broker.sock ] || fail "the broker has not linked its socket for containers"
    # This system's programs as an image.
    local image=/tmp/image
    mkdir -p "$image"/{usr,etc,dev,proc,sys,run,tmp,here}
    for folder in bin lib lib64; do ln -s "usr/$folder" "$image/$folder"; done
    local run=(podman --cgroup-manager=cgroupfs run --rm --cgroups=disabled --network=host --ulimit nofile=1024:1024 --ulimit nproc=1000:1000
        --volume /usr:/usr:ro --volume /mnt/here:/here:ro --volume "$state:/state")
    if ! "${run[@]}" --rootfs "$image" /bin/true > /tmp/podman.log 2>&1; then
        echo "skipped: podman runs no container here: $(tail -n 1 /tmp/podman.log)"
        ignored=$((ignored + 1))
        return
    fi
    local device=(--device partywall.dev/host=all)
    expect "No such file" "${run[@]}" --rootfs "$image" /bin/sh -c 'ls /run/partywall 2>&1 || true'
    [ "$("${run[@]}" "${device[@]}" --rootfs "$image" /bin/ls -A /run/partywall)" = broker.sock ] || fail "a container sees more than the broker's socket"
    refuse 1 "Read-only" "${run[@]}" "${device[@]}" --rootfs "$image" /bin/rm -f /run/partywall/broker.sock
    expect '/usr/lib/partywall/$LIB/libpartywall_preload.so' "${run[@]}" "${device[@]}" --rootfs "$image" /bin/sh -c 'echo "$LD_PRELOAD"'

    cat >> /etc/partywall/partywalld.toml << 'POLICY'

# Root of containers is not root of the host.
[[join]]
domain = "container-*"
users = ["root"]

[[connect]]
from = "container-*"
to = "container-*"
POLICY
    kill -HUP "$broker"
    "${run[@]}" "${device[@]}" --env PARTYWALL_DOMAIN=container-server --rootfs "$image" /usr/bin/python3 /here/server.py 7433 > "$state/container" 2>&1 &
    await "the container listens" bash -c 'exec 3<> /dev/tcp/127.0.0.1/7433'
    mkdir "$state/of-container"
    "${run[@]}" "${device[@]}" --env PARTYWALL_DOMAIN=container-client --rootfs "$image" /usr/bin/python3 /here/client.py 7433 /state/of-container > "$state/client" 2>&1 &
    await "the connection between two containers moves to a ring" rings 7433
    touch "$state/of-container/stop"
}

programs_of_musl_run_in_containers_and_report_tcp() {
    local image=/tmp/musl
    mkdir -p "$image"/{lib,dev,proc,sys,run,tmp,etc}
    if ! command -v musl-gcc > /dev/null || ! podman --version > /dev/null; then
        echo "skipped: a program for musl cannot be made or run here; install musl-tools and podman"
        ignored=$((ignored + 1))
        return
    fi
    printf '#include <unistd.h>\nint main(void) { return write(1, "the program runs\\n", 17) != 17; }\n' > /tmp/program.c
    musl-gcc -o "$image/program" /tmp/program.c
    cp "$(realpath /lib/ld-musl-x86_64.so.1)" "$image/lib/ld-musl-x86_64.so.1"
    local run=(podman --cgroup-manager=cgroupfs run --rm --cgroups=disabled --network=host --ulimit nofile=1024:1024 --ulimit nproc=1000:1000)
    local device=(--device partywall.dev/host=all)
    expect "the program runs" "${run[@]}" "${device[@]}" --rootfs "$image" /program
    expect "not glibc, so its connections stay on TCP" "${run[@]}" "${device[@]}" --rootfs "$image" /program
    # Why it is not the library that is named: musl's loader takes it, and the program does not start.
    refuse 127 "Error" "${run[@]}" --volume /usr/lib/partywall:/usr/lib/partywall:ro --env LD_PRELOAD=/usr/lib/partywall/libpartywall_preload.so --rootfs "$image" /program
    expect "it uses musl" partywall run "$image/program"
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
    dpkg --purge partywall partywalld partywall-agent libpartywall-preload libpartywall0 libpartywall-dev > /tmp/dpkg.log 2>&1 || fail "$(tail -n 20 /tmp/dpkg.log)"
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
test_of list_of_programs_holds_while_services_run
test_of upgrade_of_broker_and_library_leaves_connections_alone
test_of metrics_graph_the_services
test_of sysdump_has_no_payload_and_no_secrets
test_of containers_use_partywall_by_one_flag
test_of programs_of_musl_run_in_containers_and_report_tcp
test_of purge_leaves_nothing
echo "test result: ok. $passed passed; 0 failed; $ignored ignored"
