"""The follower against a real MLflow registry (SQLite): promotion, refusal, outage, restart."""

import errno
import json
import os
import re
import shutil
import socket
import sqlite3
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from serve.drafter_cache import DrafterCache
from serve.follower import Follower, NotYetError
from serve.registry_alias import Alias, RegistryUnavailableError, Version, check_reachable, look_up, parse_alias
from tests.serving import wait_until

NAME = "domino-follower-test"


class Registry:
    """What pipelines/registry.py does, as far as a reader sees it: versions of a registered model, and an alias."""

    def __init__(self, root: Path) -> None:
        import mlflow
        from mlflow import MlflowClient

        self.uri = f"sqlite:///{root}/mlflow.db"
        self.mlflow, self.other_uri = mlflow, f"sqlite:///{root}/other.db"
        self.client = MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)
        self.experiment = self.client.create_experiment("drafters", artifact_location=(root / "artifacts").as_uri())
        self.client.create_registered_model(NAME)

    def register(self, folder: Path, **tags: str) -> str:
        model = self.client.create_logged_model(self.experiment, name="drafter")
        self.client.log_model_artifacts(model.model_id, str(folder))
        self.client.finalize_logged_model(model.model_id, "READY")
        source = f"models:/{model.model_id}"
        # Creating a version resolves its source in the process-wide store; afterwards that is another one, as in a
        # replica.
        self.mlflow.set_tracking_uri(self.uri)
        try:
            return self._create_version(source, model.model_id, tags)
        finally:
            self.mlflow.set_tracking_uri(self.other_uri)

    def _create_version(self, source: str, model_id: str, tags: dict[str, str]) -> str:
        return str(self.client.create_model_version(NAME, source=source, model_id=model_id, tags=tags).version)

    def promote(self, version: str) -> None:
        self.client.set_registered_model_alias(NAME, "champion", version)


@pytest.fixture(scope="module")
def shared_registry(tmp_path_factory):
    """Three versions; creating the database takes seconds, so the tests share it."""
    root = tmp_path_factory.mktemp("registry")
    registry = Registry(root)
    for number in (1, 2, 3):
        folder = root / f"drafter-{number}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"number": number}))
        assert registry.register(folder, target_hash="abc") == str(number)
    yield registry
    registry.mlflow.set_tracking_uri(None)


@pytest.fixture
def registry(shared_registry):
    shared_registry.promote("1")
    return shared_registry


class Served:
    """Records what was accepted; refuses the versions that it is told to."""

    def __init__(self) -> None:
        self.accepted: list[int] = []
        self.refuses: dict[str, Exception] = {}
        self.tried: list[str] = []

    def accept(self, folder: Path, version: Version) -> None:
        self.tried.append(version.number)
        if version.number in self.refuses:
            raise self.refuses[version.number]
        self.accepted.append(json.loads((folder / "config.json").read_text())["number"])


def follow(registry: Registry, cache: Path) -> tuple[Follower, Served]:
    served = Served()
    alias = Alias(name=NAME, alias="champion", tracking_uri=registry.uri)
    return Follower(alias, DrafterCache(cache), served.accept), served


def started(registry: Registry, cache: Path) -> tuple[Follower, Served]:
    """Version 1 live; the tests poll by hand."""
    follower, served = follow(registry, cache)
    follower.start(poll_seconds=3600)
    assert served.accepted == [1]
    return follower, served


def test_alias_is_read_with_its_hash_and_source(registry):
    version = look_up(Alias(name=NAME, alias="champion", tracking_uri=registry.uri))
    assert (version.number, version.target_hash) == ("1", "abc")
    assert version.source.startswith("models:/m-")
    assert (version.self_check, version.canary) == ("", "")


def test_self_check_and_canary_are_read_from_tags_and_make_it_no_other_version(registry):
    alias = Alias(name=NAME, alias="champion", tracking_uri=registry.uri)
    before = look_up(alias)
    for key, value in {"self_check": "{}", "canary_started": "5.0", "canary": "running"}.items():
        registry.client.set_model_version_tag(NAME, "1", key, value)
    version = look_up(alias)
    assert (version.self_check, version.canary) == ("{}", "5.0")
    assert version == before  # a gate that runs again does not have it loaded again
    registry.client.set_model_version_tag(NAME, "1", "canary", "ended")
    assert look_up(alias).canary == ""
    registry.client.delete_model_version_tag(NAME, "1", "self_check")


def test_what_comes_after_a_look_comes_after_every_look(registry, tmp_path):
    served, looks = Served(), []
    alias = Alias(name=NAME, alias="champion", tracking_uri=registry.uri)
    follower = Follower(alias, DrafterCache(tmp_path), served.accept, lambda: looks.append(len(served.accepted)))
    follower.start(poll_seconds=0.05)
    assert looks == []  # the champion comes first
    registry.promote("2")
    wait_until(lambda: 2 in looks)
    follower.close()


