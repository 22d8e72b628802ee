"""MLflow runs: where they live, whether the store answers, and metrics sent from one rank.

Only the client API is used (the fluent one keeps state per process), and MLflow is imported late: it takes seconds.
"""

from __future__ import annotations

import http.client
import os
import re
import sqlite3
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from domino_core.redact import redacted, without_user

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

EXPERIMENT = "domino"  # runs and models of this project
DATABASES = ("sqlite", "postgresql", "mysql", "mssql")  # MLflow's; their drivers are the user's to install
HEALTH_SECONDS = 5.0  # MLflow's own retries would keep a user waiting for minutes
BATCH_METRICS = 900  # the REST API takes 1000 metrics a call
RETRY_SECONDS = 60.0
KEPT_METRICS = 100_000  # of a store that does not answer; older ones are dropped


def tracking_uri(argument: str | None, root: str | Path) -> str:
    """The store to use: the argument, $MLFLOW_TRACKING_URI, or a SQLite file below `root`."""
    return argument or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path(root).resolve()}/mlflow.db"


def check_store(uri: str) -> None:
    """ValueError within seconds for a store that does not answer or that MLflow cannot use. Writes nothing."""
    if uri.startswith(("http://", "https://")):
        _check_server(uri)
    elif uri.startswith("sqlite:///"):
        path = Path(uri.removeprefix("sqlite:///"))
        if path.is_dir() or (path.exists() and not os.access(path, os.W_OK)):
            raise ValueError(f"tracking database {path} cannot be opened for writing: name a file with tracking_uri=")
    elif re.split(r"[+:]", uri)[0] not in DATABASES or "://" not in uri:
        raise ValueError(
            f"tracking_uri={uri}: MLflow's registry needs a database, such as sqlite:////data/mlflow.db, or a server"
        )


def connect(uri: str) -> MlflowClient:
    """A client of a store that was checked; a SQLite file is created if it is not there."""
    check_store(uri)
    if uri.startswith(("http://", "https://")):
        # Later failures are bounded too: about 20 s instead of several minutes a call.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    elif uri.startswith("sqlite:///"):
        _prepare_sqlite(Path(uri.removeprefix("sqlite:///")))
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    import mlflow
    from mlflow.exceptions import MlflowException

    # Also the process-wide one: with a database, creating a version looks its model up in a client of its own. MLflow
    # notes it in the environment as well, where `tracking_uri` would take it for the user's wish.
    wished = {name: os.environ.get(name) for name in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI")}
    mlflow.set_tracking_uri(uri)
    mlflow.set_registry_uri(uri)
    for name, value in wished.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    try:  # a database whose driver is not installed or not known to MLflow, or of another version of it
        return mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)
    except (MlflowException, ImportError) as error:
        raise ValueError(f"MLflow cannot use tracking_uri={uri}: {error}") from error


@contextmanager
def naming_outages(uri: str) -> Iterator[None]:
    """Around work with a store: if it fails and the store no longer answers, that is a ValueError which says so."""
    from mlflow.exceptions import MlflowException

    try:  # the boundary to the tracking store
        yield
    except (MlflowException, OSError):
        check_store(uri)
        raise


def _check_server(uri: str) -> None:
    request = urllib.request.Request(without_user(uri).rstrip("/") + "/health")
    try:  # the boundary to a server that may not be there
        urllib.request.urlopen(request, timeout=HEALTH_SECONDS).close()
    except urllib.error.HTTPError as error:
        # These come from a server that is there: MLflow's client brings the credentials, proxies hide /health.
        if error.code not in (401, 403, 404):
            raise ValueError(f"tracking server {uri} answers {error.code} to /health") from error
    except (OSError, http.client.HTTPException) as error:  # the latter: no address, or what answers speaks no HTTP
        raise ValueError(
            f"tracking server {uri} does not answer ({error}): start it, or choose another with tracking_uri= "
            "or MLFLOW_TRACKING_URI"
        ) from error


