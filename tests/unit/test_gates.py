from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from gateworld import ESSAY, MEMBERS, Model, Reply, bench, good_text, ready
from serverworld import FakeJobs, Script, deployment, state

from deployer.errors import GateFailed
from deployer.events import Event, GateChecked, Note
from deployer.state import Launch
from deployer.steps.gates_speed import baseline, worse
from deployer.steps.verify_gates import GATES, Gates
from deployer.steps.verify_prompts import SAMPLES, Ruler, counted_up_to, document, first_gap

Change = Callable[[Reply, Reply], Reply | None]


def run(
    monkeypatch: pytest.MonkeyPatch, model: Model, jobs: FakeJobs | None = None, **more: Any
) -> tuple[Gates, list[Event], GateFailed | None]:
    made, events, _, clock = ready(monkeypatch, model, jobs, **more)
    gates = Gates(bench(made, clock))
    try:
        gates.run()
    except GateFailed as error:
        return gates, events, error
    return gates, events, None


def failing(monkeypatch: pytest.MonkeyPatch, model: Model, gate: str, **more: Any) -> GateFailed:
    _, events, error = run(monkeypatch, model, **more)
    assert error is not None
    assert f"gate {gate!r} failed" in error.what
    last = [event for event in events if isinstance(event, GateChecked)][-1]
    assert (last.gate, last.passed) == (gate, False)
    return error


def notes(events: list[Event]) -> str:
    return "\n".join(event.text for event in events if isinstance(event, Note))


def spoil(when: Callable[[Reply], bool], **values: Any) -> Change:
    return lambda request, reply: {**reply, **values} if when(request) else None


def essay(request: Reply) -> bool:
    return str(request["prompt"]).startswith("Explain")


def test_all_gates_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    gates, events, error = run(monkeypatch, model)
    assert error is None
    checked = [event for event in events if isinstance(event, GateChecked)]
    names = [name for name, _ in GATES if name != "figures"]
    assert [event.gate for event in checked] == names
    assert all(event.passed for event in checked)
    figures = gates.bench.figures
    assert figures["tokens_per_s"] > 0
    assert figures["parallel_tokens_per_s"] > 0
    assert (figures["ttft_s"], figures["accept_length"], figures["accept_rate"]) == (0.25, 2.5, 0.5)
    modes = {
        (one.get("temperature"), (one.get("chat_template_kwargs") or {}).get("enable_thinking"))
        for one in model.asked
        if essay(one)
    }
    assert {(0.0, None), (None, None), (0.0, False), (None, False)} <= modes
    assert all("temperature" not in one or one["temperature"] == 0 for one in model.asked)


