"""Speaks to the server on its own machine, and looks at its processes. Standard library only.

Sent as text and run by the target's Python. Commands are JSON objects, one a line on stdin, or a
JSON list as the first argument; every answer is one JSON line: {"do": <command>, "ok": ..., ...}.
The API key comes in by stdin ({"do": "set", "api_key": ...}) or is read from the environment of the
server's own process; it is never printed. Every request has a deadline. Names of environment
proxies are ignored: the server is on this machine.
"""

# Plain paths and no pathlib: the names are the kernel's own.
# ruff: noqa: PTH115, PTH123, PTH208

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

Record = dict[str, Any]

KEY_VARIABLE = b"DEPLOYER_API_KEY="
BODY_LIMIT = 4_000_000
SETTINGS: Record = {"api_key": "", "host": "127.0.0.1", "port": 0, "timeout_s": 30.0}


def say(answer: Record) -> None:
    """One JSON line, at once."""
    sys.stdout.write(json.dumps(answer, ensure_ascii=True) + "\n")
    sys.stdout.flush()


def boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def stat_of(pid: int) -> Record | None:
    """{state, ppid, session, start} of a process, or None when there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return None
    fields: list[str] = text[text.rfind(")") + 2 :].split()
    return {
        "pid": pid,
        "state": fields[0],
        "ppid": int(fields[1]),
        "session": int(fields[3]),
        "start": int(fields[19]),
    }


def cmdline_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except OSError:
        return ""


def processes() -> dict[int, Record]:
    """The stat of every process that can be seen, by pid."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            stat = stat_of(int(name))
            if stat is not None:
                found[stat["pid"]] = stat
    return found


def is_running(stat: Record | None) -> bool:
    return stat is not None and stat["state"] not in "ZX"


def listening_inodes(port: int) -> set[str]:
    """Socket inodes that listen on `port`, IPv4 and IPv6."""
    inodes: set[str] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table) as file:
                rows = file.read().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            fields = row.split()
            if fields[3] == "0A" and int(fields[1].rsplit(":", 1)[1], 16) == port:
                inodes.add(fields[9])
    return inodes


def owners(inodes: set[str]) -> list[int]:
    """Pids that hold one of these sockets."""
    wanted = {f"socket:[{inode}]" for inode in inodes}
    pids = []
    for name in os.listdir("/proc"):
        if not (wanted and name.isdigit()):
            continue
        folder = f"/proc/{name}/fd"
        try:
            links = os.listdir(folder)
        except OSError:
            continue
        for link in links:
            try:
                target = os.readlink(folder + "/" + link)
            except OSError:
                continue
            if target in wanted:
                pids.append(int(name))
                break
    return sorted(pids)


def identity(command: Record) -> Record:
    """Is the job's process the one that was started, who is in its session, who has the port?"""
    # Session 0 is one whose leader lives outside this PID namespace: it groups nothing here.
    pid, session = int(command["pid"]), int(command.get("session") or command["pid"])
    stat = stat_of(pid)
    same = (
        stat is not None
        and is_running(stat)
        and stat["start"] == int(command["start"])
        and boot_id() == command["boot"]
    )
    members = [
        {"pid": one["pid"], "start": one["start"], "title": cmdline_of(one["pid"])[:200]}
        for one in processes().values()
        if is_running(one) and (one["session"] == session or (same and one["pid"] == pid))
    ]
    inodes = listening_inodes(SETTINGS["port"])
    holding = owners(inodes)
    ours = {member["pid"] for member in members}
    return {
        "alive": bool(same),
        "members": sorted(members, key=lambda member: member["pid"]),
        "listening": bool(inodes),
        "owners": [{"pid": one, "title": cmdline_of(one)[:300]} for one in holding],
        "owned": bool(same and holding and set(holding) <= ours),
    }


def set_key_from_server(seen: Record) -> None:
    """Takes the API key from the environment of the process that owns the port, when it is ours."""
    if SETTINGS["api_key"] or not seen["owned"]:
        return
    for one in seen["owners"]:
        try:
            with open(f"/proc/{one['pid']}/environ", "rb") as file:
                entries = file.read().split(b"\0")
        except OSError:
            continue
        for entry in entries:
            if entry.startswith(KEY_VARIABLE):
                SETTINGS["api_key"] = entry[len(KEY_VARIABLE) :].decode("utf-8", "replace")
                return


class Deadline(Exception):
    """The request ran over its time."""


