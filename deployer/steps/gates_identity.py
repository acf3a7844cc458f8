"""Is it the right server with all its weights, and is it still there after the load?"""

from __future__ import annotations

from deployer.sglang.mtphead import headless
from deployer.steps.gates_bench import Bench, GateFault
from deployer.steps.gates_judge import Fault, Record, refused
from deployer.steps.gates_memory import gpu_use, grown
from deployer.steps.gates_speculation import wanted
from deployer.steps.launch_wait import is_ready
from deployer.steps.verify_prompts import HELLO

HEALTHY_S = 180.0
"""How long a server that listens may still warm up."""
HEALTH_TIMEOUT_S = 20.0
"""Within which SGLang itself waits for a token; asking faster piles up requests in it."""
QUICK_S = 5.0
ALIVE_EVERY_S = 5.0


def identity(bench: Bench) -> str:
    """Our pid owns the port, its workers are there, /v1/models says our model, and it answers."""
    ends = bench.now() + HEALTHY_S
    while True:
        seen = bench.one({"do": "ready", **bench.who(), "timeout_s": 25}, 90)
        _ours(bench, seen)
        if is_ready(seen, bench.served):
            break
        if bench.now() >= ends:
            models = (seen.get("models") or {}).get("ids")
            raise GateFault(
                Fault("request", f"not healthy: /health {seen.get('health')}, models {models}")
            )
        slow = float(seen.get("health_s") or 0) > QUICK_S
        bench.sleep(HEALTH_TIMEOUT_S if slow else 2.0)
    bench.info = bench.one({"do": "server_info", "timeout_s": 20}, 60).get("info") or {}
    told = (seen["models"].get("context") or {}).get(bench.served)
    bench.context_tokens = told if isinstance(told, int) else 0
    bench.members = server_members(seen, bench.job.pid)
    _all_ranks(bench, seen)
    answer = bench.answer(bench.request(HELLO, 16))
    if fault := refused(answer):
        why = f"{fault.why}, although /health and /v1/models say 200"
        raise GateFault(Fault("request", why, fault.evidence))
    count = len(bench.members)
    return f"pid {bench.job.pid} owns the port and serves {bench.served}; {count} processes"


def weights(bench: Bench) -> str:
    """Every file of the index and of the pinned list is whole; a head for MTP where one is used."""
    want, manifest = bench.context.want, bench.context.state.manifest
    files = [[one.path, one.size] for one in manifest.files] if manifest is not None else []
    command = {"do": "weights", "path": want.playbook.model.path, "files": files}
    found = bench.one(command, 180)
    bad = [f"{name} is missing" for name in found["missing"]] + found["wrong"] + found["cut"]
    if bad:
        raise GateFault(
            Fault(
                "config",
                f"the weights on the target are not whole: {bad[0]}",
                "\n".join(bad),
                f"`deploy up {want.id} --from shards` brings them, `deploy restart` loads them",
            )
        )
    if wanted(bench) and (missing := headless(bench.args, found["mtp"])):
        why = f"{missing[0].reason} (none of {found['tensors']} tensors is of one)"
        raise GateFault(Fault("config", why, "", missing[0].change))
    head = {True: ", with an MTP head", False: "", None: ""}[found["mtp"]]
    by = "the index" if found["indexed"] else "the folder"
    return f"{found['shards']} files of {by} whole, {found['tensors']} tensors{head}"


def alive(bench: Bench) -> str:
    """A while after the load: the same processes, still answering, and no memory lost."""
    _wait(bench)
    seen = bench.one({"do": "identity", **bench.who()}, 60)
    _ours(bench, seen)
    now = server_members(seen, bench.job.pid)
    lost = [pid for pid, start in bench.members.items() if now.get(pid) != start]
    if lost:
        raise GateFault(Fault("gone", f"worker processes ended: {', '.join(map(str, lost))}"))
    if fault := refused(bench.answer(bench.request(HELLO, 16))):
        raise GateFault(fault)
    memory = _memory(bench)
    return f"{len(now)} processes after {bench.rules.alive_after_s:g} s, none lost; {memory}"


def before_load(bench: Bench) -> None:
    """Reads the GPU memory; caches are warm, so that what grows from here on is lost."""
    bench.memory = gpu_use(bench.context, bench.members)


def server_members(seen: Record, main_pid: int) -> dict[int, int]:
    """The main process and SGLang's own workers, without compilers and helpers that come and go."""
    return {
        one["pid"]: one["start"]
        for one in seen.get("members", [])
        if one["pid"] == main_pid or str(one["title"]).startswith("sglang::")
    }


def _ours(bench: Bench, seen: Record) -> None:
    if not seen.get("alive"):
        raise GateFault(Fault("gone", "the server's process is gone"))
    if seen.get("listening") and not seen.get("owned"):
        owners = [f"pid {one['pid']}: {one['title']}" for one in seen.get("owners", [])]
        why = "the port belongs to another process"
        raise GateFault(
            Fault("config", why, "\n".join(owners), "stop that process, then `deploy up`")
        )
    models = seen.get("models") or {}
    if models.get("status") == 200 and bench.served not in models.get("ids", []):
        why = f"/v1/models says {models.get('ids')}, not {bench.served}"
        raise GateFault(Fault("config", why, "", "see model.served_name in the playbook"))


def _all_ranks(bench: Bench, seen: Record) -> None:
    titles = [str(one["title"]) for one in seen.get("members", [])]
    schedulers = [title for title in titles if title.startswith("sglang::scheduler")]
    ranks = bench.info.get("tp_size")
    spread = "nnodes" in bench.args
    if not schedulers or not isinstance(ranks, int) or spread or len(schedulers) >= ranks:
        return
    why = f"{len(schedulers)} of {ranks} scheduler processes are there"
    raise GateFault(Fault("gone", why, "\n".join(titles)))


def _wait(bench: Bench) -> None:
    """Waits `alive_after_s`; ends at once when the process does."""
    want, total = bench.context.want, bench.rules.alive_after_s
    ends = bench.now() + total
    while (left := ends - bench.now()) > 0:
        if not bench.context.jobs(want.guest).poll(bench.job).alive:
            raise GateFault(Fault("gone", "the server's process is gone"))
        bench.context.progress("still alive after the load", total - left, total, "s")
        bench.sleep(min(ALIVE_EVERY_S, left))


def _memory(bench: Bench) -> str:
    if bench.memory is None:
        return "GPU memory not known"
    now = gpu_use(bench.context, bench.members)
    if now is None:
        return "GPU memory not known"
    more = grown(bench.memory, now)
    bench.figures["memory_growth_mib"] = float(max((one.mib for one in more.values()), default=0))
    over = [gpu for gpu, one in more.items() if one.mib > bench.rules.memory_growth_mib]
    told = ", ".join(f"{gpu} {one}" for gpu, one in more.items())
    if over:
        why = f"GPU memory grew under load and did not come back: {told}"
        raise GateFault(
            Fault("config", why, "", "see the holders with nvidia-smi; lower mem-fraction-static")
        )
    return f"GPU memory steady ({told})"
