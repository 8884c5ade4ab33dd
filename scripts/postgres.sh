#!/usr/bin/env bash
# A private, throw-away PostgreSQL for tests and benchmarks. It never touches a server that it did not start.
#
#   postgres.sh run CMD…   start one, run CMD with SEMEL_TEST_POSTGRES_URL set, stop it, exit as CMD did
#   postgres.sh start      start one that stays until `stop` (for work by hand), print its URL
#   postgres.sh url        print the URL of the one that `start` left running
#   postgres.sh stop       stop that one and throw its data away
#   postgres.sh clean      stop that one, and those that killed runs left behind
#   postgres.sh bin        print the directory of PostgreSQL's programs, installing them if need be
#   postgres.sh pooler     print the path of PgBouncer, installing it if need be
#
# servers.sh documents the directories; `data` in a server's directory is its data directory.
set -euo pipefail

# shellcheck disable=SC2034 # they are for servers.sh
kind=postgres product=PostgreSQL url_variable=SEMEL_TEST_POSTGRES_URL
# shellcheck source=scripts/servers.sh
source "$(dirname "${BASH_SOURCE[0]}")/servers.sh"

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

# Sets `bin`, also for the crash tests, which kill and restart their own servers. SEMEL_TEST_POSTGRES_BIN names the
# directory of another version of PostgreSQL.
need_programs() {
    bin=${SEMEL_TEST_POSTGRES_BIN:-}
    if [[ -n $bin ]]; then
        [[ -x $bin/initdb && -x $bin/pg_ctl ]] || die "no initdb and pg_ctl in SEMEL_TEST_POSTGRES_BIN=$bin"
    elif ! bin=$(find_bin); then
        install_packages postgresql
        bin=$(find_bin) || die "the packages are installed, but initdb and pg_ctl are nowhere to be found"
    fi
    export SEMEL_TEST_POSTGRES_BIN=$bin
}

# Prints the path of PgBouncer, which the tests start themselves. Debian has it outside of a user's PATH.
find_pooler() {
    local path
    for path in /usr/sbin/pgbouncer /usr/bin/pgbouncer; do
        if [[ -x $path ]]; then
            echo "$path"
            return
        fi
    done
    return 1
}

pooler() {
    if ! find_pooler; then
        product=PgBouncer install_packages pgbouncer
        find_pooler || die "the package is installed, but pgbouncer is nowhere to be found"
    fi
}

# Runs one of PostgreSQL's programs as the server's owner: they refuse root, for whom the packages made `postgres`.
as_owner() {
    (
        close_locks
        # The caller's directory may be closed to `postgres`, and the caller's PG* variables refer to another server.
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
        # For a checkout in a home directory of mode 700, which `postgres` cannot enter. Not in /tmp, which may be in
        # memory: fsync costs nothing there, so tests of durability and benchmarks would prove nothing.
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
# Loopback only, since every connection is trusted. No Unix socket: its path is limited to 107 bytes.
listen_addresses = '127.0.0.1'
unix_socket_directories = ''
# The tests are about durability. These are the defaults, and must stay.
fsync = on
synchronous_commit = on
# Many tests at once, each with its own pool.
max_connections = 300
shared_buffers = '256MB'
# No checkpoint in the middle of a benchmark.
max_wal_size = '4GB'
checkpoint_timeout = '15min'
CONF

    for _ in {1..20}; do
        port=$(random_port)
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

# Prints the server's pid, if it is running and ours. The number in a stale postmaster.pid may belong to any process of
# this machine; a postmaster is recognised by its working directory, which is its data directory.
pid_of() {
    local data pid
    data=$(readlink -f "$1/data") || return 1
    pid=$(head -n 1 "$data/postmaster.pid" 2>/dev/null) || return 1
    [[ $pid =~ ^[0-9]+$ && $(readlink "/proc/$pid/cwd") == "$data" ]] || return 1
    echo "$pid"
}

is_running() { pid_of "$1" >/dev/null; }
log_of() { echo "$1/data/server.log"; }

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
        while is_running "$dir"; do
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

case ${1:-} in
    start | stop | url | clean | pooler) "$1" ;;
    run) shift && run "$@" ;;
    bin) need_programs && echo "$bin" ;;
    *) usage ;;
esac
