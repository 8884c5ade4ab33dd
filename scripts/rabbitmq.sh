#!/usr/bin/env bash
# A private, throw-away RabbitMQ for tests and benchmarks. It never touches a node that it did not start.
#
#   rabbitmq.sh run CMD…        start one, run CMD with SEMEL_TEST_RABBITMQ_URL set, stop it, exit as CMD did
#   rabbitmq.sh start           start one that stays until `stop` (for work by hand), print its URL
#   rabbitmq.sh url             print the URL of the one that `start` left running
#   rabbitmq.sh stop            stop that one and throw its data away
#   rabbitmq.sh clean           stop that one, and those that killed runs left behind
#   rabbitmq.sh ctl DIR ARGS…   rabbitmqctl for the node of a directory
#   rabbitmq.sh kill DIR        end the node of a directory with SIGKILL, and keep its data
#   rabbitmq.sh again DIR       start it again on that data, with the same ports
#
# servers.sh documents the directories. DIR is target/servers/rabbitmq for the one of `start`; CMD finds its own in
# SEMEL_SERVER_DIR. A DIR/extra.conf is read after the node's own configuration, by `again` at the latest.
set -euo pipefail

# shellcheck disable=SC2034 # they are for servers.sh
kind=rabbitmq product=RabbitMQ url_variable=SEMEL_TEST_RABBITMQ_URL
# shellcheck source=scripts/servers.sh
source "$(dirname "${BASH_SOURCE[0]}")/servers.sh"

# Debian's own commands in PATH require root or the user rabbitmq, and use the system's node. These do not.
bin=/usr/lib/rabbitmq/bin

need_programs() {
    if [[ ! -x $bin/rabbitmq-server ]] || ! command -v epmd >/dev/null; then
        install_packages rabbitmq-server
        [[ -x $bin/rabbitmq-server ]] || die "the package is installed, but $bin/rabbitmq-server is not there"
    fi
}

# ---------------------------------------------------------------------------------------------------------------------
# One server: all of these take its directory

# Enters a node's directory and environment, in a subshell that then executes one of RabbitMQ's programs. Everything
# that a node reads or writes is in its directory, and nothing of the system's node (its variables, its files in
# /etc/rabbitmq, its name server) reaches it.
enter() {
    local dir=$1 port dist_port epmd_port
    close_locks
    cd "$dir"
    unset "${!RABBITMQ_@}" "${!ERL_@}"
    # shellcheck source=/dev/null
    source "$dir/ports"
    export HOME=$dir ERL_EPMD_PORT=$epmd_port ERL_EPMD_ADDRESS=127.0.0.1
    export RABBITMQ_NODENAME=semel@localhost RABBITMQ_NODE_PORT=$port RABBITMQ_DIST_PORT=$dist_port
    export RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS='-kernel inet_dist_use_interface {127,0,0,1}'
    export RABBITMQ_MNESIA_BASE=$dir/data RABBITMQ_LOG_BASE=$dir/log RABBITMQ_LOGS=$dir/log/server.log
    export RABBITMQ_CONFIG_FILE=$dir/rabbitmq.conf RABBITMQ_CONFIG_FILES=$dir/extra.conf
    export RABBITMQ_ADVANCED_CONFIG_FILE=$dir/advanced.config RABBITMQ_CONF_ENV_FILE=$dir/rabbitmq-env.conf
    export RABBITMQ_ENABLED_PLUGINS_FILE=$dir/enabled_plugins RABBITMQ_PLUGINS_EXPAND_DIR=$dir/plugins
    export RABBITMQ_GENERATED_CONFIG_DIR=$dir/generated RABBITMQ_PID_FILE=$dir/node.pid
}