def test_promotion_and_rollback_are_followed_and_downloads_kept(registry, tmp_path):
    follower, served = started(registry, tmp_path)
    follower.poll()
    assert served.tried == ["1"]  # nothing new
    registry.promote("2")
    follower.poll()
    registry.promote("1")
    follower.poll()
    assert served.accepted == [1, 2, 1]
    assert follower.state.live == "1"
    assert follower.state.problem == ""
    folders = sorted(path.name for path in (tmp_path / NAME).iterdir() if path.is_dir())
    assert [name.split("-")[0] for name in folders] == ["v1", "v2"]  # each once, and no partial download


def test_what_a_killed_replica_left_of_a_download_goes_and_a_download_that_goes_on_stays(registry, tmp_path):
    left, going_on = tmp_path / NAME / ".partial-left", tmp_path / NAME / ".partial-going-on"
    for folder in (left, going_on):
        (folder / "drafter").mkdir(parents=True)
    two_days_ago = time.time() - 48 * 3600
    os.utime(left, (two_days_ago, two_days_ago))
    started(registry, tmp_path)
    assert not left.exists()
    assert going_on.exists()


def test_refused_version_leaves_the_old_one_says_why_and_is_not_tried_again(registry, tmp_path):
    follower, served = started(registry, tmp_path)
    served.refuses["2"] = ValueError("layer_ids do not fit")
    registry.promote("2")
    follower.poll()
    follower.poll()
    assert served.tried == ["1", "2"]
    assert follower.state.live == "1"
    assert "version 2" in follower.state.problem
    assert "layer_ids do not fit" in follower.state.problem
    registry.promote("3")
    follower.poll()
    assert (follower.state.live, follower.state.problem) == ("3", "")


def test_a_version_for_which_there_is_no_room_yet_is_tried_at_every_look(registry, tmp_path):
    follower, served = started(registry, tmp_path)
    served.refuses["2"] = NotYetError("version 2 waits")
    registry.promote("2")
    follower.poll()
    assert (follower.state.live, follower.state.problem) == ("1", "version 2 waits")
    follower.poll()
    del served.refuses["2"]
    follower.poll()
    assert served.tried == ["1", "2", "2", "2"]
    assert (follower.state.live, follower.state.problem) == ("2", "")


def test_any_exception_of_a_version_is_a_refusal_with_its_type(registry, tmp_path):
    follower, served = started(registry, tmp_path)
    served.refuses["2"] = RuntimeError("CUDA out of memory")
    registry.promote("2")
    follower.poll()
    assert "RuntimeError: CUDA out of memory" in follower.state.problem
    assert follower.state.live == "1"


def test_going_back_to_the_live_version_clears_the_problem(registry, tmp_path):
    follower, served = started(registry, tmp_path)
    served.refuses["2"] = ValueError("no")
    registry.promote("2")
    follower.poll()
    registry.promote("1")
    follower.poll()
    assert follower.state.problem == ""
    assert served.tried == ["1", "2"]


def test_outage_while_running_changes_nothing_and_is_visible(registry, tmp_path):
    follower, served = started(registry, tmp_path / "cache")
    database = Path(registry.uri.removeprefix("sqlite:///"))
    away = database.with_name("away.db")
    database.rename(away)
    try:
        follower.poll()
        assert follower.state.live == "1"
        assert "no MLflow database" in follower.state.problem
        assert not database.exists()  # looking must not create an empty one
    finally:
        away.rename(database)
    registry.promote("2")
    follower.poll()
    assert served.accepted == [1, 2]
    assert follower.state.problem == ""


def test_start_during_an_outage_uses_the_version_accepted_last(registry, tmp_path):
    started(registry, tmp_path)
    gone = Alias(name=NAME, alias="champion", tracking_uri=f"sqlite:///{tmp_path}/gone.db")
    served = Served()
    follower = Follower(gone, DrafterCache(tmp_path), served.accept)
    follower.start(poll_seconds=3600)
    assert served.accepted == [1]
    assert "no MLflow database" in follower.state.problem


@pytest.mark.parametrize("note", ["", "[]", "{}", '{"number": 1, "source": "models:/m-1"}', '{"number": "1"', "\xff"])
def test_a_damaged_note_of_the_version_accepted_last_stops_no_start(registry, tmp_path, note):
    path = tmp_path / NAME / "accepted-champion.json"
    path.parent.mkdir()
    path.write_bytes(note.encode("latin-1"))
    follower, served = started(registry, tmp_path)
    assert (follower.state.live, follower.state.problem) == ("1", "")
    assert json.loads(path.read_text())["number"] == "1"  # and it is whole again
    path.write_bytes(note.encode("latin-1"))
    gone = Alias(name=NAME, alias="champion", tracking_uri=f"sqlite:///{tmp_path}/gone.db")
    with pytest.raises(ValueError, match="no drafter can be served: there is no MLflow database"):
        Follower(gone, DrafterCache(tmp_path), served.accept).start(poll_seconds=3600)


