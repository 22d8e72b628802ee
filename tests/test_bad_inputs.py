"""What users get wrong, and what they are told: every message names the thing and how to put it right.

Commands run in this process as they do on a command line, up to the code and the line that they end with; none may go
as far as Ray. HTTP requests go to one served application, which must answer well after all of them.
"""

import contextlib
import importlib
import sys

import pytest

import jobs.ray_session
from jobs.overrides import run_job
from serve.config import ServeConfig
from serve.server import Server
from tests import bad_files
from tests.serving import HTTP, listening

SECRET = "hunter2hunter2"
INSPECT = "inspect {root}/"
CONVERT = "convert {root}/"
NOT_SERVED = "deploy serve.drafter=none "

COMMANDS = [
    # keys and values
    ("train nonsense", "'nonsense' is not key=value: write section.field=value"),
    ("train train.stepz=5", "unknown key 'train.stepz'; did you mean train.steps"),
    ("train steps=5", "unknown key 'steps'; did you mean train.steps?"),
    ("train completely=5", "--plan lists every key"),
    ("train train.steps=five", "train.steps=five: expected a whole number"),
    ("train train.learning_rate=nan", "train.learning_rate=nan: expected a finite number"),
    ("train train.precision=float8", "expected one of float32, bfloat16"),
    ("train drafter.head=maybe", "drafter.head=maybe: expected true or false"),
    ("train drafter.target_layer_ids=x", "drafter.target_layer_ids=x: expected a whole number"),
    ("train drafter.target_layer_ids=4,999", "target_layer_ids=[4, 999] must ascend and lie in 0..13"),
    ("train drafter.block_size=1", "block_size=1"),
    ("train train.batch_size=0", "train.batch_size must be positive, got 0"),
    ("train train.epochs=-1", "train.epochs must be positive, got -1"),
    ("train num_rows=0", "num_rows=0: expected at least 1, or none"),
    ("train name=../x", "name=../x: it names a folder below root"),
    ("train root=", "root= is empty: give the folder where runs go"),
    ("train root={root}/a-file", "a-file is a file: name the folder where runs go"),
    ("train target=", "target= is required"),
    ("train data=", "data= is required"),
    ("inspect --rows -1", "--rows -1 --sample 20000: expected rows of at least 0"),
    ("bench --concurrency 0", "--concurrency 0: expected whole numbers above 0"),
    ("drill nothing-such", "no drill is called nothing-such; there are"),
    ("make_prompts --num 0 --output {root}/o.jsonl", "--num 0, --heldout 0: need at least one prompt"),
    ("make_prompts --num 5 --output {root}/o.txt", "o.txt: name it .jsonl or .parquet"),
    ("make_prompts --num 5 --output {root}/a-file/o.jsonl", "cannot be written"),
    ("regenerate --output {root}/empty", "cannot be written: Is a directory; name another file"),
    # prompt files
    ("train data={root}/absent.jsonl", "absent.jsonl: no such prompt file; give a .jsonl"),
    (INSPECT + "empty.jsonl", "empty.jsonl: no rows; one JSON object per line"),
    (INSPECT + "broken.jsonl", "broken.jsonl:2: not valid JSON"),
    (INSPECT + "number.jsonl", "number.jsonl:1: 5 is not a JSON object; expected one with messages"),
    (INSPECT + "nested.jsonl", "nested.jsonl:1: not valid JSON (maximum recursion"),
    (INSPECT + "nothing.jsonl", "nothing.jsonl:1: keys ['id'], expected messages"),
    (INSPECT + "twice.jsonl", "twice.jsonl:2: id 'a' is also on line 1; give every row its own id"),
    (INSPECT + "role.jsonl", "role.jsonl:1: turn 1 has role 'robot'; known are system"),
    (INSPECT + "content.jsonl", "content.jsonl:1: turn 1 has content 5; only plain text can be used"),
    (INSPECT + "no-messages.jsonl", "no-messages.jsonl:1: the conversation is [], expected a list of turns"),
    (INSPECT + "ids-range.jsonl", "input_ids[1] is 1000000, outside the vocabulary of 2048"),
    (INSPECT + "ids-short.jsonl", "3 input_ids, 2 mask values; give one mask value for each token"),
    (INSPECT + "ids-mask.jsonl", "loss_mask[1] is 7, expected 0 or 1"),
    (INSPECT + "latin.jsonl", "latin.jsonl:1: not valid JSON ('utf-8' codec can't decode"),
    (INSPECT + "prompts.csv", "unknown kind of file '.csv'; give .jsonl, .json or .parquet"),
    (INSPECT + "no.parquet", "no.parquet is no Parquet file, or a damaged one"),
    (INSPECT + "empty", "empty is a folder; give one .jsonl"),
    ("inspect {root}/a {root}/b", "2 prompt files, {root}/a and {root}/b: give one"),
    (INSPECT + "pickled.parquet", "column text holds pickled objects, which can run code and are not read"),
    # targets
    ("train target={root}/absent", "model folder {root}/absent does not exist"),
    ("train target=no-such/model", "no-such/model is neither a local folder nor a model"),
    ("train target={root}/empty", "{root}/empty has no config.json; give the folder that a model was saved to"),
    ("train target={root}/target-kind", "architecture BertForCausalLM is not supported; use one of"),
    ("train target={root}/target-lacking", "config.json lacks hidden_size, intermediate_size, max_position_embeddings"),
    ("train target={root}/target-broken", "{root}/target-broken/config.json is damaged"),
    ("inspect target={root}/target-no-tokenizer", "target-no-tokenizer: its tokenizer cannot be read"),
    # features, registry
    ("train features={root}/empty", "{root}/empty has no manifest.json: write features there first"),
    ("train features={root}/features", "{root}/features/manifest.json is damaged"),
    ("train tracking_uri=/some/folder", "tracking_uri=/some/folder: MLflow's registry needs a database"),
    (f"train tracking_uri=http://me:{SECRET}@127.0.0.1:9", "http://me:***@127.0.0.1:9 does not answer"),
    ("promote --rollback --alias other", "leaves --alias other alone: give one of them"),
    ("promote --canary --rollback", "give it without --rollback, --abandon and --alias"),
    ("promote --alias v1", "alias 'v1' cannot be set: use letters"),
    ("promote --alias ../x", "alias '../x' cannot be set: use letters"),
    ("promote --run ../x", "name=../x: it names a folder below root"),
    ("promote --run absent", "run absent has no drafter at {root}/runs/absent/drafter: train it first"),
    ("promote --run=", "--run is empty: name one, or leave it out"),
    ("promote --version=", "--version is empty: name one, or leave it out"),
    ("promote --version 99", "has no version 99; it has no versions: train and register first"),
    ("promote --version ../1", "has no version ../1"),
    # drafters
    (CONVERT + "absent {root}/out --to speculators", "absent is no drafter: there is no config.json in it; train one"),
    (CONVERT + "cut {root}/out --to speculators", "cut/model.safetensors is damaged"),
    (CONVERT + "config-broken {root}/out --to speculators", "config-broken/config.json is damaged"),
    (CONVERT + "unknown-key {root}/out --to speculators", "unknown keys in config.json: surprise; remove those"),
    (CONVERT + "other-size {root}/out --to speculators", "layers.0.mlp.down_proj.weight is [64, 160], not [64, 7]"),
    (CONVERT + "pickled {root}/out --to speculators", "pickles can run code and are not read; convert them"),
    (
        CONVERT + "outside {root}/out --to speculators",
        "'../cut/model.safetensors', which is no safetensors file beside",
    ),
    (CONVERT + "cut {root}/empty --to speculators", "{root}/empty exists; name a folder that does not"),
    ("evaluate --drafter {root}/cut", "The drafter does not fit the target: hidden_size is 64 in the drafter, 192"),
    # serving
    ("deploy serve.drafter={root}/absent", "no such folder (expected models:/NAME@ALIAS, a folder, or none)"),
    ("deploy serve.drafter=models:/x", "drafter=models:/x: expected models:/NAME@ALIAS"),
    ("deploy serve.drafter=models:/..@champion", "drafter=models:/..@champion: expected models:/NAME@ALIAS"),
    ("deploy serve.drafter=models:/x@../y", "drafter=models:/x@../y: expected models:/NAME@ALIAS"),
    ("deploy root={root}/nowhere", "there is no MLflow database at {root}/nowhere/mlflow.db"),
    (NOT_SERVED + "serve.host=0.0.0.0", "serve.host=0.0.0.0 is reached from other machines, and there is no API key"),
    (NOT_SERVED + "serve.port=70000", "port=70000: expected 1 to 65535"),
    (NOT_SERVED + "serve.api_key_file={root}/short-key", "a key needs at least 16 characters"),
    (NOT_SERVED + "serve.api_key_file={root}/no-key", "no-key holds no key: write one a line"),
    (NOT_SERVED + "serve.api_key_file={root}/absent", "absent cannot be read"),
    (NOT_SERVED + "serve.max_length=99999", "serve.max_length=99999 exceeds the 2048 positions"),
    (NOT_SERVED + "serve.max_rows=0", "max_rows=0: expected at least 1, or auto"),
    (NOT_SERVED + "serve.min_replicas=0", "min_replicas=0: expected 1 to max_replicas=2"),
    (NOT_SERVED + "serve.engine=triton", "serve.engine=triton: expected one of torch, vllm"),
    (NOT_SERVED + f"serve.vllm_args={SECRET}", "vllm_args needs engine=vllm"),
    (NOT_SERVED + "serve.max_ongoing_requests=2", "is below target_ongoing_requests=16.0"),
    (NOT_SERVED + "serve.device=cuda", "device=cuda needs gpus_per_replica=1"),
    (NOT_SERVED + "serve.canary_share=2", "canary_share=2.0: expected 0 (no canary) to less than 1"),
    (NOT_SERVED + "serve.canary_share=1", "the champion needs requests"),
    (NOT_SERVED + "serve.max_body_bytes=0", "max_body_bytes=0: expected more than 0"),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory, reference_dir, embedded_target):
    import ray.data  # noqa: F401  # makes Arrow know the type of columns that are pickles

    root = tmp_path_factory.mktemp("bad")
    bad_files.make(root, reference_dir / "draft_shift1_p1", embedded_target)
    yield root
    assert not (root / "ran").exists(), "a pickle was opened"