def test_the_long_prompt_is_long_by_the_servers_own_count(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    _, events, _ = run(monkeypatch, model)
    longest = max(len(one["prompt"].split()) + 9 for one in model.asked if one["max_tokens"] > 100)
    assert 6500 <= longest < 6600
    told = next(e.detail for e in events if isinstance(e, GateChecked) and e.gate == "long prompt")
    assert "code word found" in told
    edge = next(e.detail for e in events if isinstance(e, GateChecked) and e.gate == "context edge")
    assert "of 32768 answered" in edge
    assert 32768 - 32 - 12 < int(edge.split()[0]) <= 32768 - 32


@pytest.mark.parametrize(
    ("change", "gate", "why"),
    [
        (spoil(lambda r: True, content="42", reasoning=None), "answers", "wrong answer"),
        (
            spoil(lambda r: True, content="", reasoning=None, tokens=1),
            "answers",
            "the answer is empty (finish_reason stop, 1 tokens)",
        ),
        (spoil(essay, content="!" * 400), "quality", "(at character 0 of content)"),
        (
            spoil(
                lambda r: essay(r) and r.get("temperature") is None, content=ESSAY + "the sea " * 99
            ),
            "quality",
            "times in a row",
        ),
        (
            spoil(
                lambda r: essay(r) and bool(r.get("chat_template_kwargs")),
                content="no no no no no no no no no no no no no no no",
            ),
            "quality",
            "times in a row",
        ),
        (spoil(essay, content="Tides rise and fall.", tokens=7), "quality", "has 7 tokens"),
        (
            spoil(lambda r: r["prompt"].startswith("Count"), content="1, 2, 4, 5"),
            "counting",
            "counts only to 2; 3 does not come, at character 6",
        ),
        (
            spoil(lambda r: len(r["prompt"]) > 20_000, content="word " * 200),
            "long prompt",
            "times in a row",
        ),
        (
            spoil(lambda r: len(r["prompt"]) > 20_000, content=ESSAY),
            "long prompt",
            "the first line is lost",
        ),
        (spoil(lambda r: " + " in r["prompt"], content="the " * 90), "burst", "in a row"),
        (
            spoil(lambda r: len(r["prompt"]) > 100_000, content="and so " * 60),
            "context edge",
            "in a row",
        ),
    ],
)
def test_bad_answers_fail_with_evidence(
    monkeypatch: pytest.MonkeyPatch, change: Change, gate: str, why: str
) -> None:
    assert why in failing(monkeypatch, Model(change), gate).what


def test_a_swallowed_answer_is_the_parsers_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def swallow(request: Reply, reply: Reply) -> Reply | None:
        if request.get("separate_reasoning") is False:
            return {**reply, "content": good_text(request["prompt"])}
        return {**reply, "content": None, "reasoning": good_text(request["prompt"])}

    error = failing(
        monkeypatch, Model(swallow, info={"reasoning_parser": "deepseek-r1"}), "answers"
    )
    assert "the model answers well" in error.what
    assert "reasoning parser deepseek-r1" in error.what
    assert "qwen3" in error.fix


def test_a_model_that_ends_in_its_thoughts_is_no_parsers_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def mute(request: Reply, reply: Reply) -> Reply | None:
        if request.get("separate_reasoning") is False:
            return {**reply, "content": "Hmm. Hmm. I wonder."}
        return {**reply, "content": None, "reasoning": "Hmm. Hmm. I wonder."}

    assert "wrong answer" in failing(monkeypatch, Model(mute), "answers").what


def test_thoughts_in_the_content(monkeypatch: pytest.MonkeyPatch) -> None:
    def leak(request: Reply, reply: Reply) -> Reply | None:
        text = f"I know.\n</think>\n\n{reply.get('content')}"
        return {**reply, "content": text, "reasoning": None} if reply["status"] == 200 else None

    error = failing(monkeypatch, Model(leak, info={"reasoning_parser": "deepseek-v3"}), "answers")
    assert "thoughts stand in the content" in error.what
    assert "reasoning-parser: qwen3 (it is deepseek-v3)" in error.fix
    _, events, fine = run(monkeypatch, Model(leak, info={"reasoning_parser": None}))
    assert fine is None
    assert "add serve.args reasoning-parser: qwen3" in notes(events)


def test_an_answer_cut_in_its_thoughts_gets_room_to_think(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow_thinker(request: Reply, reply: Reply) -> Reply | None:
        if request["max_tokens"] >= 4096 or reply["status"] != 200:
            return None
        cut = {"content": None, "reasoning": ESSAY[:600], "finish_reason": "length", "tokens": 768}
        return {**reply, **cut}

    model = Model(slow_thinker)
    _, _, error = run(monkeypatch, model)
    assert error is None
    assert [one["temperature"] for one in model.asked if one["max_tokens"] == 4096][:1] == [None]

    def endless(request: Reply, reply: Reply) -> Reply | None:
        cut = {"content": None, "reasoning": ESSAY[:600], "finish_reason": "length"}
        return {**reply, **cut, "tokens": request["max_tokens"]}

    error = failing(monkeypatch, Model(endless), "answers")
    assert "still thinks after 4096 tokens" in error.what
    assert "think_tokens" in error.fix


def test_enable_thinking_refused_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(request: Reply, reply: Reply) -> Reply | None:
        if request.get("chat_template_kwargs"):
            return {"ok": True, "status": 400, "seconds": 0.1, "error": "unknown field"}
        return None

    _, events, error = run(monkeypatch, Model(refuse))
    assert error is None
    assert "thinking off cannot be asked for" in notes(events)


def test_a_hang_and_a_death_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    late = {"status": 0, "seconds": 120.0, "error": "no answer within 120 s", "timed_out": True}
    model = Model(lambda request, reply: {"ok": True, **late})
    error = failing(monkeypatch, model, "identity")
    assert "the server hangs, although /health and /v1/models say 200" in error.what
    gone = {"ok": True, "status": 0, "seconds": 0.1, "error": "RemoteDisconnected: closed"}
    log = b"[x] CUDA error: an illegal memory access was encountered\n[x] SIGQUIT received.\n"
    jobs = FakeJobs(running=Script([], -9, True))
    model = Model(lambda request, reply: gone)
    gates, _, dead = run(monkeypatch, model, jobs, log=log)
    assert dead is not None
    assert "the server died during this gate (exit -9)" in dead.what
    assert any("illegal memory access" in line for line in dead.evidence)
    assert gates.failure is not None
    assert gates.failure.died
    assert not gates.failure.comparable


def test_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = Model().ask(None, None, [{"do": "ready"}])[0]
    for change, why in (
        ({"alive": False}, "process is gone"),
        ({"owned": False, "owners": [{"pid": 9, "title": "nginx"}]}, "belongs to another"),
        ({"models": {"status": 200, "ids": ["other"]}}, "not tiny"),
        ({"members": MEMBERS[:2]}, "1 of 2 scheduler processes"),
        ({"health": 503, "health_s": 20.1}, "not healthy: /health 503"),
    ):
        model = Model(ready={**usual, **change})
        assert why in failing(monkeypatch, model, "identity").what


def test_health_is_not_asked_faster_than_its_own_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = Model().ask(None, None, [{"do": "ready"}])[0]
    asked: list[float] = []
    model = Model()
    made, _, _, clock = ready(monkeypatch, model)

    def look(command: Reply) -> Reply:
        asked.append(clock.time)
        return usual if len(asked) == 3 else {**usual, "health": 503, "health_s": 20.0}

    model.changes["ready"] = look
    Gates(bench(made, clock)).run(GATES[:1])
    assert [later - early for early, later in itertools.pairwise(asked)] == [20.0, 20.0]


def test_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Model().ask(None, None, [{"do": "weights"}])[0]
    error = failing(monkeypatch, Model(weights={**whole, "missing": ["a.safetensors"]}), "weights")
    assert "a.safetensors is missing" in error.what
    assert "--from shards" in error.fix
    headless = Model(weights={**whole, "mtp": False})
    assert "MTP head" in failing(monkeypatch, headless, "weights").what
    unknown = Model(weights={**whole, "mtp": None})
    assert run(monkeypatch, unknown)[2] is None


def test_the_edge_of_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that is smaller than what /v1/models tells is met from the message."""

    def pool(request: Reply, reply: Reply) -> Reply | None:
        if reply["status"] == 200 and reply["prompt_tokens"] > 20_000:
            told = (
                f"Input length ({reply['prompt_tokens']} tokens) exceeds the maximum allowed "
                "length (20000 tokens). Use a shorter input or enable --allow-auto-truncate."
            )
            return {"ok": True, "status": 400, "seconds": 0.1, "error": told}
        return None

    _, events, error = run(monkeypatch, Model(pool))
    assert error is None
    told = next(e.detail for e in events if isinstance(e, GateChecked) and e.gate == "context edge")
    assert 19_800 < int(told.split()[0]) <= 20_000

    def wordless(request: Reply, reply: Reply) -> Reply | None:
        if len(request["prompt"]) > 100_000:
            return {"ok": True, "status": 400, "seconds": 0.1, "error": "no"}
        return None

    assert "without a reason" in failing(monkeypatch, Model(wordless), "context edge").what


def test_a_small_context(monkeypatch: pytest.MonkeyPatch) -> None:
    _, events, error = run(monkeypatch, Model(context_tokens=1200))
    assert error is None
    checked = {e.gate: e.detail for e in events if isinstance(e, GateChecked)}
    assert "(context 1200)" in checked["long prompt"]
    assert "of 1200 answered" in checked["context edge"]
    tiny = deployment(gates={"min_tokens": 20, "burst": 3})
    _, events, error = run(monkeypatch, Model(context_tokens=330), want=tiny)
    assert error is None, error
    checked = {e.gate: e.detail for e in events if isinstance(e, GateChecked)}
    assert checked["long prompt"] == "not asked: the context of 330 tokens is too short"


def test_gates_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = {"long_prompt_tokens": 0, "context_edge": False, "thinking": "default", "burst": 3}
    want = deployment(gates={"min_tokens": 40, **rules})
    model = Model()
    _, events, error = run(monkeypatch, model, want=want)
    assert error is None
    names = {event.gate for event in events if isinstance(event, GateChecked)}
    assert not {"long prompt", "context edge"} & names
    assert not any(one.get("chat_template_kwargs") for one in model.asked)


def test_speculation(monkeypatch: pytest.MonkeyPatch) -> None:
    full = {"avg_spec_accept_length": 4.0}
    _, events, error = run(monkeypatch, Model(info=full))
    assert error is None
    assert "suspiciously high" in notes(events)

    def repetitive(request: Reply, reply: Reply) -> Reply | None:
        one = "the tide comes in and the tide goes out and "
        other = "the moon pulls the water up and the sun does so too but less and so "
        text = " ".join((one if number % 2 else other) + f"{number}" for number in range(9))
        return {**reply, "content": text, "tokens": 200} if essay(request) else None

    gates, _, error = run(monkeypatch, Model(repetitive, info=full))
    assert error is not None
    assert gates.failure is not None
    if gates.failure.gate == "speculation":
        assert "the drafts are not verified" in error.what
    assert gates.failure.comparable
    _, events, error = run(monkeypatch, Model(info={"avg_spec_accept_length": 1.01}))
    assert error is None
    assert "hardly ever right" in notes(events)
    none = {"speculative_algorithm": None}
    want = deployment("no-mtp", gates={"min_tokens": 40})
    model = Model(info=none)
    made, events, _, clock = ready(monkeypatch, model, want=want)
    one = bench(made, clock)
    one.args = want.serve_args("no-mtp")
    Gates(one).run()
    assert "accept_rate" not in one.figures


def test_a_run_of_token_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    run_of = {"id": 0, "begin": 65, "length": 190}
    probe = {"ok": True, "status": 200, "meta": {}, "run": run_of, "text": "fall of!!!!"}
    gates, _, error = run(monkeypatch, Model(generate=probe))
    assert error is not None
    assert gates.failure is not None
    assert (gates.failure.gate, gates.failure.comparable) == ("speculation", True)
    assert "token id 0 190 times in a row, from token 65" in error.what


def test_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = Model().ask(None, None, [{"do": "identity"}])[0]
    model = Model(identity={**usual, "members": MEMBERS[:3]})
    assert "worker processes ended: 4252" in failing(monkeypatch, model, "alive").what
    readings = [b"0000:21:00.0, 40000\n0000:41:00.0, 40000\n--\n"]
    readings.append(b"0000:21:00.0, 44000\n0000:41:00.0, 40010\n--\n")
    error = failing(monkeypatch, Model(), "alive", smi=lambda: readings.pop(0))
    assert "0000:21:00.0 +4000 MiB on the whole card" in error.what
    _, events, error2 = run(monkeypatch, Model(), smi=lambda: b"")
    assert error2 is None
    assert any("GPU memory not known" in getattr(event, "detail", "") for event in events)


def cards(*mib: int, apps: str = "", more: str = "") -> bytes:
    gpus = "".join(f"0000:{bus}:00.0, {one}\n" for bus, one in zip(("21", "41"), mib, strict=True))
    return f"{gpus}--\n{apps}++\n{more}".encode()


def holders(*rows: tuple[str, int, int | str, str, int]) -> dict[str, str]:
    """Rows of (bus, pid on the host, MiB, control group, pid in the container)."""
    apps = "".join(f"00000000:{bus}:00.0, {pid}, python, {mib}\n" for bus, pid, mib, *_ in rows)
    more = "".join(f"{pid} python\n={pid} {inside} {group}\n" for _, pid, _, group, inside in rows)
    return {"apps": apps, "more": more}


OURS = "/lxc/129/ns/session.slice"


def test_a_neighbour_that_grows_is_not_our_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another container's process has the very pid of one of ours, inside."""
    ours = (("21", 9001, 30000, OURS, 4250), ("41", 9002, 30000, OURS, 4251))
    before = cards(30500, 30500, **holders(*ours, ("21", 9100, 400, "/lxc/130/ns", 4250)))
    after = cards(39500, 30500, **holders(*ours, ("21", 9100, 9400, "/lxc/130/ns", 4250)))
    readings = [before, after]
    _, events, error = run(monkeypatch, Model(), smi=lambda: readings.pop(0))
    assert error is None
    told = [getattr(event, "detail", "") for event in events]
    assert any("steady (0000:21:00.0 +0 MiB, 0000:41:00.0 +0 MiB)" in text for text in told)


def test_ours_that_grows_in_the_shade_of_a_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    def use(ours: int, other: int) -> bytes:
        rows = (("21", 9001, ours, OURS, 4250), ("21", 9100, other, "/lxc/130/ns", 77))
        return cards(ours + other, 4, **holders(*rows))

    readings = [use(30000, 9000), use(34000, 5000)]
    error = failing(monkeypatch, Model(), "alive", smi=lambda: readings.pop(0))
    assert "0000:21:00.0 +4000 MiB, 0000:41:00.0 +0 MiB on the whole card" in error.what


def test_it_says_when_only_the_card_could_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = holders(("21", 9001, "[N/A]", OURS, 4250), ("41", 9002, 30000, "", 4251))
    readings = [cards(30000, 30000, **rows), cards(30100, 30000, **rows)]
    _, events, error = run(monkeypatch, Model(), smi=lambda: readings.pop(0))
    assert error is None
    told = " ".join(str(getattr(event, "detail", "")) for event in events)
    assert "0000:21:00.0 +100 MiB on the whole card, 0000:41:00.0 +0 MiB on the whole card" in told


def test_the_wait_ends_with_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = FakeJobs(running=Script([], -9, True))
    made, _, _, clock = ready(monkeypatch, Model(), jobs)
    one = bench(made, clock)
    began = clock.time
    with pytest.raises(GateFailed, match="process is gone"):
        Gates(one).run([gate for gate in GATES if gate[0] == "alive"])
    assert clock.time - began < 10


def test_slower_than_before(monkeypatch: pytest.MonkeyPatch) -> None:
    own = state()
    before = {"tokens_per_s": 500.0, "ttft_s": 0.24}
    old = Launch(id="old", variant="mtp", started=1.0, figures=before, verdict="stopped")
    own.launches.append(old)
    _, events, error = run(monkeypatch, Model(), own=own)
    assert error is None
    told = notes(events)
    assert "slower than launch old, which had other arguments" in told
    assert "before 500" in told
    assert "first token" not in told
    want = deployment(gates={"min_tokens": 40, "slow_is_failure": True})
    own.launches = [old]
    assert "slower" in failing(monkeypatch, Model(), "figures", own=own, want=want).what


def test_what_figures_are_compared_with() -> None:
    def launch(name: str, mark: str, verdict: str, variant: str = "mtp") -> Launch:
        figures = {"tokens_per_s": 50.0}
        return Launch(
            id=name,
            variant=variant,
            started=1.0,
            fingerprint=mark,
            verdict=verdict,
            figures=figures,
        )

    now = Launch(id="now", variant="mtp", started=9.0, fingerprint="f", verdict="ready")
    bad, other = launch("bad", "f", "failed: x"), launch("other", "g", "stopped")
    same, alien = launch("same", "f", "stopped"), launch("alien", "h", "stopped", "no-mtp")
    assert baseline([now, bad, alien], "now", "mtp", "") is None
    found = baseline([other, bad, now], "now", "mtp", "")
    assert found is not None
    assert (found.launch, found.same) == ("other", False)
    found = baseline([same, other, now], "now", "mtp", "other")
    assert found is not None
    assert (found.launch, found.same) == ("same", True)
    assert worse({"tokens_per_s": 60.0}, {"tokens_per_s": 50.0}, 0.3) == []
    assert worse({"tokens_per_s": 60.0}, {"tokens_per_s": 30.0}, 0.3) == ["30 tokens/s, before 60"]
    many, few = (
        {"parallel_tokens_per_s": 90.0, "parallel_requests": 8.0},
        {"parallel_tokens_per_s": 20.0},
    )
    assert worse(many, {**few, "parallel_requests": 2.0}, 0.3) == []
    assert len(worse(many, {**few, "parallel_requests": 8.0}, 0.3)) == 1
    assert worse({"ttft_s": 0.02}, {"ttft_s": 0.1}, 0.3) == []


def test_prompts() -> None:
    assert counted_up_to("1, 2, 3, 4") == 4
    assert counted_up_to("From 1 to 100: 1 2 3 5") == 3
    assert counted_up_to("nothing") == 0
    assert first_gap("1, 2, 4") == (3, 6)
    assert first_gap("1, 2, 3") == (0, -1)
    counts = [len(document(number).split()) for number in SAMPLES]
    ruler = Ruler.of((counts[0], counts[1]))
    assert ruler is not None
    assert 5000 <= len(document(ruler.at_least(5000)).split()) < 5030
    assert len(document(ruler.at_most(5000)).split()) <= 5000
    assert Ruler.of((50, 50)) is None


def test_requests_that_never_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()

    def half(command: Reply) -> Reply:
        replies = [model.complete(one) for one in command["requests"][:2]]
        results = [{**one, "number": number} for number, one in enumerate(replies)]
        return {"ok": True, "results": results, "seconds": 3.0}

    model.changes["many"] = half
    assert "only 2 of 6 requests came back" in failing(monkeypatch, model, "burst").what