def test_a_note_of_a_newer_code_is_understood(registry, tmp_path):
    """An image that was rolled back finds what the newer one has noted."""
    started(registry, tmp_path)
    path = tmp_path / NAME / "accepted-champion.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"of_tomorrow": {}}))
    served = Served()
    gone = Alias(name=NAME, alias="champion", tracking_uri=f"sqlite:///{tmp_path}/gone.db")
    Follower(gone, DrafterCache(tmp_path), served.accept).start(poll_seconds=3600)
    assert served.accepted == [1]


def test_start_with_an_unusable_champion_uses_the_version_accepted_last(registry, tmp_path):
    started(registry, tmp_path)
    registry.promote("2")
    follower, served = follow(registry, tmp_path)
    served.refuses["2"] = ValueError("corrupt")
    follower.start(poll_seconds=3600)
    assert served.accepted == [1]
    assert "corrupt" in follower.state.problem
    follower.poll()
    assert served.tried == ["2", "1"]  # the refusal is remembered
    assert "corrupt" in follower.state.problem


def test_start_without_anything_usable_fails_with_the_reason(registry, tmp_path):
    follower, served = follow(registry, tmp_path)
    served.refuses["1"] = ValueError("wrong target")
    with pytest.raises(ValueError, match="wrong target"):
        follower.start(poll_seconds=3600)


def test_lost_artifacts_are_an_outage_not_a_refusal(registry, tmp_path):
    follower, served = started(registry, tmp_path)
    folder = tmp_path / "drafter-4"
    folder.mkdir()
    (folder / "config.json").write_text('{"number": 4}')
    number = registry.register(folder)
    source = registry.client.get_model_version(NAME, number).source
    artifacts = registry.client.get_logged_model(source.rpartition("/")[2]).artifact_location.removeprefix("file://")
    shutil.move(artifacts, tmp_path / "moved")
    registry.promote(number)
    follower.poll()
    assert follower.state.live == "1"
    assert follower.state.problem
    shutil.move(tmp_path / "moved", artifacts)
    follower.poll()
    assert served.accepted == [1, 4]


def test_a_full_or_broken_disk_is_no_refusal_either(registry, tmp_path):
    follower, served = started(registry, tmp_path / "cache")
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("in the way")
    registry.promote("2")
    follower.poll()
    assert follower.state.live == "1"
    assert "cache" in follower.state.problem
    (tmp_path / "cache").unlink()
    follower.poll()
    assert served.accepted == [1, 2]


def test_missing_alias_and_missing_registry_are_told_apart(registry, tmp_path):
    with pytest.raises(ValueError, match=r"@nobody does not exist.*jobs.promote"):
        look_up(Alias(name=NAME, alias="nobody", tracking_uri=registry.uri))
    with pytest.raises(ValueError, match="domino-none@champion does not exist"):
        look_up(Alias(name="domino-none", alias="champion", tracking_uri=registry.uri))
    with pytest.raises(RegistryUnavailableError, match="no MLflow database"):
        look_up(Alias(name=NAME, alias="champion", tracking_uri=f"sqlite:///{tmp_path}/none.db"))
    with pytest.raises(RegistryUnavailableError, match="does not answer"):
        look_up(Alias(name=NAME, alias="champion", tracking_uri="http://127.0.0.1:9"))