@contextlib.contextmanager
def no_ray(**_options):
    raise AssertionError("the command goes on and starts Ray")
    yield


@pytest.mark.parametrize(("command", "message"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_commands_say_what_is_wrong(root, monkeypatch, capsys, command, message):
    monkeypatch.setattr(jobs.ray_session, "ray_session", no_ray)
    job, *argv = command.format(root=root).split(" ")
    if job not in ("convert", "drill") and not any(word.startswith("root=") for word in argv):
        argv.append(f"root={root}/runs")
    monkeypatch.setattr(sys, "argv", [job, *argv])
    code = run_job(importlib.import_module(f"jobs.{job}").main)
    told = capsys.readouterr()
    assert code in (1, 2), "commands that refuse end with 2, jobs.inspect of a file with 1"
    assert message.format(root=root) in told.err
    assert SECRET not in told.out + told.err
    assert "Traceback" not in told.err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("target-weightless", "has no model.safetensors; the weights must be safetensors, complete"),
        ("target-outside", "'/etc/passwd', which is no safetensors file beside the index"),
    ],
)
def test_targets_whose_weights_are_not_in_their_folder(root, name, message):
    from domino_core.target import load_target

    with pytest.raises(ValueError, match=name) as caught:
        load_target(root / name)
    assert message in str(caught.value)


COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGE = {"role": "user", "content": "x"}
LENGTH = 256
REQUESTS = [
    (COMPLETION, {"prompt": "x", "temperature": -1}, "temperature", "greater than or equal to 0"),
    (COMPLETION, {"prompt": "x", "temperature": 3}, "temperature", "less than or equal to 2"),
    (COMPLETION, {"prompt": "x", "top_p": 0}, "top_p", "greater than 0"),
    (COMPLETION, {"prompt": "x", "top_k": -2}, "top_k", "greater than or equal to -1"),
    (COMPLETION, {"prompt": "x", "min_p": 1.5}, "min_p", "less than or equal to 1"),
    (COMPLETION, {"prompt": "x", "repetition_penalty": 0}, "repetition_penalty", "greater than 0"),
    (COMPLETION, {"prompt": "x", "seed": 2**63}, "seed", "less than or equal to"),
    (COMPLETION, {"prompt": "x", "n": 0}, "n", "greater than or equal to 1"),
    (COMPLETION, {"prompt": "x", "n": 10**9}, "n", "exceed 64 answers per request (serve.max_choices)"),
    (COMPLETION, {"prompt": ["x"] * 65}, "n", "65 prompts x n=1 exceed 64 answers"),
    (COMPLETION, {"prompt": "x", "max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    (COMPLETION, {"prompt": "x", "max_tokens": 10**9}, "prompt", "context length is 256 tokens"),
    (COMPLETION, {"prompt": "x " * 5000}, "prompt", "prompt has 10000 characters; at most 8192 are allowed"),
    (COMPLETION, {"prompt": [1.5] * 100_000}, "prompt", "prompt"),
    (COMPLETION, {"prompt": {"text": "x"}}, "prompt", "prompt"),
    (COMPLETION, {"prompt": "x", "logprobs": 21}, "logprobs", "less than or equal to 20"),
    (COMPLETION, {"prompt": "x", "stop": ["a"] * 17}, "stop", "stop has 17 strings; at most 16 are allowed"),
    (COMPLETION, {"prompt": "x", "stop": "a" * 513}, "stop", "longer than 512 characters"),
    (COMPLETION, {"prompt": "x", "stop": ""}, "stop", "an empty string"),
    (COMPLETION, {"prompt": "x", "stop_token_ids": [1] * 257}, "stop_token_ids", "257 ids; at most 256 are allowed"),
    (COMPLETION, {"prompt": "x", "logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias", "at most 300"),
    (COMPLETION, {"prompt": "x", "logit_bias": {"x": 1}}, "logit_bias", "'x' is no token id"),
    (COMPLETION, {"prompt": "x", "logit_bias": {"2048": 1}}, "logit_bias", "2048 is outside 0..2047"),
    (COMPLETION, {"prompt": "x", "x" * 9999: 1}, "x" * 80, "unknown parameter 'xxx"),
    (COMPLETION, {"prompt": "x", "suffix": "y" * 9999}, "suffix", "is not supported and would change the answer"),
    (COMPLETION, {"prompt": "x", "user": "u" * 257}, "user", "at most 256 characters"),
    (COMPLETION, {"prompt": "x", "model": "m" * 257}, "model", "at most 256 characters"),
    (CHAT, {"messages": [MESSAGE] * 2049}, "messages", "messages has 2049 messages; at most 2048 are allowed"),
    (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages", "'system', 'user' or 'assistant'"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 8193}]}, "messages", "at most 8192 are allowed"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 257}]}, "messages", "257 parts"),
    (CHAT, {"messages": [MESSAGE | {f"k{i}": 1 for i in range(64)}]}, "messages", "66 fields in one message"),
    (CHAT, {"messages": [MESSAGE], "top_logprobs": 2}, "top_logprobs", "only allowed with logprobs=true"),
    (CHAT, {"messages": [MESSAGE], "max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "differ; send one"),
]


@pytest.fixture(scope="module")
def url(embedded_target):
    with listening(Server(ServeConfig(target=str(embedded_target), drafter="none", max_length=LENGTH))) as url:
        yield url
        good = HTTP.post(url + COMPLETION, json={"model": "tiny-qwen3", "prompt": "x", "max_tokens": 2})
        assert good.status_code == 200, "it answers after all that"


@pytest.mark.parametrize(("path", "body", "param", "message"), REQUESTS, ids=[f"{r[2][:20]}-{r[3]}" for r in REQUESTS])
def test_requests_get_a_400_that_names_the_parameter_and_repeats_little(url, path, body, param, message):
    response = HTTP.post(url + path, json={"model": "tiny-qwen3"} | body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert message in error["message"]
    assert len(response.content) < 1000


def test_the_table_is_long_and_without_repetition():
    told = [message for _, message in COMMANDS] + [message for *_, message in REQUESTS]
    assert len(told) >= 100
    assert len({command for command, _ in COMMANDS}) == len(COMMANDS)


def test_a_body_beyond_the_limit(url):
    response = HTTP.post(url + COMPLETION, content=b"x" * ((2 << 20) + 1))
    assert response.status_code == 413
    assert "larger than 2097152 bytes (serve.max_body_bytes): send less" in response.json()["error"]["message"]