boot() {
    local dir=$1 port
    mkdir "$dir/data" "$dir/log"
    # No plugins: they take time to start, and ports.
    echo '[].' >"$dir/enabled_plugins"
    touch "$dir/rabbitmq-env.conf" "$dir/extra.conf"
    for _ in {1..20}; do
        port=$(random_port)
        echo "port=$port dist_port=$(random_port) epmd_port=$(random_port)" >"$dir/ports"
        cat >"$dir/rabbitmq.conf" <<CONF
# Loopback only, since the password is RabbitMQ's well-known one.
listeners.tcp.default = 127.0.0.1:$port
# A nearly full disk is no reason to block the tests.
disk_free_limit.absolute = 100MB
CONF
        if launch "$dir"; then
            return
        fi
        # Only a taken port is worth another try.
        grep -qsiE 'eaddrinuse|address already in use' "$dir/log/"* "$dir/epmd.log" || break
    done
    tail -n 40 "$dir/log/"* >&2 || true
    die "RabbitMQ did not start; what it said is above"
}

# Starts the node, and its own name server before it, and waits until it answers.
launch() {
    local dir=$1 epmd_port port waited=0
    # shellcheck source=/dev/null
    source "$dir/ports"
    # In the foreground of its own session: as a daemon it would leave its directory, by which it is recognised.
    (enter "$dir" && exec setsid epmd -port "$epmd_port" -address 127.0.0.1) >"$dir/epmd.log" 2>&1 </dev/null &
    (enter "$dir" && exec setsid "$bin/rabbitmq-server") >"$dir/log/console.log" 2>&1 </dev/null &
    # Keeps bash from reporting their end.
    disown -a
    while ! answers "$port"; do
        # Half a minute is long even for a busy machine, but the server may fail long before.
        if ((waited++ > 600)) || { ((waited > 20)) && ! kill -0 $! 2>/dev/null; }; then
            halt "$dir"
            return 1
        fi
        sleep 0.1
    done
}

# Whether something that speaks AMQP listens on a port: it answers the protocol's greeting with a method frame.
answers() {
    local byte
    byte=$(timeout 2 bash -c "
        exec 3<>/dev/tcp/127.0.0.1/$1 && printf 'AMQP\x00\x00\x09\x01' >&3 && head -c 1 <&3 | od -An -tu1
    " 2>/dev/null) && [[ $byte -eq 1 ]]
}

# Prints the pids of the processes in a server's directory: the node, its helpers and its name server. The numbers in
# stale pid files may belong to any process of this machine; ours are recognised by their working directory.
pids_of() {
    local dir pid
    dir=$(readlink -f "$1") || return 0
    for pid in /proc/[0-9]*; do
        if [[ $(readlink "$pid/cwd" 2>/dev/null) == "$dir" ]] &&
            grep -qzxF "RABBITMQ_MNESIA_BASE=$dir/data" "$pid/environ" 2>/dev/null; then
            echo "${pid#/proc/}"
        fi
    done
}

# Ends all of them. SIGKILL: there is nothing to be saved.
halt() {
    local dir=$1 pids waited=0
    while pids=$(pids_of "$dir") && [[ -n $pids ]]; do
        # shellcheck disable=SC2086 # one word per pid
        kill -KILL $pids 2>/dev/null || true
        ((waited++ < 100)) || die "RabbitMQ did not stop; its directory is $dir"
        sleep 0.1
    done
}

is_running() {
    local port
    [[ -f $1/ports && -n $(pids_of "$1") ]] || return 1
    # shellcheck source=/dev/null
    source "$1/ports"
    answers "$port"
}

log_of() { echo "$1/log/server.log"; }

url_of() {
    local port
    # shellcheck source=/dev/null
    source "$1/ports"
    echo "amqp://guest:guest@127.0.0.1:$port/%2f"
}

discard() {
    halt "$1"
    rm -rf "$1"
}

# ---------------------------------------------------------------------------------------------------------------------

# A directory that is named on the command line.
named() {
    [[ -f ${1:-}/ports ]] || die "no server in '${1:-}'"
    readlink -f "$1"
}

case ${1:-} in
    start | stop | url | clean) "$1" ;;
    run) shift && run "$@" ;;
    ctl) dir=$(named "${2:-}") && (enter "$dir" && exec "$bin/rabbitmqctl" "${@:3}") ;;
    kill) dir=$(named "${2:-}") && halt "$dir" ;;
    again) dir=$(named "${2:-}") && { launch "$dir" || die "RabbitMQ did not start again: see $(log_of "$dir")"; } ;;
    *) usage ;;
esac
