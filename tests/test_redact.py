"""Secrets are in nothing that is printed, stored beside a drafter, or told by a replica."""

import json
import sys
from typing import Any

import pytest

from domino_core.checkpoint import provenance
from domino_core.redact import redacted, without_user
from jobs.overrides import apply, describe
from jobs.presets import tiny
from serve.canary import Canary
from serve.drafter_cache import DrafterCache
from serve.follower import Follower
from serve.registry_alias import parse_alias

SECRET = "p@ss:w0rd"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"postgresql://me:{SECRET}@db:5432/x", "postgresql://me:***@db:5432/x"),
        (f"tracking_uri=http://me:{SECRET}@h/ does not answer", "tracking_uri=http://me:***@h/ does not answer"),
        (f"mysql://h/x?user=a&password={SECRET}&c=d", "mysql://h/x?user=a&password=***&c=d"),
        (f"HF_TOKEN={SECRET} DOMINO_API_KEY={SECRET}", "HF_TOKEN=*** DOMINO_API_KEY=***"),
    ],
)
def test_secrets_are_masked(text, shown):
    assert redacted(text) == shown


@pytest.mark.parametrize(
    "text", ["http://h:80/a@b", "models:/x@champion", "max_tokens=5", "serve.api_key_file=/keys", "sqlite:////x/y.db"]
)
def test_what_is_no_secret_stays(text):
    assert redacted(text) == text


def test_an_address_without_its_user():
    assert without_user(f"http://me:{SECRET}@host:5000/x") == "http://host:5000/x"
    assert without_user("http://host/a@b") == "http://host/a@b"


def test_a_tracking_password_is_neither_in_plans_nor_beside_drafters_nor_under_health(tmp_path, monkeypatch, caplog):
    uri = f"http://me:{SECRET}@127.0.0.1:9"
    assert SECRET not in describe(apply(tiny(), [f"tracking_uri={uri}"]))
    monkeypatch.setattr(sys, "argv", ["train", f"tracking_uri={uri}"])
    assert SECRET not in json.dumps(provenance())
    alias = parse_alias("models:/x@champion", uri)
    assert alias is not None
    follower = Follower(alias, DrafterCache(tmp_path), lambda *_: None)
    follower.poll()
    assert "127.0.0.1:9 does not answer" in follower.state.problem
    assert SECRET not in follower.state.problem + caplog.text
    unused: Any = None
    canary = Canary(alias, DrafterCache(tmp_path), unused, unused, 0.1)
    canary.poll()
    assert "127.0.0.1:9 does not answer" in canary._problem
    assert SECRET not in canary._problem + caplog.text
