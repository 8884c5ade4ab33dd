# Private, throw-away servers for tests and benchmarks: what scripts/postgres.sh and scripts/rabbitmq.sh share. They
# source this file; it is no command.
#
# Every server has a directory under target/servers:
#   KIND          the one of `start`
#   KIND.XXXXXX   one per `run`, so that two runs never share one. The run locks its directory for as long as it
#                 lives, so an unlocked directory was left by a killed run.
#
# A script that sources this sets
#   kind, product         the directories' first part, and the server's name for people
#   url_variable          the variable that CMD finds the server's URL in
# and has these functions, all but the first of which take a server's directory
#   need_programs         finds the server's programs, or installs them, or dies naming what is missing
#   boot                  makes a server in an empty directory and returns when it answers, or dies
#   is_running            whether it runs, and is really ours
#   url_of, log_of        print its URL, and the path of its log
#   discard               stops it and removes the directory, in whatever state they are
# shellcheck shell=bash disable=SC2154 # the sourcing script has set them

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
servers=$root/target/servers
by_hand=$servers/$kind

say() { echo "$kind.sh: $*" >&2; }
die() { say "$@"; exit 1; }

install_packages() {
    local packages=("$@")
    if [[ $EUID -ne 0 ]]; then
        die "$product is missing and only root can install it. Missing packages (Debian's names): ${packages[*]}"
    fi
    command -v apt-get >/dev/null || die "$product is missing and there is no apt-get to install it: ${packages[*]}"
    say "installing ${packages[*]}"
    # The timeout waits for another apt-get (a machine that is still being set up) instead of failing at once.
    apt-get update -qq >&2
    # Runlevel 1 keeps the package from starting a server where only SysV scripts would do that.
    RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive \
        apt-get -o DPkg::Lock::Timeout=300 install -y -qq "${packages[@]}" >&2
}

# A port to try, below 32768, where Linux begins to hand out ports for outgoing connections. Whether it is free shows
# when the server binds it: asking beforehand would be a race.
random_port() { echo $((20000 + RANDOM % 12000)); }

# Directories are created and removed under this lock only, so that a new one is not taken for a stale one. It is a lock
# on the directory itself: no lock file to lose or to clean up.
lock_servers() {
    mkdir -p "$servers"
    exec 9<"$servers"
    flock 9
}
unlock_servers() { exec 9<&-; }

# The locks must not be inherited: a server that outlives its run would seem to belong to a living one.
close_locks() { exec 8<&- 9<&-; }

discard_stale() {
    local dir
    for dir in "$servers/$kind".*/; do
        dir=${dir%/}
        [[ -d $dir ]] || continue
        if flock --nonblock "$dir" true; then
            say "removing what a killed run left: ${dir#"$root"/}"
            discard "$dir"
        fi
    done
}

# ---------------------------------------------------------------------------------------------------------------------
# Commands

start() {
    need_programs
    lock_servers
    discard_stale
    if ! is_running "$by_hand"; then
        discard "$by_hand"
        mkdir "$by_hand"
        # An incomplete server is removed: after an error, and on a signal.
        trap 'exit 130' INT TERM HUP
        trap 'discard "$by_hand"' EXIT
        boot "$by_hand"
        trap - EXIT
    fi
    url_of "$by_hand"
}

url() {
    is_running "$by_hand" || die "not running: start it with 'scripts/$kind.sh start'"
    url_of "$by_hand"
}

stop() {
    lock_servers
    discard "$by_hand"
}

clean() {
    lock_servers
    discard "$by_hand"
    discard_stale
}

run() {
    [[ $# -gt 0 ]] || die "run what? usage: $kind.sh run CMD…"
    need_programs
    if [[ -n ${!url_variable:-} ]]; then
        exec "$@"
    fi

    trap 'on_signal INT 130' INT
    trap 'on_signal TERM 143' TERM
    trap 'on_signal HUP 129' HUP
    trap finish EXIT
    lock_servers
    discard_stale
    mine=$(mktemp -d "$servers/$kind.XXXXXX")
    exec 8<"$mine"
    flock 8
    unlock_servers
    boot "$mine"
    printf -v "$url_variable" '%s' "$(url_of "$mine")"
    export "${url_variable?}"

    # In the background, because bash answers a signal only between two commands, but at once while it waits.
    # setsid gives CMD a group of its own, so that Ctrl-C reaches it once, through on_signal, and not once more from
    # the terminal: test runners take a second signal as "kill everything without cleaning up".
    # setpriv ends CMD when this script is killed with -9 and cannot do so itself.
    # env restores the signals that bash makes its background commands ignore.
    SEMEL_SERVER_DIR=$mine setpriv --pdeathsig TERM setsid env --default-signal=INT,QUIT -- "$@" <&0 8<&- &
    child=$!
    local code=0
    while true; do
        code=0
        wait "$child" || code=$?
        # A signal ends the waiting, but CMD may need time to end in order.
        kill -0 "$child" 2>/dev/null || break
    done
    if [[ $code -ne 0 ]] && cp "$(log_of "$mine")" "$servers/$kind-failed.log"; then
        say "exit code $code; $product's log is kept in target/servers/$kind-failed.log"
    fi
    exit "$code"
}

child=
mine=

on_signal() {
    [[ -n $child ]] || exit "$2"
    kill -"$1" -- "-$child" 2>/dev/null || true
}

finish() {
    # An impatient second Ctrl-C must not leave the server behind.
    trap '' INT TERM HUP
    lock_servers
    [[ -z $mine ]] || discard "$mine"
}

usage() {
    sed -n "/^# A private/,/^#\$/p; /^#   $kind.sh/p" "$0" | cut -c 3- >&2
    exit 2
}
