"""The story's exact command line on three engines, from `deploy` to the answer.

Qwen3.6-27B's own config.json; the files are small. What each version makes of the memory is shown
without the lab (tests/scripts/test_story_versions.py). The tests run in order.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from lab import PREFIX, ROOT, Lab, Machine, Result, eventually, run
from project import PLAYBOOK, Listing, Project, address_of, complete, pristine

pytestmark = pytest.mark.container

PLANS = ROOT / "tests" / "fixtures" / "sglang-plan" / "hybrid.json"
FOLDER = "/srv/models/qwen3.6-27b"
PORT = 8910
TORCH = {"0.5.9": "2.9.1", "0.5.11": "2.11.0", "0.5.23": "2.14.1"}
STORY = {
    "tp-size": 2,
    "mem-fraction-static": 0.88,
    "mamba-full-memory-ratio": 0.5,
    "max-running-requests": 16,
    "context-length": 32768,
    "reasoning-parser": "qwen3",
}
MTP = {
    "speculative-algorithm": "NEXTN",
    "speculative-num-steps": 3,
    "speculative-eagle-topk": 1,
    "speculative-num-draft-tokens": 4,
}
ONE_CHANGE = {"mamba-scheduler-strategy": "extra_buffer"}
SERVE_IT = f"""
import json, sys
sys.path.insert(0, "/opt/hub")
import tiny_model
config = open("/srv/story.json", "rb").read()
plain = tiny_model.side_files
tiny_model.side_files = lambda made: {{**plain(made), "config.json": config}}
import hub
sys.argv = ["hub.py", "--host", "0.0.0.0", "--port", "{PORT}", "--data", "/srv/story",
            "--repo", "Qwen/Qwen3.6-27B", "--shards", "2", "--mb", "1"]
hub.main()
"""
"""A second hub beside the lab's own: the same code, another repository."""


@dataclass(frozen=True)
class Story:
    """The project, its machines, and how its playbook is set."""

    project: Project
    host: Machine
    guest: Machine
    hub: str

    def want(self, version: str, **more: Any) -> None:
        """Writes the playbook of one engine version; `more` goes to the first variant."""
        path = self.project.folder / "playbooks" / PLAYBOOK
        document = yaml.safe_load(self.project.playbook_text)
        document["model"] = {
            "repo": "Qwen/Qwen3.6-27B",
            "revision": "main",
            "path": FOLDER,
            "served_name": "qwen3.6-27b",
        }
        document["download"] |= {
            "endpoint": f"http://{self.hub}:{PORT}",
            "target_endpoint": f"http://hub:{PORT}",
        }
        document["engine"] |= {"version": version, "lock": f"locks/{version}.txt"}
        document["serve"]["args"] = STORY
        document["variants"] = [{"name": "mtp", "args": {**MTP, **more}}]
        path.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")

    def deploy(self, *words: str) -> Result:
        return self.project.deploy(*words, timeout_s=180)

    def launch(self) -> dict[str, Any]:
        """The newest launch of the state file."""
        found: dict[str, Any] = self.project.state()["launches"][-1]
        return found


def flat(text: str) -> str:
    """Without the host's name before each line and the breaks of lines."""
    return " ".join(text.split())


def model_ids() -> list[str]:
    """What the published port says that it serves."""
    with urllib.request.urlopen("http://127.0.0.1:30105/v1/models", timeout=10) as answer:
        return [str(one["id"]) for one in json.load(answer)["data"]]


@pytest.fixture(scope="module")
def config() -> bytes:
    """The real config.json."""
    models = json.loads(PLANS.read_text(encoding="utf-8"))["models"]
    return json.dumps(models["Qwen--Qwen3.5-27B"]["config"]).encode()


@pytest.fixture(scope="module")
def second_hub(lab: Lab, config: bytes) -> Iterator[str]:
    """Serves the model; ends with the tests. Gives its address as seen from here."""
    container = PREFIX + "hub"
    for path, text in (("/srv/story.json", config), ("/srv/story.py", SERVE_IT.encode())):
        put = ["docker", "exec", "-i", container, "sh", "-c", 'cat >"$1"', "sh", path]
        run(put, stdin=text).ok()
    start = "python3 /srv/story.py >/srv/story.log 2>&1 & echo $! >/srv/story.pid"
    run(["docker", "exec", container, "sh", "-c", start]).ok()
    address = address_of("hub")

    def answers() -> bool:
        try:
            with urllib.request.urlopen(f"http://{address}:{PORT}/_stats", timeout=2):
                return True
        except OSError:
            return False

    eventually(answers, "the second hub answers", timeout_s=30)
    yield address
    run(["docker", "exec", container, "sh", "-c", 'kill "$(cat /srv/story.pid)"']).ok()


