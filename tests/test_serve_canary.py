"""A challenger beside the champion in a running server, found in a real registry: share, figures, swap, mishaps.

Output is the target's own whichever version drafts, so every answer is compared with plain decoding's.
"""

import threading
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from domino_core.checkpoint import save_drafter
from domino_core.drafter import Drafter
from domino_core.target import load_vocabulary, target_hash
from jobs import canary as job_canary
from jobs import promote
from jobs.drill_ground import free_port
from pipelines import canary, gate
from pipelines.registry import find_version
from pipelines.registry import promote as give_alias
from pipelines.tracking import connect
from serve.canary import in_share
from serve.config import ServeConfig
from serve.server import Server
from tests.serving import HTTP, Registry, damage, drafter_config, listening, wait_until

SHARE = 0.5
BODY = {"model": "tiny-qwen3", "prompt": "import os\n\ndef ", "temperature": 0, "max_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def registry(tmp_path_factory, embedded_target):
    """Four versions: 1, 2 and 4 fit and draft noise, 3 is damaged."""
    root = tmp_path_factory.mktemp("registry")
    registry = Registry(root, embedded_target)
    for number, block_size in ((1, 4), (2, 5), (3, 3), (4, 6)):
        drafter = Drafter(drafter_config(embedded_target, block_size=block_size), *load_vocabulary(embedded_target))
        folder = save_drafter(drafter, root / f"drafter-{number}", {"target_hash": target_hash(embedded_target)})
        assert registry.add(damage(folder) if number == 3 else folder) == str(number)
    return registry


@pytest.fixture
def client(registry):
    """Version 1 is champion, and nothing is tried out."""
    client = connect(registry.uri)
    registry.promote("1")
    for alias in ("challenger", "previous"):
        client.delete_registered_model_alias(registry.name, alias)
    return client


@pytest.fixture(scope="module")
def expected(embedded_target):
    server = Server(ServeConfig(target=str(embedded_target), drafter="none", max_rows=1, max_length=256))
    with listening(server) as url:
        return HTTP.post(f"{url}/v1/completions", json=BODY).json()["choices"][0]["text"]


@pytest.fixture
def server(registry, client, embedded_target, tmp_path):
    return Server(
        ServeConfig(
            target=str(embedded_target),
            drafter=registry.champion,
            tracking_uri=registry.uri,
            cache_dir=str(tmp_path / "cache"),
            poll_seconds=0.2,
            max_length=256,
            max_rows=4,
            canary_share=SHARE,
        )
    )


@pytest.fixture
def url(server):
    with listening(server) as url:
        yield url


def ask(url: str, request_id: str, **fields) -> httpx.Response:
    return HTTP.post(f"{url}/v1/completions", json=BODY | fields, headers={"X-Request-Id": request_id})


def version_of(response: httpx.Response) -> str:
    return response.json()["system_fingerprint"].rpartition("-")[2]


def state(url: str) -> str:
    return HTTP.get(f"{url}/health").json()["canary"]["state"]


def report(url: str) -> dict:
    (report,) = HTTP.get(f"{url}/canary").json()["replicas"]
    return report


@contextmanager
def load(url: str, expected: str, threads: int = 3):
    """Clients that ask all the time. Yields how many answers each version gave; every answer is the target's own."""
    seen: Counter[str] = Counter()
    failures: list[object] = []
    done = threading.Event()

    def keep_asking(name: int) -> None:
        for number in range(100_000):
            if done.is_set():
                return
            response = ask(url, f"{name}-{number}")
            if response.status_code != 200 or response.json()["choices"][0]["text"] != expected:
                failures.append(response.text)
                return
            seen[version_of(response)] += 1

    workers = [threading.Thread(target=keep_asking, args=(name,)) for name in range(threads)]
    for worker in workers:
        worker.start()
    try:
        yield seen
    finally:
        done.set()
        for worker in workers:
            worker.join()
    assert failures == []


def test_requests_are_shared_by_their_ids_and_counted_by_version(url, client, registry, expected):
    assert version_of(ask(url, "before")) == "1"
    registry.try_out("2")
    wait_until(lambda: state(url) == "running")
    ids = [f"request-{number}" for number in range(8)]
    wanted = {name: "2" if in_share(name, "2", SHARE) else "1" for name in ids}
    assert set(wanted.values()) == {"1", "2"}
    for name in ids:
        response = ask(url, name)
        assert version_of(response) == wanted[name] == version_of(ask(url, name, max_tokens=1))
        assert response.json()["choices"][0]["text"] == expected
    with HTTP.stream(
        "POST", f"{url}/v1/completions", json=BODY | {"stream": True, "n": 1}, headers={"X-Request-Id": ids[0]}
    ) as response:
        assert f"-drafter-{wanted[ids[0]]}" in response.read().decode()
    found = report(url)
    counts = Counter(wanted.values())
    assert found["champion"] == "1"
    assert found["version"] == "2"
    for arm, number in (("champion", "1"), ("challenger", "2")):
        figures = found["figures"][arm]
        streamed = int(number == wanted[ids[0]])
        assert figures["requests"] == 2 * counts[number] + streamed  # the one before the canary is not among them
        assert figures["acceptance"]["count"] == counts[number] + streamed  # one token needs no round
        assert figures["steps"]["1"]["count"] >= counts[number]
        assert 0 < figures["steps"]["1"]["x"] < 60
        tokens = figures["steps"]["1"]["y"]
        # Of 24 tokens the first two come with the prompt: that step is none of them.
        assert 15 * (counts[number] + streamed) < tokens <= 22 * (counts[number] + streamed)


def test_challenger_that_wins_takes_all_requests_with_its_own_engine_and_none_is_lost(
    server, url, client, registry, expected
):
    with load(url, expected) as seen:
        wait_until(lambda: seen["1"] >= 3)
        registry.try_out("2")
        wait_until(lambda: seen["2"] >= 3)
        engine = server.loop.canary.engine
        canary.conclude(client, canary.look(client, registry.name, "2"), "promoted", {}, promoted=True)
        wait_until(lambda: server.loop.live.version == "2")
        before = seen["2"]
        wait_until(lambda: seen["2"] >= before + 6)
    wait_until(lambda: server.loop.versions() == ["2"])
    assert server.loop.live.engine is engine  # nothing is loaded a second time
    assert (state(url), find_version(client, registry.name, alias="previous").version) == ("none", 1)


def test_challenger_that_loses_goes_and_its_requests_are_answered(server, url, client, registry, expected):
    registry.try_out("2")
    wait_until(lambda: state(url) == "running")
    name = next(name for name in map(str, range(99)) if in_share(name, "2", SHARE))
    with HTTP.stream(
        "POST", f"{url}/v1/completions", json=BODY | {"stream": True, "max_tokens": 120}, headers={"X-Request-Id": name}
    ) as response:
        lines = response.iter_lines()
        assert "-drafter-2" in next(lines)
        assert server.loop.draining == ""  # it is no engine that is on its way out
        trial = canary.look(client, registry.name, "2")
        canary.conclude(client, trial, "rolled back: slow", {"tau": "1 against 2"}, promoted=False)
        wait_until(lambda: server.loop.canary is None)
        rest = list(lines)
    assert rest[-2] == "data: [DONE]"
    assert {version_of(ask(url, str(number))) for number in range(8)} == {"1"}
    wait_until(lambda: server.loop.versions() == ["1"])
    tags = find_version(client, registry.name, version="2").tags
    assert (tags["canary"], tags["canary_verdict"]) == ("ended", "rolled back: slow")
    assert tags["canary_tau"] == "1 against 2"
    with pytest.raises(ValueError, match="no alias 'challenger'"):
        find_version(client, registry.name, alias="challenger")


def test_challenger_whose_engine_fails_gets_no_more_requests_and_harms_no_health(server, url, client, registry):
    registry.try_out("2")
    wait_until(lambda: state(url) == "running")

    def fail() -> None:
        raise RuntimeError("device lost")

    server.loop.canary.engine.step = fail
    answers = [ask(url, str(number)) for number in range(8)]
    wanted = [in_share(str(number), "2", SHARE) for number in range(8)]
    first = wanted.index(True)
    assert [answer.status_code for answer in answers] == [503 if k == first else 200 for k in range(8)]
    assert HTTP.get(f"{url}/health").status_code == 200
    found = report(url)
    assert (found["state"], found["figures"]["challenger"]["errors"]) == ("failed", 1)
    assert "device lost" in found["problem"]


def test_a_new_champion_makes_room_for_itself_and_the_figures_begin_anew(server, url, client, registry, expected):
    registry.try_out("2")
    wait_until(lambda: state(url) == "running")
    with load(url, expected) as seen:
        wait_until(lambda: seen["1"] >= 2 and seen["2"] >= 2)
        registry.promote("4")
        wait_until(lambda: server.loop.live.version == "4" and server.loop.canary is not None)
        assert report(url)["figures"]["challenger"]["requests"] <= seen["2"]
    assert report(url)["champion"] == "4"
    assert seen.keys() <= {"1", "2", "4"}


def test_untagged_and_damaged_challengers_get_no_requests(url, server, client, registry):
    client.set_registered_model_alias(registry.name, "challenger", "2")  # by hand, or by jobs.promote --alias
    client.set_model_version_tag(registry.name, "2", "canary", "ended")
    time.sleep(1)
    assert state(url) == "none"
    registry.try_out("3")
    wait_until(lambda: state(url) == "refused")
    assert {version_of(ask(url, str(number))) for number in range(6)} == {"1"}
    assert "damaged" in HTTP.get(f"{url}/health").json()["canary"]["problem"]
    job = promote_job(registry, url)
    code, said = job_canary.one_turn(job, client, registry.name, "3", job_canary.read_reports(url), time.time())
    assert code == 1
    assert "version 3 is rolled back: version 3 is refused" in said
    wait_until(lambda: state(url) == "none")


def interrupted(work) -> None:
    """Ctrl-C, half a second after it begins to wait."""
    job_canary_sleep = job_canary.time.sleep

    def stop(_seconds: float) -> None:
        raise KeyboardInterrupt

    job_canary.time.sleep = stop
    try:
        work()
    finally:
        job_canary.time.sleep = job_canary_sleep


def promote_job(registry, url, *more: str):
    from jobs.overrides import apply
    from jobs.presets import tiny

    return apply(tiny(), [f"root={registry.root}", f"canary.endpoints={url}", *more])


LENIENT = [
    "canary.min_requests=4",
    "canary.poll_seconds=0.2",
    "canary.tau_margin=0.9",
    "gate.min_tau=1",
    "gate.margin=0.9",
]
LENIENT += ["canary.token_time_tolerance=9", "canary.first_token_tolerance=9", "evaluate.num_prompts=2"]
LENIENT += ["evaluate.max_tokens=8", "evaluate.repeats=1"]


def test_command_gates_tries_out_and_promotes_and_goes_on_where_it_was_killed(url, client, registry, expected, capsys):
    given = [f"root={registry.root}", f"canary.endpoints={url}", *LENIENT, "--canary", "--version", "2"]
    # Killed as soon as it waits: what it was doing is in the registry.
    with pytest.raises(KeyboardInterrupt):
        interrupted(lambda: promote.main(given))
    assert "gate of domino-tiny-qwen3 version 2: passed" in capsys.readouterr().out
    tags = find_version(client, registry.name, alias="challenger").tags
    assert (tags["canary"], tags["canary_against"], tags["gate"]) == ("running", "1", "passed")
    assert "accepted_at" in tags["self_check"]
    with pytest.raises(ValueError, match="version 2 of domino-tiny-qwen3 is being tried out"):
        promote.main([*given[:-1], "4"])
    assert registry.add(registry.root / "drafter-2") == "2"
    with load(url, expected) as seen:
        assert promote.main(given) == 0
        said = capsys.readouterr().out
        assert "going on with that" in said
        assert "gate of" not in said
        wait_until(lambda: seen["2"] > 4)
    champion = find_version(client, registry.name, alias="champion")
    assert str(champion.version) == "2"
    assert champion.tags["canary_verdict"] == "promoted"
    for figure in ("tau", "token_time", "first_token", "errors", "requests"):
        assert " against " in champion.tags[f"canary_{figure}"]


def test_a_version_registered_meanwhile_does_not_take_the_alias(client, registry, embedded_target):
    registry.try_out("2")
    drafter = Drafter(drafter_config(embedded_target, block_size=7), *load_vocabulary(embedded_target))
    number = registry.add(save_drafter(drafter, registry.root / "drafter-5", {}))
    assert str(find_version(client, registry.name, alias="challenger").version) == "2"
    canary.conclude(client, canary.look(client, registry.name, "2"), "abandoned", {}, promoted=False)
    client.delete_model_version(registry.name, number)


def test_registry_and_endpoint_that_go_away_are_waited_for(client, registry, url, expected, capsys):
    database = registry.root / "mlflow.db"
    away, job = database.with_name("away.db"), promote_job(registry, url, *LENIENT)
    registry.try_out("2")
    with load(url, expected) as seen:
        wait_until(lambda: seen["2"] >= 4 and seen["1"] >= 4)
    wrong = replace(job, canary=replace(job.canary, endpoints=(url, f"http://127.0.0.1:{free_port()}")))
    codes: list[int] = []
    waiting = threading.Thread(
        target=lambda: codes.append(job_canary.watch(wrong, client, registry.uri, registry.name, "2"))
    )
    database.rename(away)
    try:
        waiting.start()
        said = ""
        while "the registry does not answer, waiting" not in said:
            said += capsys.readouterr().out
            time.sleep(0.1)
        assert "/canary does not answer" in said
        assert not database.exists()  # looking must not create an empty one
    finally:
        away.rename(database)
        waiting.join(60)
    assert codes == [0]
    assert str(find_version(client, registry.name, alias="champion").version) == "2"


def test_aliases_that_others_move_and_time_that_runs_out(client, registry):
    job = promote_job(registry, "http://127.0.0.1:1", "canary.min_requests=2", "canary.max_minutes=10")

    def turn(after_s: float = 0.0) -> tuple[int | None, str]:
        return job_canary.one_turn(job, client, registry.name, "2", [], time.time() + after_s)

    registry.try_out("2")
    assert turn(599)[0] is None
    # Another champion: the time begins anew, against that one.
    registry.promote("4")
    code, said = turn(599)
    assert code is None
    assert "champion is version 4 now" in said
    assert canary.look(client, registry.name, "2").against == "4"
    assert turn(1190)[0] is None
    code, said = turn(1200)
    assert code == 1
    assert "rolled back: requests: 0 against 0 in canary.max_minutes=10" in said
    assert str(find_version(client, registry.name, alias="champion").version) == "4"
    # Somebody else ended it.
    code, said = turn()
    assert code == 1
    assert "no longer tried out" in said
    # Somebody made it champion by hand, or a job was killed at the very end.
    registry.try_out("2")
    registry.promote("2")
    assert turn() == (0, "champion is version 2")
    assert find_version(client, registry.name, version="2").tags["canary"] == "ended"


def test_what_no_canary_can_come_of_is_named_before_anything_is_measured(
    server, client, registry, url, capsys, embedded_target
):
    given = [f"root={registry.root}", f"canary.endpoints={url}", "--canary", "--version"]
    with pytest.raises(ValueError, match="version 1 of domino-tiny-qwen3 is the champion"):
        promote.main([*given, "1"])
    with pytest.raises(ValueError, match=r"127.0.0.1:1/canary does not answer .*jobs.deploy.*canary.endpoints="):
        promote.main([*given, "2", "canary.endpoints=http://127.0.0.1:1"])
    with pytest.raises(ValueError, match="without --rollback, --abandon and --alias"):
        promote.main([f"root={registry.root}", "--canary", "--abandon"])
    settings = replace(server.config, max_ongoing_requests=1, target_ongoing_requests=1.0)
    before, server.config = server.config, settings
    with pytest.raises(ValueError, match="max_ongoing_requests=1, so no replica can be asked: give 2"):
        promote.main([*given, "2"])
    server.config = before
    for share, reason in ((0.0, "canary_share=0"), (0.1, "serve.drafter=none")):
        plain = Server(
            ServeConfig(target=str(embedded_target), drafter="none", max_rows=1, max_length=64, canary_share=share)
        )
        with listening(plain) as other, pytest.raises(ValueError, match=f"can try out no version.*{reason}"):
            promote.main([*given, "2", f"canary.endpoints={other}"])
    client.delete_registered_model_alias(registry.name, "champion")
    with pytest.raises(ValueError, match="no champion to compare version 2 with: promote it without --canary"):
        promote.main([*given, "2"])
    registry.promote("1")
    with pytest.raises(ValueError, match="no canary that is running"):
        promote.main([f"root={registry.root}", "--abandon"])
    registry.try_out("2")
    assert promote.main([f"root={registry.root}", "--abandon"]) == 0
    assert "version 2 is no longer tried out, champion is version 1" in capsys.readouterr().out
    assert find_version(client, registry.name, version="2").tags["canary_verdict"] == "abandoned"


def test_two_canaries_that_begin_at_once_are_one(client, registry, url, monkeypatch):
    """Another command begins its canary while this one's gate measures."""
    examine = gate.examine

    def measured(*given, **named):
        found = examine(*given, **named)
        registry.try_out("4")
        return found

    monkeypatch.setattr(gate, "examine", measured)
    given = [f"root={registry.root}", f"canary.endpoints={url}", *LENIENT, "--canary", "--version", "2"]
    with pytest.raises(ValueError, match="version 4 of domino-tiny-qwen3 is being tried out"):
        promote.main(given)
    trial = canary.running(client, registry.name)
    assert trial is not None
    assert trial.number == "4"
    assert find_version(client, registry.name, version="2").tags.get("canary") != "running"
    canary.conclude(client, canary.look(client, registry.name, "4"), "abandoned", {}, promoted=False)


def test_the_endpoint_of_another_target_is_refused(registry, url):
    job = promote_job(registry, url)
    job_canary.check_endpoints(job, registry.name)
    with pytest.raises(ValueError, match=r"follows domino-tiny-qwen3, not domino-other: .*canary.endpoints="):
        job_canary.check_endpoints(job, "domino-other")


@pytest.mark.parametrize(
    "page", ["[]", "{}", "null", '{"replicas": []}', '{"replicas": [1]}', '{"replicas": 5}', "<p>"]
)
def test_whatever_else_answers_is_no_endpoint(registry, page):
    with answering_with(page.encode()) as other, pytest.raises(job_canary.EndpointAwayError, match=r"name it with "):
        job_canary.check_endpoints(promote_job(registry, other), registry.name)


@contextmanager
def answering_with(page: bytes):
    """Some other server."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{other.server_port}"
        other.shutdown()


def test_without_a_champion_a_canary_waits_and_can_be_given_up(client, registry, capsys):
    job = promote_job(registry, "http://127.0.0.1:1")
    registry.try_out("2")
    client.delete_registered_model_alias(registry.name, "champion")
    for after_s in (0, 10**6):
        code, said = job_canary.one_turn(job, client, registry.name, "2", [], time.time() + after_s)
        assert (code, "no version is champion: promote one" in said) == (None, True)
    assert promote.main([f"root={registry.root}", "--abandon"]) == 0
    assert "champion is version none" in capsys.readouterr().out
    with pytest.raises(ValueError, match="no canary that is running"):
        promote.main([f"root={registry.root}", "target=assets/tiny-qwen3/", "--abandon"])


def test_a_version_that_is_deleted_ends_its_canary(client, registry, url, embedded_target, capsys):
    drafter = Drafter(drafter_config(embedded_target, block_size=8), *load_vocabulary(embedded_target))
    number = registry.add(save_drafter(drafter, registry.root / "drafter-gone", {}))
    registry.try_out(number)
    wait_until(lambda: state(url) == "running")
    client.delete_model_version(registry.name, number)
    with pytest.raises(ValueError, match=f"no version {number}"):
        job_canary.watch(promote_job(registry, url), client, registry.uri, registry.name, number)
    wait_until(lambda: state(url) == "none")
    assert {version_of(ask(url, str(k))) for k in range(6)} == {"1"}
    with pytest.raises(ValueError, match="no canary that is running"):
        promote.main([f"root={registry.root}", "--abandon"])
    registry.try_out("2")  # the next one is not in its way
    wait_until(lambda: state(url) == "running")


def test_a_time_that_is_none_and_another_alias_end_no_canary(client, registry):
    registry.try_out("2")
    give_alias(client, find_version(client, registry.name, version="2"), "other")
    job = promote_job(registry, "http://127.0.0.1:1")
    for damaged in ("", "yesterday", "nan", "inf", "10000000000.0"):
        registry.tag("2", canary_started=damaged)
        code, text = job_canary.one_turn(job, client, registry.name, "2", [], 5000.0)
        assert code is None, text
        assert "its time starts anew" in text
        assert canary.look(client, registry.name, "2").started == 5000.0
    code, text = job_canary.one_turn(job, client, registry.name, "2", [], 5000.0 + 60 * job.canary.max_minutes)
    assert code == 1
    assert "in canary.max_minutes" in text


def test_a_number_is_one_however_it_is_written(client, registry, url):
    command = ["--canary", "--version", "01", f"root={registry.root}", f"tracking_uri={registry.uri}"]
    with pytest.raises(ValueError, match=r"version 1 of .* is the champion"):
        promote.main([*command, f"canary.endpoints={url}"])


def test_an_outage_does_not_hide_why_a_version_is_refused(server, client, registry, url):
    registry.try_out("3")
    wait_until(lambda: state(url) == "refused")
    reason = report(url)["problem"]
    database = registry.root / "mlflow.db"
    database.rename(database.with_name("away.db"))
    try:
        wait_until(lambda: "no MLflow database" in HTTP.get(f"{url}/health").json()["drafter"]["problem"])
        time.sleep(0.5)  # the challenger's look comes after the champion's
        assert report(url)["problem"] == reason
    finally:
        database.with_name("away.db").rename(database)


def test_a_canary_goes_on_while_its_endpoint_is_away(client, registry, capsys):
    registry.try_out("2")
    given = [f"root={registry.root}", f"canary.endpoints=http://127.0.0.1:{free_port()}", *LENIENT, "--canary"]
    with pytest.raises(KeyboardInterrupt):
        interrupted(lambda: promote.main([*given, "--version", "2"]))
    assert "going on with that" in capsys.readouterr().out
