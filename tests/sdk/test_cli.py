"""The command line: a sentence and an exit code for every mistake, and help that reads well."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest
import yaml

from areal_agent import cli, script, settings
from areal_agent.config import RunConfig
from areal_agent.errors import ConfigError

TRAIN = importlib.import_module("areal_agent.train")  # `areal_agent.train` itself is the function

SCRIPT = """
calls = []
async def agent(task): return task
def reward(task, result): return 1.0
def dataset():
    calls.append("dataset")
    return [{"q": 1}]
def model():
    calls.append("model")
    return "/no/such/folder"
config = {"trainer": {"steps": 7}}
"""


@pytest.fixture
def job_file(tmp_path):
    path = tmp_path / "job.py"
    path.write_text(SCRIPT)
    return path


def run(capsys, *argv):
    with pytest.raises(SystemExit) as e:
        cli.main(list(map(str, argv)))
    out, err = capsys.readouterr()
    return e.value.code, out, err


def test_version_and_help(capsys):
    code, out, _ = run(capsys, "version")
    assert code == 0
    assert out.startswith("areal-agent 0.")
    for command in (
        [],
        ["train"],
        ["eval"],
        ["gateway"],
        ["config"],
        ["version"],
        ["fleet"],
        ["fleet", "join"],
    ):
        code, out, _ = run(capsys, *command, "--help")
        assert code == 0
        assert "Usage: areal-agent" in out
    assert {"train", "gateway", "eval", "config", "version", "fleet"} <= set(run(capsys, "--help")[1].split())


def test_config_lists_every_setting_once_with_default_and_help(capsys):
    _, out, _ = run(capsys, "config")
    names = [line.split(" = ")[0] for line in out.splitlines()]
    assert len(names) == len(set(names)) == len(settings.describe())
    assert "trainer.steps = 40" in out
    assert all(text for _, _, text in settings.describe()), "a setting has one sentence of help"
    _, out, _ = run(capsys, "config", "rollout")
    assert all(line.startswith("rollout.") for line in out.splitlines())


def test_defaults_as_printed_are_the_defaults():
    printed = settings.parse_assignments(f"{n}={d}" for n, d, _ in settings.describe())
    assert RunConfig.parse(printed) == RunConfig()


@pytest.mark.parametrize(
    ("argv", "code", "sentence"),
    [
        (["train", "nowhere.py"], 2, "nowhere.py does not exist"),
        (["train", "{job}", "--set", "trainer.stepz=1"], 2, "trainer.stepz: no such setting"),
        (["train", "{job}", "--set", "trainer.steps"], 2, "must look like trainer.steps=10"),
        (["train", "{job}"], 2, "the model folder /no/such/folder does not exist"),
        (["train", "{job}", "--steps", "0"], 2, "trainer.steps = 0: input should be greater"),
        (["train", "{job}", "--engines", "two"], 2, "fleet.engines"),
        (["train"], 2, "or --online for a service"),
        (["train", "{job}", "--nonsense"], 2, "No such option"),
        (["gateway"], 2, "no model"),
        (["config", "nothing"], 2, "no setting starts with 'nothing'"),
    ],
)
def test_a_mistake_is_a_sentence_and_code_2(capsys, job_file, argv, code, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    got, _, err = run(capsys, *(a.format(job=job_file) for a in argv))
    assert (got, sentence in err) == (code, True), err
    assert "Traceback" not in err


def test_a_failed_run_is_code_1_and_ctrl_c_130(capsys, job_file, monkeypatch):
    for error, code in ((areal_error("engine died"), 1), (KeyboardInterrupt(), 130)):

        def train(*args, error=error, **kwargs):
            raise error

        monkeypatch.setattr(TRAIN, "train", train)
        got, _, err = run(capsys, "train", job_file)
        assert got == code
        assert "Traceback" not in err


def areal_error(text):
    from areal_agent.errors import EngineError

    return EngineError(text)


def test_options_lie_over_the_script_over_areal_yaml_over_defaults(capsys, job_file, monkeypatch):
    (job_file.parent / "areal.yaml").write_text("trainer: {steps: 1, ranks: 2}\nrollout: {group_size: 3}\n")
    seen = {}
    monkeypatch.setattr(TRAIN, "train", lambda agent, reward, **kw: seen.update(kw))
    run(capsys, "train", job_file, "--set", "rollout.group_size=5", "--model", "m", "--set", "rollout.seed=9")
    config = seen["config"]
    assert config.trainer.steps == 7, "the script's"
    assert config.trainer.ranks == 2, "areal.yaml's"
    assert config.rollout.group_size == 5, "the option's"
    assert config.rollout.groups_per_step == 16, "the default"
    assert config.name == "job"
    assert seen["dataset"] == [{"q": 1}]
    run(capsys, "train", job_file, "--steps", 2, "--engines", 1, "--run-dir", "r", "--eval-dataset", "0.25")
    assert (seen["config"].trainer.steps, seen["config"].fleet.engines) == (2, 1)
    assert (seen["config"].run_dir, seen["eval_dataset"]) == ("r", 0.25)


def test_what_an_option_gives_is_not_made_by_the_script(capsys, job_file, monkeypatch, tmp_path):
    """A script's model() may train a warm start for minutes."""
    jobs = []
    load = script.load
    monkeypatch.setattr(script, "load", lambda p: jobs.append(load(p)) or jobs[-1])
    monkeypatch.setattr(TRAIN, "train", lambda *a, **kw: None)
    run(capsys, "train", job_file, "--model", "m", "--dataset", "d.jsonl")
    assert jobs[0].agent.__globals__["calls"] == []


