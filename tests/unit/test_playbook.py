"""What the playbook model accepts, its defaults, and how variants change the arguments."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from deployer.deployment import Deployment
from deployer.inventory import DeploymentEntry, Host
from deployer.playbook import Playbook

BASE: dict[str, Any] = {
    "model": {"repo": "acme/tiny", "path": "/srv/tiny", "served_name": "tiny"},
    "driver": {"version": "580.126.09"},
    "engine": {"version": "0.5.11", "lock": "locks/x.txt", "venv": "/opt/v"},
}


def playbook(**sections: Any) -> Playbook:
    merged = {key: {**BASE.get(key, {}), **value} for key, value in sections.items()}
    return Playbook.model_validate({**BASE, **merged})


def deployment(variants: list[dict[str, Any]], variant: str | None = None) -> Deployment:
    loaded = Playbook.model_validate(
        {**BASE, "serve": {"args": {"tp-size": 2, "flag": True}}, "variants": variants}
    )
    host = Host.model_validate({"ssh": {"address": "h"}, "gpus": [{"address": "0000:21:00.0"}]})
    entry = DeploymentEntry(playbook="x")
    return Deployment("kpro5", "qwen", host, entry, loaded, "x", "sglang==0.5.11", variant)


def test_defaults() -> None:
    loaded = playbook()
    assert loaded.model.revision == "main"
    assert loaded.serve.host == "0.0.0.0"
    assert loaded.stop.old_server == "stop-ours"
    assert loaded.driver.install == "never"
    assert loaded.gates.max_accept_rate == 0.98


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("model", {"path": "relative"}),
        ("model", {"path": "/a\nb"}),
        ("model", {"path": "/a\x1bb"}),
        ("model", {"served_name": ""}),
        ("model", {"served_name": "a\nb"}),
        ("model", {"revision": ""}),
        ("model", {"repo": "../etc"}),
        ("download", {"token_env": "hf token"}),
        ("download", {"connections": 0}),
        ("driver", {"version": "latest"}),
        ("driver", {"install": "host"}),
        ("engine", {"lock": "a\0b"}),
        ("engine", {"uv_version": "; rm"}),
        ("serve", {"env": {"1A": "x"}}),
        ("serve", {"env": {"A": "x\ny"}}),
        ("serve", {"args": {"--tp": 1}}),
        ("serve", {"host": "0.0.0.0 --x"}),
        ("gates", {"max_accept_rate": 1.5}),
        ("stop", {"grace_s": 0}),
    ],
)
def test_refused_values(section: str, values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        playbook(**{section: values})


def test_odd_but_valid_text() -> None:
    loaded = playbook(
        model={"served_name": "my model; $(x)", "path": "/srv/with space/'q'"},
        serve={"args": {"json-model-override-args": '{"a": [1]}'}, "env": {"A": "", "b": "a=b c"}},
    )
    assert loaded.model.path == "/srv/with space/'q'"
    assert loaded.serve.env["A"] == ""


def test_types_of_arguments_are_kept() -> None:
    args = playbook(serve={"args": {"a": True, "b": 1, "c": 0.5, "d": "1"}}).serve.args
    assert [type(args[key]) for key in "abcd"] == [bool, int, float, str]


def test_variants_change_the_arguments() -> None:
    rungs = [{"name": "mtp", "args": {"x": 1}}, {"name": "plain", "args": {"flag": False}}]
    want = deployment(rungs)
    assert want.variant_name == "mtp"
    assert want.serve_args() == {"tp-size": 2, "flag": True, "x": 1}
    assert want.serve_args("plain") == {"tp-size": 2}
    assert deployment(rungs, "plain").serve_args() == {"tp-size": 2}
    assert deployment([]).variant_name == "base"
