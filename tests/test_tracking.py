"""Tracking: which store, whether it answers, and metrics that survive restarts and outages."""

import http.server
import sqlite3
import sys
import threading
import time
from pathlib import Path

import pytest

from pipelines import tracking


def test_store_is_argument_then_environment_then_root(monkeypatch, tmp_path):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert tracking.tracking_uri(None, tmp_path) == f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracker:5000")
    assert tracking.tracking_uri(None, tmp_path) == "http://tracker:5000"
    assert tracking.tracking_uri("sqlite:////x.db", tmp_path) == "sqlite:////x.db"


def test_a_server_that_is_not_there_is_a_quick_and_clear_error():
    started = time.monotonic()
    with pytest.raises(ValueError, match=r"127\.0\.0\.1:9 does not answer.*tracking_uri="):
        tracking.connect("http://127.0.0.1:9")
    assert time.monotonic() - started < tracking.HEALTH_SECONDS + 2


def test_a_server_that_hangs_is_given_up_on(monkeypatch):
    import socket

    monkeypatch.setattr(tracking, "HEALTH_SECONDS", 0.5)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with pytest.raises(ValueError, match="does not answer"):
            tracking.connect(f"http://127.0.0.1:{listener.getsockname()[1]}")


def test_a_server_that_is_ill_is_told_by_its_code():
    class Ill(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(503)

        def log_message(self, *arguments):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Ill)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with pytest.raises(ValueError, match="answers 503"):
            tracking.connect(f"http://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()


def test_an_address_that_is_none_and_a_driver_that_is_not_installed_are_told(monkeypatch):
    with pytest.raises(ValueError, match=r"127\.0\.0\.1:port does not answer .*nonnumeric port"):
        tracking.check_store("http://127.0.0.1:port")
    monkeypatch.setitem(sys.modules, "pymysql", None)
    with pytest.raises(ValueError, match="MLflow cannot use tracking_uri=mysql"):
        tracking.connect("mysql+pymysql://h/x")


@pytest.mark.parametrize("uri", ["file:///tmp/mlruns", "/tmp/mlruns", "ftp://host/x", "databricks"])
def test_a_folder_is_no_store(uri):
    with pytest.raises(ValueError, match="needs a database"):
        tracking.connect(uri)


def test_a_database_that_cannot_be_opened(tmp_path):
    (tmp_path / "folder.db").mkdir()
    with pytest.raises(ValueError, match=r"folder\.db cannot be opened"):
        tracking.check_store(f"sqlite:///{tmp_path}/folder.db")
    (tmp_path / "text.db").write_text("this is no database, whatever its name says " * 9)
    with pytest.raises(ValueError, match=r"text\.db cannot be opened.*not a database"):
        tracking.connect(f"sqlite:///{tmp_path}/text.db")
    tracking.check_store(f"sqlite:///{tmp_path}/new/new.db")
    assert not (tmp_path / "new").exists()  # a check leaves nothing behind


def test_run_with_metrics_in_a_database(tmp_path, capsys):
    uri = tracking.tracking_uri(f"sqlite:///{tmp_path}/deep/mlflow.db", tmp_path)
    client = tracking.connect(uri)
    mode = sqlite3.connect(tmp_path / "deep" / "mlflow.db").execute("PRAGMA journal_mode").fetchone()
    assert mode == ("wal",)
    run_id = tracking.start_run(
        client, "domino", tmp_path, "first", {f"p{i}": str(i) for i in range(150)}, {"kind": "x"}
    )
    run = client.get_run(run_id)
    assert len(run.data.params) == 150
    assert Path(str(run.info.artifact_uri).removeprefix("file://")).is_relative_to(tmp_path / "artifacts")
    assert tracking.experiment_id(client, "domino", tmp_path) == run.info.experiment_id

    log = tracking.MetricLog(uri, run_id)
    for step in range(1, 4):
        log.add({"final_loss": 3.0 / step}, step)
    # A restarted worker repeats steps 2 and 3: they are not stored twice.
    again = tracking.MetricLog(uri, run_id)
    for step in range(2, 6):
        again.add({"final_loss": 9.0}, step)
    history = [(metric.step, metric.value) for metric in client.get_metric_history(run_id, "final_loss")]
    assert sorted(history) == [(1, 3.0), (2, 1.5), (3, 1.0), (4, 9.0), (5, 9.0)]


def test_one_store_does_not_become_the_default_of_the_next(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    tracking.connect(f"sqlite:///{tmp_path}/one.db")
    assert tracking.tracking_uri(None, tmp_path / "two") == f"sqlite:///{tmp_path}/two/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:////wished.db")
    tracking.connect(f"sqlite:///{tmp_path}/one.db")
    assert tracking.tracking_uri(None, tmp_path) == "sqlite:////wished.db"


def test_a_store_that_is_away_delays_metrics(tmp_path, capsys):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = tracking.connect(uri)
    run_id = tracking.start_run(client, "domino", tmp_path, "away", {}, {})
    log = tracking.MetricLog("http://127.0.0.1:9", run_id)  # away from the start, as after a restart of the worker
    log.add({"final_loss": 1.0}, 1)
    assert "will retry" in capsys.readouterr().err
    log.add({"final_loss": 0.9}, 2)  # within the minute nobody asks, or waits
    assert capsys.readouterr().err == ""
    log.uri, log.retry_at = uri, 0.0
    log.add({"final_loss": 0.8}, 3)
    assert [metric.step for metric in client.get_metric_history(run_id, "final_loss")] == [1, 2, 3]
    # In the middle of a run, too.
    log.run_id = "0" * 32
    log.add({"final_loss": 0.7}, 4)
    assert "will retry" in capsys.readouterr().err
    log.run_id, log.retry_at = run_id, 0.0
    log.add({"final_loss": 0.6}, 5)
    assert [metric.step for metric in client.get_metric_history(run_id, "final_loss")] == [1, 2, 3, 4, 5]


def test_what_a_store_missed_is_sent_by_whoever_goes_on(tmp_path, capsys):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = tracking.connect(uri)
    run_id = tracking.start_run(client, "domino", tmp_path, "missed", {}, {})
    lines = [{"step": float(step), "final_loss": 1.0 / step} for step in range(1, 6)]
    first = tracking.MetricLog(uri, run_id)
    first.add(lines[0], 1)
    first.uri, first.client = "http://127.0.0.1:9", None
    first.add(lines[1], 2)  # the worker is killed before the store is back
    # The next one has the history of its checkpoint, and sends nothing twice.
    second = tracking.MetricLog(uri, run_id, lines[:3])
    second.add(lines[3], 4)
    assert second.close()
    assert [metric.step for metric in client.get_metric_history(run_id, "final_loss")] == [1, 2, 3, 4]
    # At the end of a run nobody waits for the next minute.
    second.retry_at = float("inf")
    second._queue(lines[4], 5)
    assert second.close()
    assert [metric.step for metric in client.get_metric_history(run_id, "final_loss")] == [1, 2, 3, 4, 5]
    away = tracking.MetricLog("http://127.0.0.1:9", run_id, lines)
    assert not away.close()


def test_the_end_of_a_run_is_told_or_said_to_be_untold(tmp_path, capsys):
    client = tracking.connect(f"sqlite:///{tmp_path}/mlflow.db")
    run_id = tracking.start_run(client, "domino", tmp_path, "end", {}, {})
    assert tracking.end_run(client, run_id, "FINISHED", {"drafter": "abc"})
    run = client.get_run(run_id)
    assert (run.info.status, run.data.tags["drafter"]) == ("FINISHED", "abc")
    assert not tracking.end_run(client, "0" * 32, "FAILED", {})
    assert "does not hear that run" in capsys.readouterr().err


def test_an_outage_in_the_middle_of_work_is_named_and_other_failures_stay_what_they_are(tmp_path):
    with (
        pytest.raises(ValueError, match=r"127\.0\.0\.1:9 does not answer"),
        tracking.naming_outages("http://127.0.0.1:9"),
    ):
        raise OSError("broken pipe")
    with pytest.raises(OSError, match="mine"), tracking.naming_outages(f"sqlite:///{tmp_path}/mlflow.db"):
        raise OSError("mine")
