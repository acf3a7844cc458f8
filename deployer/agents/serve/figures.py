"""The server's own figures: /server_info, /metrics, and the meta of /generate."""

from __future__ import annotations

import http.client
import re
from typing import Any

from deployer.agents.serve.web import BODY_LIMIT, request

Record = dict[str, Any]

RESOLVED = (
    "version",
    "status",
    "context_length",
    "max_total_num_tokens",
    "max_req_input_len",
    "reasoning_parser",
    "tp_size",
    "speculative_algorithm",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
)
STATES = ("last_gen_throughput", "avg_spec_accept_length", "effective_max_running_requests_per_dp")
SAMPLE = re.compile(r"^sglang:(\w+)(?:\{.*\})?\s+([0-9.eE+-]+)\s*$", re.MULTILINE)
WANTED = (
    "spec_accept_length",
    "spec_accept_rate",
    "gen_throughput",
    "num_running_reqs",
    "num_queue_reqs",
)


def server_info() -> Record:
    """What /server_info says, or its old name."""
    answer = request("GET", "/server_info")
    if answer["status"] == 404:
        answer = request("GET", "/get_server_info")
    body = answer.get("body")
    info: Record = {}
    if isinstance(body, dict):
        info = {name: body.get(name) for name in RESOLVED}
        states = body.get("internal_states")
        first = states[0] if isinstance(states, list) and states else {}
        if isinstance(first, dict):
            info.update({name: first.get(name) for name in STATES})
    return {"status": answer["status"], "info": info, "error": answer.get("error", "")}


def metrics() -> Record:
    """The gauges of /metrics that are judged; of several ranks the first. 404: not enabled."""
    answer = request("GET", "/metrics", read=_text)
    found: Record = {}
    for name, value in SAMPLE.findall(answer.get("text", "")):
        if name in WANTED and name not in found:
            found[name] = float(value)
    return {"status": answer["status"], "gauges": found, "error": answer.get("error", "")}


def _text(response: http.client.HTTPResponse) -> Record:
    return {"text": response.read(BODY_LIMIT).decode("utf-8", "replace")}


def generate(command: Record) -> Record:
    """One /generate at temperature 0: its `meta_info`, and the longest run of one token id."""
    body = {
        "text": command["prompt"],
        "sampling_params": {"temperature": 0, "max_new_tokens": int(command["max_tokens"])},
    }
    answer = request("POST", "/generate", body, command.get("timeout_s"))
    parsed = answer.get("body")
    if isinstance(parsed, list) and parsed:
        parsed = parsed[0]
    result: Record = {
        "status": answer["status"],
        "seconds": answer["seconds"],
        "error": answer.get("error", ""),
        "text": "",
        "meta": {},
        "run": {},
    }
    if answer["status"] == 200 and isinstance(parsed, dict):
        meta = parsed.get("meta_info")
        result["meta"] = meta if isinstance(meta, dict) else {}
        result["meta"].pop("spec_accept_histogram", None)
        result["text"] = str(parsed.get("text", ""))[:20000]
        ids = parsed.get("output_ids")
        result["run"] = longest_run(ids) if isinstance(ids, list) else {}
    elif not result["error"]:
        result["error"] = str(parsed or answer.get("text", ""))[:600]
    return result


def longest_run(ids: list[Any]) -> Record:
    """{id, begin, length} of the longest run of one id."""
    best: Record = {"id": None, "begin": 0, "length": 0}
    begin = 0
    for i in range(1, len(ids) + 1):
        if i < len(ids) and ids[i] == ids[begin]:
            continue
        if i - begin > best["length"]:
            best = {"id": ids[begin], "begin": begin, "length": i - begin}
        begin = i
    return best
