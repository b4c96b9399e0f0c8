# shellcheck shell=bash
# Runs steps one after another, and prints at the end how many passed. Sourced by check.sh and test.sh.
#
#   step "name" command ...     runs the command and shows its output; continues even if it fails
#   beside "name" command ...   starts the command, to run beside the steps that follow, until `settle`
#   settle                      waits for all such commands, and shows the output of each; a command's time is until it last said something
#   summary                     what each failed step said, what steps and their tests have left out, the steps, and the last line,
#                               `N passed, N failed`; fails if any step did
#
# A step that runs cargo's tests counts each test; any other step counts as one. After a step's time stands the time that its processes were on
# processors: twice the step's on two processors that were never idle.

: "${TARGET_DIR:=$(realpath -m "${CARGO_TARGET_DIR:-target}")}"
export TARGET_DIR
# A step that takes longer than this hangs. The longest takes 2,000 s on one machine, and machines differ by a factor of two.
readonly STEP_LIMIT=${STEP_LIMIT:-2700}
# Beside other steps, a command has what they leave of the processors.
readonly BESIDE_LIMIT=$((2 * STEP_LIMIT))

steps_passed=0
steps_failed=0
steps_ignored=0
steps_broken=()
steps_table=()
steps_log=$(mktemp)
steps_said=$(mktemp)
steps_left_out=$(mktemp)
steps_times=$(mktemp)
steps_child=
# Of each command that runs beside, at the same place: its process, name, time of start, and the folder of its output and times.
beside_children=()
beside_names=()
beside_began=()
beside_folders=()
trap 'rm -rf "$steps_log" "$steps_times" "$steps_said" "$steps_left_out" "${beside_folders[@]}"' EXIT
# `timeout` puts a step into a process group of its own, so an interrupt must be passed on.
trap 'for child in $steps_child "${beside_children[@]}"; do kill -TERM "$child" 2> /dev/null; done; wait; exit 130' INT TERM

# timed SECONDS FILE COMMAND ...: runs the command for so long at most, and writes the time that its processes were on processors to the file. In
# the background only: it takes the shell's place, so that `$!` is the process that passes signals on.
timed() {
    exec timeout --kill-after=10 "$1" bash -c 'rc=0; "${@:2}" || rc=$?; times > "$1"; exit "$rc"' bash "${@:2}"
}

# In seconds; 0 if the command did not end by itself.
used() {
    awk -F '[ms ]+' 'NR == 2 { used = $1 * 60 + $2 + $3 * 60 + $4 } END { printf "%d", used }' "$1"
}

step() {
    local name=$1 began=$SECONDS rc=0
    shift
    printf '\n== %s\n' "$name"
    # Into a file that is shown as it grows, not into a pipe: a process that the step leaves behind would hold that open.
    : > "$steps_log"
    : > "$steps_times"
    timed "$STEP_LIMIT" "$steps_times" "$@" < /dev/null >> "$steps_log" 2>&1 &
    steps_child=$!
    tail -n +1 -s 0.1 --pid="$steps_child" -f "$steps_log" || true
    wait "$steps_child" || rc=$?
    steps_child=
    step_ended "$name" "$rc" $((SECONDS - began)) "$(used "$steps_times")" "$steps_log"
}

beside() {
    local name=$1 folder
    folder=$(mktemp -d)
    shift
    printf '\n== %s: beside what follows\n' "$name"
    : > "$folder/times"
    timed "$BESIDE_LIMIT" "$folder/times" "$@" < /dev/null > "$folder/log" 2>&1 &
    beside_children+=($!)
    beside_names+=("$name")
    beside_began+=("$(date +%s)")
    beside_folders+=("$folder")
}

settle() {
    local at rc log
    for at in "${!beside_children[@]}"; do
        rc=0
        log=${beside_folders[at]}/log
        wait "${beside_children[at]}" || rc=$?
        printf '\n== %s\n' "${beside_names[at]}"
        cat "$log"
        step_ended "${beside_names[at]}" "$rc" $(($(stat --format=%Y "$log") - beside_began[at])) "$(used "${beside_folders[at]}/times")" "$log"
        rm -r "${beside_folders[at]}"
    done
    beside_children=()
    beside_names=()
    beside_began=()
    beside_folders=()
}

# Counts a step with this name, status, time, time on processors and output.
step_ended() {
    local name=$1 rc=$2 took=$3 used=$4 log=$5 passed failed ignored verdict=ok
    [ "$rc" -ne 124 ] || echo "step \`$name\` did not end in time ($STEP_LIMIT s; beside others $BESIDE_LIMIT s)" | tee -a "$log"

    read -r passed failed ignored < <(awk '
        /^test result:/ { p += $4; f += $6; i += $8 }
        END { print p + 0, f + 0, i + 0 }' "$log")
    if [ "$rc" -ne 0 ]; then
        verdict=FAILED
        steps_broken+=("$name")
        { printf '\n== %s failed and said\n' "$name"; step_failures "$rc" "$log"; } >> "$steps_said"
        [ "$failed" -gt 0 ] || failed=1
    elif [ $((passed + failed + ignored)) -eq 0 ]; then
        passed=1
    fi
    steps_passed=$((steps_passed + passed))
    steps_failed=$((steps_failed + failed))
    steps_ignored=$((steps_ignored + ignored))
    # The name of a test may stand before it on the line.
    grep -ohE '(NOT TESTED|LEFT OUT|skipped|SKIPPED): .*' "$log" | sort -u | sed "s/^/$name: /" >> "$steps_left_out" || true
    steps_table+=("$(printf '%6s  %5d s  %5d s used  %5d passed  %3d failed  %s' "$verdict" "$took" "$used" "$passed" "$failed" "$name")")
    printf -- '-- %s: %s after %d s\n' "$name" "$verdict" "$took"
}

# What failed tests printed, at most 80 lines of each program, and errors of cargo, such as a program that a signal ended; of another step, and of
# one that did not end, its last lines. The arguments are the step's status and its output.
step_failures() {
    awk -v status="$1" '
        /^failures:$/ && !told { told = 1; lines = 0; next }
        /^failures:$/ || /^test result:/ { told = 0; next }
        /^error/ { rest = 6 }
        (told && lines++ < 80) || rest-- > 0 { print substr($0, 1, 400); any = 1 }
        { last[NR % 20] = substr($0, 1, 400) }
        END { if (!any || status == 124) for (i = NR - 19; i <= NR; i++) if (i > 0) print last[i % 20] }' "$2"
}

summary() {
    # Again: between it and the end lie the steps that came later, and who keeps only the end of the output would not see it.
    cat "$steps_said"
    [ ! -s "$steps_left_out" ] || { printf '\n== left out on this machine\n'; cat "$steps_left_out"; }
    printf '\n'
    printf '%s\n' "${steps_table[@]}"
    printf '%d s in all' "$SECONDS"
    [ "$steps_ignored" -eq 0 ] || printf '; %d tests not run, each states why' "$steps_ignored"
    printf '\n'
    [ ${#steps_broken[@]} -eq 0 ] || printf 'failed: %s\n' "${steps_broken[@]}"
    printf '%d passed, %d failed\n' "$steps_passed" "$steps_failed"
    [ ${#steps_broken[@]} -eq 0 ]
}