def test_drafter_setting_is_an_alias_a_folder_or_none(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    alias = parse_alias("models:/domino-x@champion", "sqlite:////x.db")
    assert alias == Alias(name="domino-x", alias="champion", tracking_uri="sqlite:////x.db")
    assert parse_alias("none", "") is None
    assert parse_alias(str(tmp_path), "") is None
    for drafter, uri, message in [
        ("", "", "drafter is empty"),
        ("models:/domino-x", "u", "NAME@ALIAS"),
        ("models:/../x@champion", "u", "NAME@ALIAS"),
        ("models:/domino-x@champion", "", "tracking_uri"),
        (str(tmp_path / "none"), "", "no such folder"),
    ]:
        with pytest.raises(ValueError, match=message):
            parse_alias(drafter, uri)


def test_a_version_that_its_gate_refused_replaces_nothing_until_the_gate_says_otherwise(registry, tmp_path):
    follower, served = started(registry, tmp_path)
    tag = registry.client.set_model_version_tag
    tag(NAME, "2", "gate", "failed: tau 1.0 < 1.5")
    registry.promote("2")
    for _ in range(2):
        follower.poll()
        assert follower.state.problem == "version 2 is refused: its gate failed: tau 1.0 < 1.5"
    assert (served.tried, follower.state.live) == (["1"], "1")
    again, _ = follow(registry, tmp_path)  # a replica that starts meanwhile takes what this host has accepted
    again.start(poll_seconds=3600)
    again.close()
    assert again.state.live == "1"
    assert "version 2 is refused" in again.state.problem
    alone, _ = follow(registry, tmp_path / "new-host")  # slow is better than nothing, and the output is the same
    alone.start(poll_seconds=3600)
    alone.close()
    assert alone.state.live == "2"
    tag(NAME, "2", "gate", "passed")
    follower.poll()
    assert (follower.state.live, follower.state.problem) == ("2", "")
    follower.close()
    tag(NAME, "2", "gate", "not run")


def test_a_store_whose_library_is_not_installed_ends_no_thread(registry, tmp_path, monkeypatch):
    follower, served = started(registry, tmp_path)
    registry.promote("2")

    def without_boto(*args, **settings):
        raise ModuleNotFoundError("No module named 'botocore'")

    with monkeypatch.context() as patched:
        patched.setattr("mlflow.artifacts.download_artifacts", without_boto)
        follower.poll()
    assert "version 2: No module named 'botocore'" in follower.state.problem
    follower.poll()
    assert served.accepted == [1, 2]


def test_a_replica_that_repairs_a_version_leaves_the_one_alone_that_another_has_repaired(
    registry, tmp_path, monkeypatch
):
    from mlflow.artifacts import download_artifacts

    alias = Alias(name=NAME, alias="champion", tracking_uri=registry.uri)
    cache, version = DrafterCache(tmp_path), look_up(alias)
    folder = cache.fetch(alias, version)
    monkeypatch.setattr("serve.drafter_cache.folder_digest", lambda path: (path / "config.json").read_text())
    version = replace(version, digest=(folder / "config.json").read_text())
    (folder / "config.json").write_text("damaged")
    repaired = []

    def slowly(*args, **settings):
        with monkeypatch.context() as patched:
            patched.setattr("mlflow.artifacts.download_artifacts", download_artifacts)
            repaired.append(cache.fetch(alias, version).stat().st_ino)
        return download_artifacts(*args, **settings)

    monkeypatch.setattr("mlflow.artifacts.download_artifacts", slowly)
    assert cache.fetch(alias, version) == folder
    assert [folder.stat().st_ino] == repaired
    assert (folder / "config.json").read_text() == version.digest


def test_notes_of_two_replicas_with_one_process_id(tmp_path, monkeypatch):
    """As in two containers that share the folder."""
    alias = Alias(name=NAME, alias="champion", tracking_uri="")
    caches, versions = [DrafterCache(tmp_path) for _ in range(2)], [Version(number=n, source=n) for n in "12"]
    write_bytes = Path.write_bytes

    def meanwhile(path, content):
        monkeypatch.setattr(Path, "write_bytes", write_bytes)
        write_bytes(path, content)
        caches[1].remember(alias, versions[1])

    monkeypatch.setattr(Path, "write_bytes", meanwhile)
    caches[0].remember(alias, versions[0])
    assert caches[0].last_accepted(alias) == versions[0]
    assert [path.name for path in (tmp_path / NAME).iterdir()] == ["accepted-champion.json"]


def test_a_note_that_finds_no_room_leaves_nothing(tmp_path, monkeypatch):
    def full(path, content):
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        DrafterCache(tmp_path).remember(
            Alias(name=NAME, alias="champion", tracking_uri=""), Version(number="1", source="1")
        )
    assert list((tmp_path / NAME).iterdir()) == []


@pytest.mark.parametrize("name", ["a#b", "50%", "50%25", "a b"])
def test_a_registry_in_a_folder_of_any_name(tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    sqlite3.connect(folder / "mlflow.db").close()
    check_reachable(f"sqlite:///{folder}/mlflow.db")
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_what_speaks_no_http_is_no_registry():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet():
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"SSH-2.0-OpenSSH\r\n")

        threading.Thread(target=greet, daemon=True).start()
        with pytest.raises(RegistryUnavailableError, match=r"does not answer: SSH-2\.0"):
            check_reachable(f"http://127.0.0.1:{listener.getsockname()[1]}")


@pytest.mark.parametrize("uri", ["ftp://host/x", "mysql+no_such_driver://h/x"])
def test_a_registry_that_mlflow_cannot_use_is_told(uri):
    with pytest.raises(RegistryUnavailableError, match=re.escape(uri)):
        look_up(Alias(name=NAME, alias="champion", tracking_uri=uri))
