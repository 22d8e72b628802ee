"""Waiting for a canary's verdict: the registry says who is compared, the endpoint's replicas how they do.

Nothing is kept here. The aliases and tags hold the state and the replicas the figures, so this process can be ended and
started again, and waits while either side does not answer.
"""

from __future__ import annotations

import json
import time
import urllib.request
from http.client import HTTPException
from typing import TYPE_CHECKING, Any

from domino_core.redact import redacted
from pipelines import canary, registry
from serve.registry_alias import RegistryUnavailableError, check_reachable
from serve.verdict import Verdict, judge

if TYPE_CHECKING:
    from jobs.presets import JobConfig

ENDPOINT_TIMEOUT_S = 45.0  # more than a replica waits for the others
TELL_S = 30.0  # between lines while nothing is decided
CLOCKS_DIFFER_S = 300.0  # of machines that take turns at watching


class EndpointAwayError(ValueError):
    """Nobody reports figures."""


def endpoints(job: JobConfig) -> tuple[str, ...]:
    given = job.canary.endpoints or (f"http://{job.serve.host}:{job.serve.port}",)
    return tuple(url.rstrip("/").removesuffix("/v1") for url in given)


def read_reports(url: str) -> list[dict[str, Any]]:
    """What the replicas behind an endpoint report."""
    try:  # the boundary to HTTP, to JSON, and to whatever else may listen there
        with urllib.request.urlopen(f"{url}/canary", timeout=ENDPOINT_TIMEOUT_S) as response:
            reports = json.load(response)["replicas"]
        if not reports or not all(isinstance(report, dict) and "unable" in report for report in reports):
            raise ValueError(f"no replica's report: {str(reports)[:80]}")
        return reports
    except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:
        raise EndpointAwayError(
            f"{url}/canary does not answer ({error}): start the endpoint (python -m jobs.deploy), or name it with "
            "serve.port= or canary.endpoints="
        ) from error


def check_endpoints(job: JobConfig, name: str) -> None:
    """ValueError where a canary could never be decided: no endpoint, or one that can try out no version of `name`."""
    for url in endpoints(job):
        if problem := unable(read_reports(url), name):
            raise ValueError(f"{url} can try out no version: {problem}")


def unable(reports: list[dict[str, Any]], name: str) -> str:
    """Why these replicas can try out no version of `name`; "" if they can."""
    for report in reports:
        if report["unable"]:
            return report["unable"]
        if report["registered_model"] != name:
            return (
                f"the endpoint follows {report['registered_model']}, not {name}: give its target=, or name the "
                "endpoint of this one with serve.port= or canary.endpoints="
            )
    return ""


def check_free(client: Any, name: str, number: str) -> bool:
    """Whether the version's own canary is running. ValueError where another's is, or where there is none to run."""
    own = canary.look(client, name, number)
    if own.unfinished:
        return True
    if not own.champion:
        raise ValueError(f"{name} has no champion to compare version {number} with: promote it without --canary")
    trial = canary.running(client, name)
    if trial is not None and trial.number != number:
        raise ValueError(
            f"version {trial.number} of {name} is being tried out: wait for it (--canary --version {trial.number} "
            "shows it), or give it up (--abandon)"
        )
    if own.champion == number:
        raise ValueError(f"version {number} of {name} is the champion, there is nothing to compare it with")
    return False


def begin(client: Any, name: str, number: str) -> None:
    trial = canary.look(client, name, number)
    canary.begin(client, trial, time.time())
    print(f"{name}: version {number} is tried out beside version {trial.champion}, the champion", flush=True)


def abandon(client: Any, name: str) -> int:
    """End the running canary without a verdict; the champion stays."""
    trial = canary.running(client, name)
    if trial is None:
        raise ValueError(f"{name} has no canary that is running")
    canary.conclude(client, trial, "abandoned", {}, promoted=False)
    print(f"{name}: version {trial.number} is no longer tried out, champion is version {trial.champion or 'none'}")
    return 0


def watch(job: JobConfig, client: Any, uri: str, name: str, number: str) -> int:
    """Look until there is a verdict, carry it out, and return the exit code: 0 where the version is champion."""
    told, known = -TELL_S, {url: [] for url in endpoints(job)}
    while True:
        code, lines = None, []
        for url in known:
            try:  # outages are waited for; what is known of an endpoint's figures stays
                known[url] = read_reports(url)
            except EndpointAwayError as error:
                lines.append(f"waiting: {error}")
            if problem := unable(known[url], name):  # deployed anew, with other settings
                lines.append(f"waiting: {url} can try out no version: {problem}")
        reports = [report for each in known.values() for report in each]
        try:
            check_reachable(uri)  # MLflow would make an empty database where there was one, or retry for minutes
            with registry.answering():
                code, text = one_turn(job, client, name, number, reports, time.time())
            lines.append(text)
        except (RegistryUnavailableError, registry.RegistryAwayError) as error:
            lines.append(f"the registry does not answer, waiting: {redacted(str(error))}")
        if code is not None or time.monotonic() - told >= TELL_S:
            print("\n".join(f"{name}: {line}" for line in lines), flush=True)
            told = time.monotonic()
        if code is not None:
            return code
        time.sleep(job.canary.poll_seconds)


def one_turn(
    job: JobConfig, client: Any, name: str, number: str, reports: list[dict[str, Any]], now: float
) -> tuple[int | None, str]:
    """One look and what follows from it: the exit code where the canary has ended, and what to tell."""
    trial = canary.look(client, name, number)
    if trial.champion == number:
        canary.conclude(client, trial, "promoted", {}, promoted=True)
        return 0, f"champion is version {number}"
    if not trial.running:
        return 1, f"version {number} is no longer tried out: its alias or its canary was taken away"
    if not trial.champion:
        return None, f"no version is champion: promote one, and version {number} is compared with it, or --abandon"
    if trial.champion != trial.against:
        canary.begin(client, trial, now)
        return None, f"champion is version {trial.champion} now: version {number} is compared with it from here on"
    if trial.started is None or trial.started > now + CLOCKS_DIFFER_S:
        canary.begin(client, trial, now)
        return None, f"version {number} was tried out since no time that has been: its time starts anew"
    over = now >= trial.started + 60 * job.canary.max_minutes
    verdict = judge(reports, trial.pair, job.canary, over=over)
    if verdict.decision == "wait":
        return None, f"version {number} against {trial.against}: {shown(verdict)}"
    promoted = verdict.decision == "promote"
    text = "promoted" if promoted else "rolled back: " + "; ".join(verdict.reasons)
    canary.conclude(client, trial, text, verdict.figures, promoted=promoted)
    champion = number if promoted else trial.champion
    return int(not promoted), f"version {number} is {text}\n{shown(verdict)}\n{name}: champion is version {champion}"


def shown(verdict: Verdict) -> str:
    return ", ".join(f"{name} {text}" for name, text in verdict.figures.items())
