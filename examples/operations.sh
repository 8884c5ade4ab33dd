#!/bin/sh
# Runs a command once per process, task and arguments, on any machine that reaches Semel. It prints its result as JSON.
#   examples/operations.sh proc-123 Task_SubmitClaim ./submit.sh CLM-001
set -eu
url=${SEMEL_URL:-http://localhost:8080}/v1/operations process=$1 task=$2
shift 2
answer=$(mktemp) && trap 'rm -f "$answer"' EXIT
post() { # prints the status code; a claim token or a fence makes a repeat harmless
    curl -sS -m 30 --retry 9 --retry-max-time 99 --retry-all-errors -o "$answer" -w '%{http_code}' "$url$1" -d "$2" || :
}
number() { grep -o "\"$1\": *[0-9]*" "$answer" | head -n 1 | tr -dc 0-9; }
refused() { cat "$answer" >&2; exit 1; }
token=$(cat /proc/sys/kernel/random/uuid) hash=$(printf '%s\n' "$@" | sha256sum | cut -c 1-64)
claim='{"operationName":"run_command","processInstanceId":"'$process'","activityId":"'$task'","inputHash":"'$hash'",
    "claimToken":"'$token'","leaseSeconds":600}'
until start=$(date +%s) status=$(post "" "$claim") && [ "$status" = 201 ]; do
    [ "$status" != 200 ] || { cat "$answer"; exit; } # it ran before: its record, with the result
    grep -q '"retry_after"' "$answer" || refused     # in doubt, or out of attempts
    sleep "$(number retry_after)"                    # another one runs it, or it has just failed
done
id=$(number id) fence=$(number fence) code=0
result=$(timeout $((start + 540 - $(date +%s))) "$@") || code=$? # it must end before the lease does
case $code in
0) end=complete content="\"resultData\":${result:-null}" ;;
124) end=doubt content='"reason":"it took too long"' ;;     # a person decides
*) end=fail content='"errorMessage":"exit code '$code'"' ;; # the next call runs it again
esac
[ "$(post "/$id/$end" "{\"fence\":$fence,$content}")" = 200 ] || refused
cat "$answer" && exit "$code"
