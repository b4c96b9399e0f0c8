#!/usr/bin/env bash
# Makes the picture of the dashboard: `dashboard.sh [OUT.svg]`, docs/grafana/partywall.svg by default.
#
# A broker, redis and its benchmark under `partywall run`, network connections without it, refused requests, and a while without rings run here for two minutes,
# while Debian's Prometheus reads the metrics. scripts/dashboard/picture.py then draws its answers to the queries of docs/grafana/partywall.json.
# The programs of target/debug must be built (PROFILE=release takes those of target/release).
set -euo pipefail
set -m
cd "$(dirname "${BASH_SOURCE[0]}")/.."
: "${TARGET_DIR:=$(realpath -m "${CARGO_TARGET_DIR:-target}")}"
out=${1:-docs/grafana/partywall.svg}
readonly SECONDS_SHOWN=110
programs=$TARGET_DIR/${PROFILE:-debug}
for needed in prometheus redis-server redis-benchmark python3; do
    command -v "$needed" > /dev/null || { echo "dashboard.sh: $needed is not installed" >&2; exit 1; }
done
work=$(mktemp -d "${TMPDIR:-/tmp}/partywall-dashboard-XXXXXX")
started=()
finish() {
    # Each was started as a process group, with what it starts.
    kill -- "${started[@]/#/-}" 2> /dev/null || true
    wait 2> /dev/null || true
    rm -rf "$work"
}
trap finish EXIT
background() {
    "$@" > "$work/log.${#started[@]}" 2>&1 &
    started+=($!)
}
port() {
    python3 -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])'
}
metrics=$(port) files=$(port) prometheus=$(port) redis=$(port) plain=$(port)
cat > "$work/policy.toml" << POLICY
administrators = [$(id -u)]
[metrics]
listen = "127.0.0.1:$metrics"
[sockets]
move = "after=64"
POLICY
cat > "$work/prometheus.yml" << CONFIG
scrape_configs:
- job_name: partywall
  scrape_interval: 1s
  static_configs:
  - targets: ['127.0.0.1:$metrics']
- job_name: totals
  scrape_interval: 1s
  metrics_path: /partywall.prom
  static_configs:
  - targets: ['127.0.0.1:$files']
CONFIG
export PARTYWALL_BROKER=$work/broker.sock
partywall() {
    "$programs/partywall" --broker "$work/broker.sock" "$@"
}
background "$programs/partywalld" --socket "$work/broker.sock" --policy "$work/policy.toml"
for _ in $(seq 200); do
    ! partywall list > /dev/null 2>&1 || break
    sleep 0.05
done
mkdir "$work/served"
background partywall stat --total --watch 1 --metrics "$work/served/partywall.prom"
background python3 -m http.server --bind 127.0.0.1 --directory "$work/served" "$files"
background prometheus --config.file="$work/prometheus.yml" --storage.tsdb.path="$work/data" --web.listen-address="127.0.0.1:$prometheus"
background partywall --domain cache run --quiet redis-server --port "$redis" --save ''
background redis-server --port "$plain" --save ''
sleep 3
load() {
    while true; do
        partywall --domain load run --quiet redis-benchmark -p "$redis" -c 8 -n 60000 -d 512 -t set,get -q || sleep 1
    done
}
strangers() {
    while true; do
        # Its server is not under Partywall.
        partywall --domain stranger run --quiet redis-benchmark -p "$plain" -c 3 -n 20000 -t get -q || sleep 1
        partywall --domain stranger cat cache:absent < /dev/null || true
        sleep 1
    done
}
background load
background strangers
background partywall --domain inbox cat -l mail --recv-only
sleep 45
partywall moves --mode never --for 25s > /dev/null
sleep 40
python3 scripts/dashboard/picture.py docs/grafana/partywall.json "http://127.0.0.1:$prometheus" "$SECONDS_SHOWN" "$out"