def request(
    method: str, path: str, body: Record | None = None, timeout_s: float | None = None
) -> Record:
    """{status, seconds, body} or {status: 0, error}. The deadline covers the whole exchange."""
    limit = float(timeout_s or SETTINGS["timeout_s"])
    began = time.monotonic()
    connection = http.client.HTTPConnection(SETTINGS["host"], SETTINGS["port"], timeout=limit)
    expired = threading.Event()

    def cut() -> None:
        expired.set()
        sock = connection.sock
        if sock is not None:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                return

    timer = threading.Timer(limit, cut)
    timer.daemon = True
    timer.start()
    try:
        headers = {"Content-Type": "application/json", "Connection": "close"}
        if SETTINGS["api_key"]:
            headers["Authorization"] = "Bearer " + SETTINGS["api_key"]
        payload = None if body is None else json.dumps(body).encode()
        connection.request(method, path, payload, headers)
        response = connection.getresponse()
        data = response.read(BODY_LIMIT)
        if expired.is_set():
            raise Deadline()
        text = data.decode("utf-8", "replace")
        try:
            parsed = json.loads(text) if text else None
        except ValueError:
            parsed = None
        return {
            "status": response.status,
            "seconds": round(time.monotonic() - began, 4),
            "body": parsed,
            "text": "" if parsed is not None else text[:2000],
        }
    except (Deadline, OSError, http.client.HTTPException) as error:
        late = expired.is_set() or isinstance(error, (Deadline, socket.timeout))
        reason = f"no answer within {limit:g} s" if late else f"{type(error).__name__}: {error}"
        return {
            "status": 0,
            "seconds": round(time.monotonic() - began, 4),
            "error": reason,
            "timed_out": late,
        }
    finally:
        timer.cancel()
        connection.close()


def models() -> Record:
    """The ids that /v1/models lists."""
    answer = request("GET", "/v1/models")
    body = answer.get("body")
    ids: list[Any] = []
    if isinstance(body, dict) and isinstance(body.get("data"), list):
        ids = [one.get("id") for one in body["data"] if isinstance(one, dict)]
    return {"status": answer["status"], "ids": ids, "error": answer.get("error", "")}


def completion(command: Record) -> Record:
    """One chat completion. {status, content, reasoning, finish_reason, tokens, seconds, error}."""
    body = {
        "model": command["model"],
        "messages": [{"role": "user", "content": command["prompt"]}],
        "max_tokens": int(command["max_tokens"]),
    }
    for name in ("temperature", "seed", "chat_template_kwargs"):
        if command.get(name) is not None:
            body[name] = command[name]
    answer = request("POST", "/v1/chat/completions", body, command.get("timeout_s"))
    result = {
        "status": answer["status"],
        "seconds": answer["seconds"],
        "content": None,
        "reasoning": None,
        "finish_reason": None,
        "tokens": None,
        "error": answer.get("error", ""),
    }
    parsed: Any = answer.get("body")
    try:
        choice = parsed["choices"][0]
        message = choice["message"]
        result["content"] = message.get("content")
        result["reasoning"] = message.get("reasoning_content") or message.get("reasoning")
        result["finish_reason"] = choice.get("finish_reason")
        result["tokens"] = (parsed.get("usage") or {}).get("completion_tokens")
    except (KeyError, IndexError, TypeError, AttributeError):
        if not result["error"]:
            shown = json.dumps(parsed) if parsed is not None else answer.get("text", "")
            result["error"] = shown[:600] or "an empty answer"
    return result


def burst(command: Record) -> Record:
    """`count` completions, `parallel` at a time; stops early when `deadline_s` is over."""
    prompts = command["prompts"]
    count, parallel = int(command["count"]), int(command["parallel"])
    ends = time.monotonic() + float(command.get("deadline_s") or 600)
    results: list[Record] = []
    lock, todo = threading.Lock(), iter(range(count))

    def work() -> None:
        while time.monotonic() < ends:
            with lock:
                number = next(todo, None)
            if number is None:
                return
            one = dict(command, prompt=prompts[number % len(prompts)])
            answer = dict(completion(one), number=number, prompt=one["prompt"])
            with lock:
                results.append(answer)

    began = time.monotonic()
    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(parallel, count))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, ends - time.monotonic()) + float(command.get("timeout_s") or 30) + 5)
    with lock:
        done = sorted(results, key=lambda one: one["number"])
    return {"results": done, "seconds": round(time.monotonic() - began, 3), "asked": count}


def server_info() -> Record:
    """What /server_info says, or its old name."""
    answer = request("GET", "/server_info")
    if answer["status"] == 404:
        answer = request("GET", "/get_server_info")
    body = answer.get("body")
    info: Record = {}
    if isinstance(body, dict):
        for name in ("max_total_num_tokens", "version", "status", "speculative_algorithm"):
            info[name] = body.get(name)
        info["num_draft_tokens"] = body.get("speculative_num_draft_tokens")
        states = body.get("internal_states")
        first = states[0] if isinstance(states, list) and states else {}
        if isinstance(first, dict):
            for name in (
                "last_gen_throughput",
                "avg_spec_accept_length",
                "effective_max_running_requests_per_dp",
            ):
                info[name] = first.get(name)
    return {"status": answer["status"], "info": info, "error": answer.get("error", "")}


