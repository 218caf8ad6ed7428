#!/bin/sh
# The server without any client library.
#
#   paceline serve Qwen/Qwen2.5-0.5B-Instruct
#   sh examples/curl.sh [BASE_URL]
set -eu
base=${1:-http://127.0.0.1:8000/v1}

# -f fails on an error's status; leave it out to read the server's message.
post() { curl -fsSN "$base/$1" -H 'Content-Type: application/json' -d "$2"; echo; }

curl -fsS "$base/models"; echo
post chat/completions '{"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 16}'
# Token by token, and what was used at the end.
post chat/completions '{"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 16,
  "stream": true, "stream_options": {"include_usage": true}}'
# A text completion that must be one of three words.
post completions '{"prompt": "The sky is", "guided_choice": ["blue", "grey", "dark"]}'
