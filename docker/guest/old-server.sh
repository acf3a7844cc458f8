#!/bin/sh
# The server that somebody left running: started at every boot while the fault `old-server` is on.
# $1 start|stop. Its log ends with an old ready line, as logs of long-running servers do.
set -eu
pidfile=/run/old-server.pid
log=/root/sglang.log
alive() { [ -s "$pidfile" ] && kill -0 "$(cat "$pidfile")" 2>/dev/null; }
case ${1:-} in
start)
    alive && exit 0
    {
        echo '[2026-09-14 08:11:02] server_args=ServerArgs(model_path=/srv/old/tiny-old, port=30000)'
        echo '[2026-09-14 08:12:31] INFO:     Uvicorn running on http://0.0.0.0:30000 (Press CTRL+C to quit)'
        echo '[2026-09-14 08:12:33] The server is fired up and ready to roll!'
    } >>"$log"
    cd /opt/old-server
    setsid python3 -m sglang.launch_server --model-path /srv/old/tiny-old \
        --served-model-name tiny-old --host 0.0.0.0 --port 30000 --tp-size 2 \
        </dev/null >>/dev/null 2>&1 &
    echo $! >"$pidfile"
    n=0
    until python3 -c 'import socket; socket.create_connection(("127.0.0.1", 30000), 1)' 2>/dev/null; do
        n=$((n + 1))
        [ $n -lt 50 ] || { echo "old server does not listen" >&2; exit 1; }
        sleep 0.1
    done
    ;;
stop)
    if alive; then kill "$(cat "$pidfile")"; fi
    n=0
    while alive; do
        n=$((n + 1))
        [ $n -lt 100 ] || { echo "old server does not end" >&2; exit 1; }
        sleep 0.1
    done
    rm -f "$pidfile"
    ;;
*) echo "usage: old-server.sh start|stop" >&2; exit 2 ;;
esac