def test_a_yaml_file_names_agent_and_reward(tmp_path, job_file):
    path = tmp_path / "run.yaml"
    values = {"agent": "job.py:agent", "reward": "job.py:reward", "dataset": "tasks.jsonl", "model": "m"}
    path.write_text(yaml.safe_dump(values | {"trainer": {"steps": 3}}))
    job = script.load(path)
    assert job.reward(None, None) == 1.0
    assert job.part("dataset") == tmp_path / "tasks.jsonl"
    assert job.config == {"trainer": {"steps": 3}, "model": str(tmp_path / "m")}
    path.write_text(yaml.safe_dump({"agent": {"command": "cat"}, "reward": "job.py:reward"}))
    assert script.load(path).agent.argv == ["cat"]


def test_a_job_may_be_named_areal_yaml(capsys, tmp_path, job_file, monkeypatch):
    """It is read once, as the job; beside a script its settings still count."""
    job = {"agent": "job.py:agent", "reward": "job.py:reward", "dataset": "tasks.jsonl", "model": "m"}
    path = tmp_path / "areal.yaml"
    path.write_text(yaml.safe_dump(job | {"trainer": {"ranks": 2}}))
    seen = []
    monkeypatch.setattr(TRAIN, "train", lambda agent, reward, **kw: seen.append(kw["config"]))
    for given in (path, job_file):
        code, _, err = run(capsys, "train", given)
        assert code == 0, err
    assert [c.trainer.ranks for c in seen] == [2, 2]
    assert seen[0].model == str(tmp_path / "m")


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.py", "x = 1", "defines no `agent`"),
        ("a.py", "import no_such_module", r"a.py, line 1: ModuleNotFoundError"),
        ("a.py", "x = 1\ny = (", "line 2: SyntaxError"),
        ("a.yaml", "agent: job.py:nothing\n", "defines no nothing"),
        ("a.yaml", "agent: job.py\n", "must look like path.py:name"),
        ("a.yaml", "- 1\n", "must be a mapping"),
        ("a.txt", "", "neither a .py script nor a .yaml file"),
    ],
)
def test_a_bad_script_is_a_sentence(tmp_path, job_file, name, text, sentence):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        script.load(tmp_path / name)


def test_a_script_without_reward_is_told_so_when_it_is_needed(tmp_path):
    (tmp_path / "a.py").write_text("def agent(task): return 1")
    with pytest.raises(ConfigError, match="defines no `reward`"):
        _ = script.load(tmp_path / "a.py").reward


def test_a_mistake_in_a_real_process_prints_no_traceback(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "areal_agent.cli", "train", "nowhere.py"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == (
        "areal-agent: nowhere.py does not exist; give a script that defines `agent` and `reward`, or a YAML file\n"
    )


def test_the_gateway_of_a_run_folder_reads_its_config_and_nothing_else(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(RunConfig().model_dump(mode="json")))
    code, _, err = run(capsys, "gateway", "--run-dir", tmp_path, "--port", "1")
    assert code == 2
    assert "has a config already" in err
