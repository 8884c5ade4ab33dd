#!/usr/bin/env bash
# A private, throw-away PostgreSQL for tests and benchmarks. It never touches a server that it did not start.
#
#   postgres.sh run CMD…   start one, run CMD with SEMEL_TEST_POSTGRES_URL set, stop it, exit as CMD did
#   postgres.sh start      start one that stays until `stop` (for work by hand), print its URL
#   postgres.sh url        print the URL of the one that `start` left running
#   postgres.sh stop       stop that one and throw its data away
#   postgres.sh clean      stop that one, and those that killed runs left behind
#   postgres.sh bin        print the directory of PostgreSQL's programs, installing them if need be
#
# Every server has a directory under target/servers, and `data` in it is the server's data directory:
#   postgres          the one of `start`
#   postgres.XXXXXX   one per `run`, so that two runs never meet. The run holds a lock on its directory for as long
#                     as it lives, so a directory that nobody has locked was left by a killed run.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
servers=$root/target/servers
by_hand=$servers/postgres

say() { echo "postgres.sh: $*" >&2; }
die() { say "$@"; exit 1; }

# ---------------------------------------------------------------------------------------------------------------------
# PostgreSQL's programs

find_bin() {
    local dir
    # The Debian packages keep initdb and pg_ctl out of PATH, in a directory per major version; the newest comes first.
    while read -r dir; do
        if [[ -x $dir/initdb && -x $dir/pg_ctl ]]; then
            echo "$dir"
            return
        fi
    done < <(
        find /usr/lib/postgresql -mindepth 2 -maxdepth 2 -name bin 2>/dev/null | sort -rV
        pg_config --bindir 2>/dev/null
    )
    return 1
}

install_packages() {
    local packages=(postgresql)
    if [[ $EUID -ne 0 ]]; then
        die "PostgreSQL is missing and only root can install it. Missing packages (Debian's names): ${packages[*]}"
    fi
    command -v apt-get >/dev/null || die "PostgreSQL is missing and there is no apt-get to install it: ${packages[*]}"
    say "installing ${packages[*]}"
    # The timeout waits for another apt-get (a machine that is still setting itself up) instead of failing at once.
    apt-get update -qq >&2
    DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 install -y -qq "${packages[@]}" >&2
}

# Sets `bin`. A caller who wants another version of PostgreSQL names its directory in SEMEL_TEST_POSTGRES_BIN.
need_bin() {
    bin=${SEMEL_TEST_POSTGRES_BIN:-}
    if [[ -n $bin ]]; then
        [[ -x $bin/initdb && -x $bin/pg_ctl ]] || die "no initdb and pg_ctl in SEMEL_TEST_POSTGRES_BIN=$bin"
    elif ! bin=$(find_bin); then
        install_packages
        bin=$(find_bin) || die "the packages are installed, but initdb and pg_ctl are nowhere to be found"
    fi
}

# Runs one of PostgreSQL's programs as the server's owner: they refuse root, for whom the packages made `postgres`.
as_owner() {
    (
        # The locks must not be inherited: a server that outlives its run would seem to belong to a living one.
        exec 8<&- 9<&-
        # The caller's directory may be closed to `postgres`, and the caller's PG* variables mean another server.
        cd /
        unset "${!PG@}"
        if [[ $EUID -eq 0 ]]; then
            exec runuser -u postgres -- "$@"
        fi
        exec "$@"
    )
}

# ---------------------------------------------------------------------------------------------------------------------
# One server: all of these take its directory

# Makes the server's data directory, empty and owned by the user it will run as.
make_data_dir() {
    local dir=$1 elsewhere
    mkdir "$dir/data"
    [[ $EUID -eq 0 ]] || return 0
    chmod 755 "$dir"
    chown postgres: "$dir/data"
    if ! as_owner test -w "$dir/data"; then
        # A checkout in a home directory of mode 700: `postgres` cannot get there. Not in /tmp, which may be in memory:
        # fsync costs nothing there, and would make tests of durability pass, and benchmarks shine, for no reason.
        elsewhere=$(mktemp -d /var/tmp/semel-postgres.XXXXXX)
        chown postgres: "$elsewhere"
        rmdir "$dir/data"
        ln -s "$elsewhere" "$dir/data"
    fi
}

boot() {
    local dir=$1 data port said
    if [[ $EUID -eq 0 ]]; then
        id postgres >/dev/null 2>&1 || die "PostgreSQL refuses to run as root, and there is no user postgres to run it"
    fi
    make_data_dir "$dir"
    data=$(readlink -f "$dir/data")

    # --no-sync: an empty database that a power cut could spoil is no loss. The server itself does sync (below).
    as_owner "$bin/initdb" --pgdata="$data" --username=semel --auth=trust --encoding=UTF8 --locale=C --no-sync >/dev/null
    cat >>"$data/postgresql.conf" <<'CONF'
# Loopback only, since everyone who can connect is trusted. No Unix socket, whose path may have 107 bytes only.
listen_addresses = '127.0.0.1'
unix_socket_directories = ''
# Durability is what the tests are about. These are the defaults, and must stay.
fsync = on
synchronous_commit = on
# Many tests at once, each with its own pool.
max_connections = 300
shared_buffers = '256MB'
# No checkpoint in the middle of a benchmark.
max_wal_size = '4GB'
checkpoint_timeout = '15min'
CONF

    # A free port is one that the server could bind: asking beforehand would be a race. Below 32768, where Linux
    # begins to hand out ports for outgoing connections.
    for _ in {1..20}; do
        port=$((20000 + RANDOM % 12000))
        rm -f "$data/server.log"
        if said=$(as_owner "$bin/pg_ctl" start -D "$data" -l "$data/server.log" -o "-p $port" -w -t 60 2>&1); then
            as_owner "$bin/createdb" --host=127.0.0.1 --port="$port" --username=semel --maintenance-db=postgres semel
            return
        fi
        # Only a taken port is worth another try.
        grep -q 'could not create any TCP/IP sockets' "$data/server.log" || break
    done
    echo "$said" >&2
    cat "$data/server.log" >&2 || true
    die "PostgreSQL did not start; what it said is above"
}