def _prepare_sqlite(path: Path) -> None:
    """Create the database's folder and turn on write-ahead logging, so that readers do not wait for a training run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:  # the boundary to the file system
        connection = sqlite3.connect(path, timeout=30)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.close()
    except sqlite3.Error as error:
        raise ValueError(f"tracking database {path} cannot be opened: {error}") from error


def experiment_id(client: MlflowClient, name: str, root: str | Path) -> str:
    """Id of an experiment, created if missing, its artifacts below `root` (a server puts them where it was told to)."""
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        remote = client.tracking_uri.startswith(("http://", "https://"))
        location = None if remote else (Path(root).resolve() / "artifacts").as_uri()
        try:  # somebody else may have created it since
            return client.create_experiment(name, artifact_location=location)
        except MlflowException:
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    return found.experiment_id


def start_run(
    client: MlflowClient, experiment: str, root: str | Path, name: str, params: dict[str, str], tags: dict[str, str]
) -> str:
    """Id of a new run with its parameters logged. MLflow cuts values at 6000 characters; ours are far shorter."""
    from mlflow.entities import Param

    run_id = client.create_run(experiment_id(client, experiment, root), tags=tags, run_name=name).info.run_id
    entries = [Param(key, str(value)[:6000]) for key, value in params.items()]
    for start in range(0, len(entries), 100):  # the REST API takes 100 parameters a call
        client.log_batch(run_id, params=entries[start : start + 100])
    return run_id


def reopen_run(client: MlflowClient, run_id: str) -> bool:
    """Mark an earlier run as running again; False if this store does not know it."""
    return _known(lambda: client.update_run(run_id, status="RUNNING"))


def has_run(client: MlflowClient, run_id: str) -> bool:
    """Whether this store knows a run."""
    return _known(lambda: client.get_run(run_id))


def end_run(client: MlflowClient, run_id: str, status: str, tags: dict[str, str]) -> bool:
    """Tag a run and mark it as ended. False, and a line that says so, where the store does not take it: what the run
    has made, or why it failed, must not be lost to that."""
    from mlflow.exceptions import MlflowException

    try:  # the boundary to the tracking store
        for key, value in tags.items():
            client.set_tag(run_id, key, value)
        client.set_terminated(run_id, status)
    except (MlflowException, OSError) as error:
        print(
            f"tracking store does not hear that run {run_id} is {status}: {redacted(str(error))}",
            file=sys.stderr,
            flush=True,
        )
        return False
    return True


def _known(ask: Callable[[], object]) -> bool:
    from mlflow.exceptions import MlflowException

    try:  # the store may be another one than then
        ask()
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return False
    return True


class MetricLog:
    """Metrics of one run, sent in batches. A store that does not answer delays them, and never stops the training.

    Steps that the store has already are left out: a run that was interrupted repeats some. `history`: the log lines of
    a run that goes on, for those that nobody could send; what is stored has no gaps, because steps go in their order.
    """

    def __init__(self, uri: str, run_id: str, history: Iterable[dict[str, float]] = ()) -> None:
        self.uri = uri
        self.run_id = run_id
        self.client: MlflowClient | None = None
        self.stored = -1  # the last step that an earlier attempt has sent
        self.waiting: list[Metric] = []
        self.retry_at = 0.0
        for line in history:
            self._queue(line, int(line["step"]))

    def add(self, metrics: dict[str, float], step: int) -> None:
        """Queue the metrics of a step and try to send all that wait."""
        self._queue(metrics, step)
        self.flush()

    def close(self) -> bool:
        """A last attempt, however short ago the one before was; whether the store has everything."""
        self.retry_at = 0.0
        self.flush()
        return not self.waiting

    def _queue(self, metrics: dict[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        # "step" itself is a metric: it tells the next attempt how far this one came.
        self.waiting += [Metric(key, float(value), now, step) for key, value in (metrics | {"step": step}).items()]
        del self.waiting[:-KEPT_METRICS]

    def flush(self) -> None:
        """Send what waits; after a failure keep it, say so, and leave the store alone for a minute."""
        from mlflow.exceptions import MlflowException

        if not self.waiting or time.monotonic() < self.retry_at:
            return
        try:  # the boundary to the tracking store
            if self.client is None:
                client = connect(self.uri)
                self.stored = int(client.get_run(self.run_id).data.metrics.get("step", -1))
                self.client = client
            self.waiting = [metric for metric in self.waiting if metric.step > self.stored]
            while self.waiting:
                self.client.log_batch(self.run_id, metrics=self.waiting[:BATCH_METRICS])
                del self.waiting[:BATCH_METRICS]
        except (MlflowException, OSError, ValueError) as error:
            print(
                f"tracking store does not take metrics, will retry: {redacted(str(error))}", file=sys.stderr, flush=True
            )
            self.retry_at = time.monotonic() + RETRY_SECONDS
            # To connect again fails at once where MLflow's own retries hold up the training, and asks what has arrived.
            self.client = None