def stop(command: Record) -> Record:
    """TERM, deadline, KILL to one process and then to what is left of its children and session.

    Only processes whose start time was read before are signalled, through pidfds, so that a pid
    that was given away since is never hit.
    """
    pid, start = int(command["pid"]), int(command["start"])
    if boot_id() != command["boot"]:
        return {"stopped": True, "how": "already gone", "survivors": []}
    table = processes()
    target = table.get(pid)
    if target is None or not is_running(target) or target["start"] != start:
        return {"stopped": True, "how": "already gone", "survivors": []}
    leads = target["session"] == pid
    family: dict[int, int] = {}

    def grow() -> None:
        """Adds descendants, and the rest of the session when the process leads it."""
        seen = processes()
        root = seen.get(pid)
        if root is not None and root["start"] == start:
            family[pid] = start
        added = True
        while added:
            added = False
            for one in seen.values():
                known = family.get(one["ppid"]) is not None and same(one["ppid"], seen)
                session = leads and one["session"] == pid
                if one["pid"] not in family and (known or session) and one["pid"] != os.getpid():
                    family[one["pid"]] = one["start"]
                    added = True

    def same(one: int, seen: dict[int, Record]) -> bool:
        return one in seen and seen[one]["start"] == family.get(one)

    def left() -> list[int]:
        seen = processes()
        return [one for one in family if same(one, seen) and is_running(seen[one])]

    def send(one: int, number: int) -> None:
        try:
            handle = os.pidfd_open(one)
        except ProcessLookupError:
            return
        except (OSError, AttributeError):  # a kernel or a Python without pidfds
            handle = -1
        try:
            stat = stat_of(one)
            if stat is None or stat["start"] != family[one]:
                return
            if handle >= 0:
                signal.pidfd_send_signal(handle, number)
            else:
                os.kill(one, number)
        except ProcessLookupError:
            return
        finally:
            if handle >= 0:
                os.close(handle)

    def wait(seconds: float, only: int | None) -> bool:
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            grow()
            if not [one for one in left() if only is None or one == only]:
                return True
            time.sleep(0.1)
        return False

    grow()
    send(pid, signal.SIGTERM)
    how = "TERM"
    wait(float(command["grace_s"]), pid)
    grow()
    if left():
        how = "KILL"
        for one in left():
            send(one, signal.SIGKILL)
        wait(float(command["kill_s"]), None)
    survivors = []
    for one in left():
        state = (stat_of(one) or {"state": "gone"})["state"]
        survivors.append(f"pid {one}, state {state}: {cmdline_of(one)}")
    return {"stopped": not survivors, "how": how, "survivors": survivors}


def light(command: Record) -> Record:
    """The quick proof that a launch which has passed its gates still serves."""
    seen = identity(command)
    set_key_from_server(seen)
    answer = {"alive": seen["alive"], "owned": seen["owned"], "owners": seen["owners"]}
    if not seen["owned"]:
        return answer
    answer["models"] = models()
    answer["completion"] = completion(
        {
            "model": command["model"],
            "prompt": "Say hello.",
            "max_tokens": 8,
            "temperature": 0,
            "timeout_s": command.get("timeout_s"),
        }
    )
    return answer


def ready(command: Record) -> Record:
    """Whether the server that owns the port is ours and serves the model."""
    seen = identity(command)
    set_key_from_server(seen)
    answer = dict(seen)
    if seen["owned"]:
        answer["models"] = models()
        answer["health"] = request("GET", "/health")["status"]
    return answer


def perform(command: Record) -> Record | None:
    """The answer to one command; None for `set`."""
    for name in SETTINGS:
        if name in command:
            SETTINGS[name] = type(SETTINGS[name])(command[name])
    do = command.get("do")
    if do == "set":
        return None
    if do == "identity":
        return identity(command)
    if do == "ready":
        return ready(command)
    if do == "light":
        return light(command)
    if do == "health":
        return request("GET", "/health")
    if do == "models":
        return models()
    if do == "completion":
        return completion(command)
    if do == "burst":
        return burst(command)
    if do == "server_info":
        return server_info()
    if do == "stop":
        return stop(command)
    raise ValueError(f"unknown command: {do!r}")


def main() -> None:
    """Answers every command; a broken one is answered with its error."""
    if len(sys.argv) > 1:
        commands: Iterator[Record] = iter(json.loads(sys.argv[1]))
    else:
        commands = (json.loads(line) for line in sys.stdin if line.strip())
    command: Record
    for command in commands:
        try:
            answer = perform(command)
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = f"{type(error).__name__}: {error}"
            say({"do": command.get("do"), "ok": False, "error": reason})
            continue
        if answer is not None:
            say(dict(answer, do=command.get("do"), ok=True))


if __name__ == "__main__":
    main()