# Prints the server's pid, if it is running and really ours. The number in a stale postmaster.pid may by now belong to
# any process of this machine; a postmaster is known by its working directory, which is its data directory.
pid_of() {
    local data pid
    data=$(readlink -f "$1/data") || return 1
    pid=$(head -n 1 "$data/postmaster.pid" 2>/dev/null) || return 1
    [[ $pid =~ ^[0-9]+$ && $(readlink "/proc/$pid/cwd") == "$data" ]] || return 1
    echo "$pid"
}

url_of() {
    local port
    # Line 4 of postmaster.pid is the port.
    port=$(sed -n 4p "$1/data/postmaster.pid")
    echo "postgres://semel@127.0.0.1:$port/semel"
}

# Stops the server and removes its directory, in whatever state they are.
discard() {
    local dir=$1 data pid waited=0
    if pid=$(pid_of "$dir"); then
        # SIGQUIT is "immediate shutdown": no checkpoint for data that is about to be removed.
        kill -QUIT "$pid"
        # The postmaster gives its children 5 s before it kills them.
        while pid_of "$dir" >/dev/null; do
            ((waited++ < 200)) || die "PostgreSQL (pid $pid) did not stop; its directory is $dir"
            sleep 0.1
        done
    fi
    data=$(readlink -f "$dir/data") || true
    if [[ $data == /var/tmp/semel-postgres.* ]]; then
        rm -rf "$data"
    fi
    rm -rf "$dir"
}

# ---------------------------------------------------------------------------------------------------------------------
# All servers of this checkout

# Directories are made and removed under this lock only, so that nobody takes one that is just being made for a stale
# one. It is a lock on the directory itself: no lock file to lose or to clean up.
lock_servers() {
    mkdir -p "$servers"
    exec 9<"$servers"
    flock 9
}
unlock_servers() { exec 9<&-; }

discard_stale() {
    local dir
    for dir in "$servers"/postgres.*/; do
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
    need_bin
    lock_servers
    discard_stale
    if ! pid_of "$by_hand" >/dev/null; then
        discard "$by_hand"
        mkdir "$by_hand"
        # Half a server is thrown away: after an error, and when somebody lost patience.
        trap 'exit 130' INT TERM HUP
        trap 'discard "$by_hand"' EXIT
        boot "$by_hand"
        trap - EXIT
    fi
    url_of "$by_hand"
}

url() {
    pid_of "$by_hand" >/dev/null || die "not running: start it with 'scripts/postgres.sh start'"
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
    [[ $# -gt 0 ]] || die "run what? usage: postgres.sh run CMD…"
    need_bin
    # For the crash tests, which kill and restart servers of their own.
    export SEMEL_TEST_POSTGRES_BIN=$bin
    if [[ -n ${SEMEL_TEST_POSTGRES_URL:-} ]]; then
        exec "$@"
    fi

    trap 'on_signal INT 130' INT
    trap 'on_signal TERM 143' TERM
    trap 'on_signal HUP 129' HUP
    trap finish EXIT
    lock_servers
    discard_stale
    mine=$(mktemp -d "$servers/postgres.XXXXXX")
    exec 8<"$mine"
    flock 8
    unlock_servers
    boot "$mine"
    SEMEL_TEST_POSTGRES_URL=$(url_of "$mine")
    export SEMEL_TEST_POSTGRES_URL

    # In the background, because bash answers a signal only between two commands, but at once while it waits.
    # setsid gives CMD a group of its own, so that Ctrl-C reaches it once, through on_signal, and not once more from
    # the terminal: test runners take a second signal as "kill everything without cleaning up".
    # setpriv ends CMD when this script is killed with -9 and cannot do so itself.
    # env restores the signals that bash makes its background commands ignore.
    setpriv --pdeathsig TERM setsid env --default-signal=INT,QUIT -- "$@" <&0 8<&- &
    child=$!
    local code=0
    while true; do
        code=0
        wait "$child" || code=$?
        # A signal ends the waiting, but CMD may need time to end in order.
        kill -0 "$child" 2>/dev/null || break
    done
    if [[ $code -ne 0 ]] && cp "$mine/data/server.log" "$servers/postgres-failed.log"; then
        say "exit code $code; PostgreSQL's log is kept in target/servers/postgres-failed.log"
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

case ${1:-} in
    start | stop | url | clean) "$1" ;;
    run) shift && run "$@" ;;
    bin) need_bin && echo "$bin" ;;
    *) sed -n '/^# A private/,/^#$/p; /^#   postgres.sh/p' "$0" | cut -c 3- >&2; exit 2 ;;
esac
