#!/usr/bin/env bash
# Asks a running router a handful of questions with curl: deploy/smoke.sh [URL]     (default http://127.0.0.1:8000)
# HAWK_API_KEY is sent where it is set. Exit status: 0 all answers are right, 1 one is not, 2 wrong usage.
set -uo pipefail

url=${1:-http://127.0.0.1:8000}
url=${url%/}
case $url in http://* | https://*) ;; *) echo "usage: $0 [URL]" >&2; exit 2 ;; esac
command -v curl >/dev/null || { echo "smoke: curl is not installed" >&2; exit 2; }

body=$(mktemp)
trap 'rm -f "$body"' EXIT
failed=0

ask() {  # METHOD PATH [JSON]: status in $status, content type in $type, answer in $body
    local args=(--silent --show-error --max-time 120 --output "$body" --write-out '%{http_code} %{content_type}')
    [ -n "${HAWK_API_KEY:-}" ] && args+=(--header "Authorization: Bearer $HAWK_API_KEY")
    [ $# -ge 3 ] && args+=(--header 'Content-Type: application/json' --data "$3")
    read -r status type < <(curl "${args[@]}" --request "$1" "$url$2"; echo) || true
}

has() { grep -Eq -- "$1" "$body"; }

check() {  # NAME CONDITION…: the condition is a command line; all must hold
    local name=$1 condition; shift
    for condition in "$@"; do
        if ! eval "$condition"; then
            printf 'FAIL  %s\n      does not hold: %s\n      HTTP %s, %s:\n' "$name" "$condition" "${status:-none}" "${type:-no type}"
            head -c 600 "$body" | sed 's/^/      /'; echo
            failed=$((failed + 1))
            return
        fi
    done
    printf 'ok    %s\n' "$name"
}

ask GET /ready
[ "${status:-000}" = 000 ] && { echo "smoke: no router answers at $url; is \`make up\` running, on this PORT?" >&2; exit 1; }
check 'ready' '[ "$status" = 200 ]'

ask GET /v1/models
check 'models' '[ "$status" = 200 ]' 'has "\"object\": ?\"list\""' 'has "\"id\": ?\""'
model=$(grep -oE '"id": ?"[^"]+"' "$body" | head -n 1 | sed -E 's/.*"([^"]+)"$/\1/')

ask POST /v1/completions "{\"model\": \"$model\", \"prompt\": \"The capital of France is\", \"max_tokens\": 8, \"temperature\": 0}"
check 'completion' '[ "$status" = 200 ]' '[[ $type == application/json* ]]' 'has "\"text\": ?\"[^\"]+"' \
    'has "\"completion_tokens\": ?[1-8][,}]"'

ask POST /v1/chat/completions "{\"model\": \"$model\", \"messages\": [{\"role\": \"user\", \"content\": \"Say hello.\"}], \"max_tokens\": 16}"
check 'chat' '[ "$status" = 200 ]' 'has "\"role\": ?\"assistant\""' 'has "\"content\": ?\"[^\"]+"' \
    'has "\"finish_reason\": ?\"(stop|length)\""'

ask POST /v1/chat/completions "{\"model\": \"$model\", \"messages\": [{\"role\": \"user\", \"content\": \"Count to five.\"}], \"max_tokens\": 16, \"stream\": true}"
check 'stream' '[ "$status" = 200 ]' '[[ $type == text/event-stream* ]]' 'has "^data: .*\"delta\""' \
    '[ "$(grep -c "^data: \[DONE\]" "$body")" = 1 ]' \
    '[ "$(grep "^data: " "$body" | tail -n 1 | tr -d "\r")" = "data: [DONE]" ]'

ask POST /v1/chat/completions '{"model": "no-such-model", "messages": [{"role": "user", "content": "x"}]}'
check 'error: unknown model' '[ "$status" = 404 ]' 'has "\"error\": ?[{]"' 'has "\"message\": ?\"[^\"]+"'

ask POST /v1/completions '{"model":'
check 'error: broken JSON' '[ "$status" = 400 ]' 'has "\"error\": ?[{]"'

[ "$failed" = 0 ] && echo "all well at $url" || echo "$failed of 7 failed at $url"
[ "$failed" = 0 ]