@pytest.fixture(scope="module")
def story(lab: Lab, second_hub: str, config: bytes, tmp_path_factory: Any) -> Story:
    """A pristine host whose guest has the model's config.json, and a lock for each engine."""
    host, guest = pristine(lab)
    project = Project(tmp_path_factory.mktemp("story"))
    locks: Path = project.folder / "playbooks" / "locks"
    lock = (locks / "lab.txt").read_text(encoding="utf-8")
    for version, torch in TORCH.items():
        text = lock.replace("sglang==0.5.11", f"sglang=={version}")
        text = text.replace("torch==2.11.0", f"torch=={torch}")
        (locks / f"{version}.txt").write_text(text, encoding="utf-8")
    put = 'mkdir -p "$1" && cat >"$1/config.json"'
    guest.sh(put, FOLDER, stdin=config).ok()
    return Story(project, host, guest, second_hub)


@pytest.mark.parametrize(
    ("version", "reason", "change"),
    [
        ("0.5.9", "skips the MLP all-reduce of dense qwen3_5", "0.5.10 or newer"),
        ("0.5.11", "refuse NEXTN/EAGLE with the radix cache", "extra_buffer"),
    ],
)
def test_it_is_refused_before_anything_is_done(
    story: Story, version: str, reason: str, change: str
) -> None:
    """Nothing was installed or downloaded: the model's config.json is enough."""
    before = Listing.of(story.host, story.guest)
    story.want(version)
    done = story.deploy("up", "kpro5")
    assert done.exit == 1
    said = flat(done.err)
    assert reason in said
    assert change in said
    assert "Traceback" not in said
    assert before.difference(Listing.of(story.host, story.guest)) == []
    assert model_ids() == ["tiny-old"], "the server that was there serves on"


def test_0_5_11_runs_with_the_one_change(story: Story) -> None:
    story.want("0.5.11", **ONE_CHANGE)
    done = story.deploy("up", "kpro5").ok()
    assert "verdict: good" in done.err
    assert "of 16 asked requests at once" in flat(done.err), "it says what will effectively run"
    assert model_ids() == ["qwen3.6-27b"]
    assert len(complete()) > 5
    launch = story.launch()
    assert launch["verdict"] == "good"
    # The plan reckons with the weights that config.json promises; the files here are small.
    assert launch["figures"]["planned_requests"] in {9, 10}
    assert launch["figures"]["max_running_requests"] == 16


def test_0_5_9_does_not_replace_what_serves(story: Story) -> None:
    serving = story.launch()
    story.want("0.5.9")
    done = story.deploy("up", "kpro5")
    assert done.exit == 1
    assert "skips the MLP all-reduce" in flat(done.err)
    assert "Traceback" not in done.err
    assert model_ids() == ["qwen3.6-27b"]
    assert len(complete()) > 5
    assert story.launch()["id"] == serving["id"]
    assert story.guest.sh('kill -0 "$1"', str(serving["pid"])).exit == 0


def test_0_5_23_runs_it_as_it_is(story: Story) -> None:
    story.want("0.5.23")
    done = story.deploy("up", "kpro5").ok()
    assert "verdict: good" in done.err
    launch = story.launch()
    assert launch["verdict"] == "good"
    log = story.deploy("logs", "kpro5", "-n", "1000").ok().out
    assert "'mamba_radix_cache_strategy': 'extra_buffer'" in log
    assert "Capture target verify CUDA graph end." in log


def test_0_5_23_refuses_the_old_name(story: Story) -> None:
    serving = story.launch()
    story.want("0.5.23", **ONE_CHANGE)
    done = story.deploy("up", "kpro5")
    assert done.exit == 1
    said = flat(done.err)
    assert "mamba-scheduler-strategy" in said
    assert "mamba-radix-cache-strategy" in said, "the right name is offered"
    assert story.launch()["id"] == serving["id"]
    assert model_ids() == ["qwen3.6-27b"]
