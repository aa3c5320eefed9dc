"""The command line as a user meets it: exit codes, one line for each error, JSON on stdout and nothing else there."""

import functools
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from palimpsa_surgery import cli
from palimpsa_surgery.base.errors import CheckpointError
from palimpsa_surgery.base.text import embedded_checkpoint_path
from palimpsa_surgery.recipes.evaluation.suites.suite import SUITES
from palimpsa_surgery.surgery.conversion.initialization import STARTS
from palimpsa_surgery.surgery.conversion.verify import MODES
from palimpsa_surgery.surgery.planning.strategies import RULES
from typer.testing import CliRunner

SOURCE = str(embedded_checkpoint_path())
FEW = ["--tokens", "512", "--seq-len", "128"]
VERBS = [command.callback.__name__ for command in cli.app.registered_commands]


def invoke(*arguments: object, code: int = 0):
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    assert result.exit_code == code, f"{result.exit_code}: {result.output} {result.exception!r}"
    return result


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    """profile.json, plan.yaml and the folder `model`, each written by its verb."""
    folder = tmp_path_factory.mktemp("cli")
    profile, plan = folder / "profile.json", folder / "plan.yaml"
    invoke("measure", SOURCE, "-o", profile, *FEW, "-q")
    invoke("plan", SOURCE, "--profile", profile, "--layers", "2", "--beta-groups", "1", "-o", plan, "-q")
    invoke("convert", SOURCE, folder / "model", "--plan", plan, "-q")
    return folder


def test_help_is_fast_because_it_imports_nothing_heavy():
    code = (
        "import sys; sys.argv = ['palimpsa', '--help']\n"
        "from palimpsa_surgery import cli\n"
        "try: cli.main()\n"
        "except SystemExit as error: assert error.code == 0\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pydantic', 'yaml', 'matplotlib', 'rich', 'huggingface_hub'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    started = time.perf_counter()
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    elapsed = time.perf_counter() - started
    assert result.returncode == 0, result.stderr
    assert elapsed < 10, "0.2 s on an idle machine; this bound only catches an import that slipped in"
    assert all(verb in result.stdout for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_has_help_for_every_option(verb):
    text = invoke(verb, "--help").output
    assert "-v, --verbose" in text
    for parameter in typer.main.get_command(cli.app).commands[verb].params:
        assert getattr(parameter, "help", None), f"{verb}: {parameter.name} has no help"


def test_no_verb_shows_the_help_and_version_is_printed():
    assert "measure" in invoke(code=2).output
    assert re.fullmatch(r"palimpsa-surgery \d+\.\d+\.\d+\n", invoke("--version").stdout)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["plan", SOURCE, "--layers", "3"], 2, "a count needs a profile"),
        (["plan", SOURCE, "--layers", "3,9"], 2, "layer 9: the model has 8 layers, 0 to 7"),
        (["plan", SOURCE, "--layers", "3,3"], 2, "layer 3 is listed twice"),
        (["plan", SOURCE, "--layers", "three"], 2, "expected a count such as 8"),
        (["plan", SOURCE, "--layers", ""], 2, "expected a count such as 8"),
        (["convert", SOURCE, "out", "--layers", ""], 2, "expected a count such as 8"),
        (["measure", SOURCE, "--device", "toaster"], 2, "--device toaster: there is no such device"),
        (["measure", SOURCE, "--device", "cuda:99"], 2, "--device cuda:99: this machine has"),
        (["plan", SOURCE, "--layers", "3,", "--init", "magic"], 2, "--init: is 'magic'"),
        (["plan", SOURCE, "--layers", "3,", "--beta-groups", "3"], 2, "--beta-groups: 3 does not divide head_dim"),
        (["plan", SOURCE, "--layers", "3,", "--seed", "-1"], 2, "--seed: is -1"),
        (["convert", SOURCE, "out", "--layers", "3,", "--beta-groups", "3"], 2, "--beta-groups: 3 does not divide"),
        (["convert", SOURCE, "out", "--layers", "3,", "--beta-rank", "0"], 2, "--beta-rank: is 0"),
        (["convert", SOURCE, "out", "--layers", "3,", "--strength", "2"], 2, "--strength: belongs to init calibrated"),
        (["convert", SOURCE, "out", "--layers", "2", "--beta-groups", "3"], 2, "--beta-groups: 3 does not divide"),
        (["inspect", "/nowhere/at-all"], 1, "/nowhere/at-all: no such folder"),
        (["measure", SOURCE, "--data", "absent.jsonl"], 1, "absent.jsonl: does not exist"),
        (["measure", SOURCE, "--tokens", "10", "--seq-len", "20"], 2, "10 tokens cannot fill one sequence of 20"),
        (["convert", SOURCE, "out", "--layers", "1,", "--dtype", "int8"], 2, "--dtype int8"),
        (["finetune", SOURCE, "--recipe", "tiny_cp"], 2, "did you mean tiny_cpu?"),
        (["generate", SOURCE, ""], 2, "the prompt has no token"),
        (["generate", SOURCE, "a", "--temperature", "-1"], 2, "temperature is -1"),
        (["plan"], 2, "Missing argument"),
        (["inspect", SOURCE, "--jsn"], 2, "No such option: --jsn"),
    ],
)
def test_errors_are_one_line_with_an_exit_code(tmp_path, monkeypatch, arguments, code, message):
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments, "-q", code=code)
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    if not result.stderr.startswith("Usage"):
        assert len(result.stderr.splitlines()) == 1
        assert result.stderr.startswith("error: ")
    assert not result.stdout
    assert not list(tmp_path.iterdir()), "a failed verb leaves nothing"


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["inspect", ""], "checkpoint"),
        (["measure", ""], "checkpoint"),
        (["measure", SOURCE, "-o", ""], "output"),
        (["measure", SOURCE, "--data", ""], "text"),
        (["plan", SOURCE, "--layers", "1,", "-o", ""], "output"),
        (["plan", SOURCE, "--profile", ""], "profile"),
        (["convert", SOURCE, "", "--layers", "1,"], "output"),
        (["convert", SOURCE, "", "--layers", "1,", "--force"], "output"),
        (["convert", SOURCE, "out", "--plan", ""], "plan"),
        (["finetune", "", "--recipe", "tiny_cpu"], "checkpoint"),
        (["finetune", SOURCE, "--recipe", "tiny_cpu", "-o", ""], "run folder"),
        (["finetune", SOURCE, "--recipe", "tiny_cpu", "data.train=''"], "text"),
        (["evaluate", SOURCE, "--against", ""], "checkpoint"),
        (["evaluate", SOURCE, "-o", ""], "output"),
        (["generate", "", "a"], "checkpoint"),
        (["merge", "", "out"], "run folder"),
        (["merge", SOURCE, ""], "output"),
        (["export", "", "out"], "checkpoint"),
        (["export", SOURCE, ""], "output"),
        (["push", "", "me/model", "--to-folder", "out"], "model folder"),
        (["push", SOURCE, "me/model", "--to-folder", ""], "output"),
        (["demo", "-o", ""], "output"),
    ],
)
def test_an_empty_name_is_never_the_current_folder(tmp_path, monkeypatch, arguments, what):
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments, "-q", code=2)
    assert result.stderr == f"error: the name of the {what} is empty; give one (. is the current folder)\n"
    assert not [path for path in tmp_path.iterdir() if path.name != "run"]


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (CheckpointError("first line\nsecond line"), 1, "error: first line second line"),
        (ZeroDivisionError("odd"), 1, "error: ZeroDivisionError: odd (unexpected; -v shows where)"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_what_a_verb_raises_never_shows_a_traceback_unless_asked(monkeypatch, error, code, message):
    def fail(*arguments, **options):
        secret_token = "hf_secret"  # noqa: F841  a local variable that must never be printed
        raise error

    monkeypatch.setattr("palimpsa_surgery.surgery.checkpoint.checkpoint.open_checkpoint", fail)
    assert invoke("inspect", SOURCE, code=code).stderr == message + "\n"
    verbose = invoke("inspect", SOURCE, "-v", code=code).stderr
    assert ("Traceback" in verbose) == (code != 130)
    assert "hf_secret" not in verbose


@pytest.mark.parametrize(
    ("name", "ignored", "code", "said", "left"),
    [
        ("SIGINT", False, 130, "interrupted", []),
        ("SIGTERM", False, 143, "", []),
        ("SIGHUP", False, 129, "", []),
        ("SIGHUP", True, 0, "", ["out"]),  # as under nohup
    ],
)
def test_a_signal_ends_the_command_and_leaves_nothing_half_written(tmp_path, name, ignored, code, said, left):
    default = "signal.default_int_handler" if name == "SIGINT" else "signal.SIG_DFL"
    usual = "signal.SIG_IGN" if ignored else default
    program = (
        "import os, signal, sys, types\n"
        "from palimpsa_surgery import cli\n"
        "from palimpsa_surgery.base.files import output_folder\n"
        "def slow(*arguments, **options):\n"
        "    with output_folder('out') as folder:\n"
        "        (folder / 'half').write_text('half')\n"
        f"        os.kill(os.getpid(), signal.{name})\n"
        "    sys.exit(0)\n"
        "module = types.SimpleNamespace(export=slow)\n"
        "sys.modules['palimpsa_surgery.surgery.conversion.export'] = module\n"
        f"signal.signal(signal.{name}, {usual})  # whatever this test was started under\n"
        "sys.argv = ['palimpsa', 'export', 'model', 'out']\n"
        "cli.main()\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert (result.returncode, result.stderr.strip()) == (code, said)
    assert [path.name for path in tmp_path.iterdir()] == left


@pytest.mark.slow
def test_demo_shows_its_commands(tmp_path, monkeypatch):
    from palimpsa_surgery.recipes import demo

    small = functools.partial(demo.DemoOptions, seq_len=64, batch_size=1, loss_tokens=128, new_tokens=4)
    monkeypatch.setattr(demo, "DemoOptions", small)
    monkeypatch.chdir(tmp_path)
    text = invoke("demo", "--tokens", "256", "--steps", "1", "-q").stdout
    for verb in ("measure", "plan", "convert", "finetune", "evaluate", "generate"):
        assert f"  palimpsa {verb} " in text
    assert "source" in text
    assert (tmp_path / "palimpsa-demo" / "report.md").is_file()
    assert "--force" in invoke("demo", "-q", code=2).stderr


def test_inspect(work):
    plain = invoke("inspect", SOURCE).stdout
    assert "mamba_ssm" in plain
    assert "1.47 M" in plain
    found = json.loads(invoke("inspect", work / "model", "--json").stdout)
    assert len(found["swapped_layers"]) == 2
    assert found["layout"] == "palimpsa_mamba2"


def test_measure_writes_a_profile_and_its_picture(work):
    assert json.loads((work / "profile.json").read_text())["data"] == "embedded:sqlite-docs"
    assert (work / "profile.png").read_bytes().startswith(b"\x89PNG")


def test_measure_without_text(tmp_path):
    out = tmp_path / "static.json"
    found = json.loads(invoke("measure", SOURCE, "--static", "--json", "-o", out).stdout)
    assert found["method"] == "static"
    assert found == json.loads(out.read_text())


@pytest.mark.parametrize("verb", ["measure", "plan", "convert"])
def test_outputs_are_not_overwritten_without_force(work, verb):
    outputs = {
        "measure": (["measure", SOURCE, *FEW, "-o", work / "profile.json"], work / "profile.json"),
        "plan": (["plan", SOURCE, "--layers", "1,", "-o", work / "plan.yaml"], work / "plan.yaml"),
        "convert": (["convert", SOURCE, work / "model", "--layers", "1,"], work / "model" / "plan.yaml"),
    }
    arguments, witness = outputs[verb]
    before = witness.read_bytes()
    assert "--force" in invoke(*arguments, "-q", code=2).stderr
    assert witness.read_bytes() == before


@pytest.mark.parametrize(
    ("verb", "made_by"),
    [
        ("measure", "surgery.measure.forgetting.static_forgetting"),
        ("plan", "surgery.planning.plan.make_plan"),
        ("evaluate", "recipes.evaluation.evaluate._compared"),
    ],
)
@pytest.mark.parametrize("force", [False, True])
def test_what_another_process_wrote_meanwhile_is_replaced_with_force_alone(tmp_path, monkeypatch, verb, made_by, force):
    out = tmp_path / ("out.yaml" if verb == "plan" else "out.json")
    arguments = {
        "measure": ["--static"],
        "plan": ["--layers", "1,"],
        "evaluate": ["--suite", "loss", "--lengths", "32", "--tokens", "64", "--device", "cpu"],
    }
    module, _, name = f"palimpsa_surgery.{made_by}".rpartition(".")
    make = getattr(sys.modules.get(module) or __import__(module, fromlist=[name]), name)

    def slowly(*given, **options):
        out.write_text("theirs")
        return make(*given, **options)

    monkeypatch.setattr(f"{module}.{name}", slowly)
    code = 0 if force else 1 if verb == "evaluate" else 2
    result = invoke(verb, SOURCE, *arguments[verb], "-o", out, *["--force"] * force, code=code)
    assert (out.read_text() == "theirs") != force
    if not force:
        assert "is a file; choose another output, or give --force" in result.stderr
        assert "wrote" not in result.stdout
        assert result.stdout or verb == "plan", "what was measured is printed"


def test_plan_says_why(work, tmp_path):
    result = invoke("plan", SOURCE, "--profile", work / "profile.json", "--layers", "1", "-o", tmp_path / "plan.yaml")
    assert "by window" in result.stdout
    made = invoke("plan", SOURCE, "--layers", "5,", "--init", "paper", "-o", tmp_path / "b.yaml", "--json").stdout
    assert json.loads(made)["layers"] == [5]


def test_a_misspelled_key_of_a_plan_names_the_file_and_the_right_key(work, tmp_path):
    bad = tmp_path / "bad.yaml"
    bad.write_text((work / "plan.yaml").read_text().replace("beta_rank:", "beta_rnk:"))
    result = invoke("convert", SOURCE, tmp_path / "out", "--plan", bad, "-q", code=1)
    assert "bad.yaml:beta_rnk: there is no such key; did you mean beta_rank?" in result.stderr
    assert not (tmp_path / "out").exists()


def test_convert_reports_its_proof(work, tmp_path):
    report = json.loads(invoke("convert", SOURCE, tmp_path / "out", "--layers", "4,", "--json", "-q").stdout)
    assert report["layers"] == [4]
    assert report["verification"]["off_error"] < 1e-5
    text = invoke("convert", SOURCE, tmp_path / "again", "--layers", "4,", "--verify", "layers", "-q").stdout
    assert "metaplasticity off" in text


def test_a_failed_verification_has_its_own_exit_code(tmp_path, monkeypatch):
    from palimpsa_surgery.surgery.conversion import verify

    monkeypatch.setattr(verify, "OFF_LIMIT", 0.0)
    invoke("convert", SOURCE, tmp_path / "out", "--layers", "4,", "-q", code=3)
    assert not list(tmp_path.iterdir())


def test_generate_gives_the_same_text_for_source_and_identity_start(work):
    def text(model):
        return json.loads(invoke("generate", model, "CREATE TABLE", "--max-new-tokens", "8", "--json").stdout)["text"]

    assert text(SOURCE) == text(work / "model") != ""
    assert invoke("generate", SOURCE, "CREATE", "--max-new-tokens", "1").stdout.startswith("CREATE")


def test_push_writes_the_folder_it_would_upload(work, tmp_path):
    out = tmp_path / "upload"
    text = invoke("push", work / "model", "me/my-model", "--to-folder", out, "-q").stdout
    assert str(out) in text
    assert {"README.md", "config.json", "model.safetensors"} <= {path.name for path in out.iterdir()}
    assert "me/my-model" in (out / "README.md").read_text()
    assert "--force" in invoke("push", work / "model", "me/my-model", "--to-folder", out, "-q", code=2).stderr


def test_export_leaves_importance_out_only_when_asked(work, tmp_path):
    assert "--off" in invoke("export", work / "model", tmp_path / "out", "-q", code=2).stderr
    invoke("export", work / "model", tmp_path / "out", "--off", "-q")
    assert json.loads(invoke("inspect", tmp_path / "out", "--json").stdout)["layout"] == "mamba_ssm"


def test_merge_needs_an_adapter(work, tmp_path):
    result = invoke("merge", work / "model", tmp_path / "out", "-q", code=2)
    assert "adapter" in result.stderr
    assert not (tmp_path / "out").exists()


def test_finetune_from_a_recipe_with_changes(work, tmp_path):
    changes = ["steps=2", "data.seq_len=64", "batch_size=1", "eval_windows=2", "save_every=0"]
    run = tmp_path / "run"
    invoke("finetune", work / "model", *changes, "--recipe", "tiny_cpu", "-o", run, "-q")
    assert (run / "final" / "model.safetensors").is_file()
    assert "--resume" in invoke("finetune", work / "model", *changes, "--recipe", "tiny_cpu", "-o", run, code=2).stderr
    again = invoke("finetune", work / "model", *changes, "--recipe", "tiny_cpu", "-o", run, "--force", "--json", "-q")
    assert json.loads(again.stdout)["steps"] == 2


def test_all_mistakes_of_a_recipe_come_at_once(work):
    result = invoke("finetune", work / "model", "stps=2", "lr=-1", "--recipe", "tiny_cpu", "-q", code=2)
    assert "did you mean steps?" in result.stderr
    assert "lr: is -1" in result.stderr


def test_evaluate_compares_two_models_and_writes_a_report(work, tmp_path):
    out = tmp_path / "eval.json"
    few = ["--suite", "loss", "--tokens", "256", "--lengths", "64,128", "--device", "cpu"]
    text = invoke("evaluate", work / "model", "--against", SOURCE, *few, "-o", out, "-q").stdout
    assert "difference" in text
    report = json.loads(out.read_text())
    assert report["against"]["name"] == "mamba2-docs-1m"
    again = invoke("evaluate", work / "model", "--against", SOURCE, *few, "-o", out, "--json", "--force", "-q")
    assert json.loads(again.stdout)["suites"] == report["suites"]
    assert "loss" in invoke("evaluate", SOURCE, "--suite", "lsos", "-o", tmp_path / "b.json", "-q", code=2).stderr
    assert "--lengths x" in invoke("evaluate", SOURCE, "--lengths", "x", "-o", tmp_path / "c", "-q", code=2).stderr


def test_doctor_says_what_runs_and_checks_it():
    found = json.loads(invoke("doctor", "--device", "cpu", "--json").stdout)
    assert found["ok"]
    assert [part["chosen"] for part in found["backends"]] == ["numba", "torch", "torch"]
    assert found["versions"]["torch"]
    assert len(found["checks"]) >= 7
    assert "metaplastic scan, torch, float32" in invoke("doctor", "--device", "cpu").stdout


def test_doctor_fails_on_a_kernel_that_computes_wrong_numbers(monkeypatch):
    from palimpsa_surgery.kernels.metaplastic import torch_chunk

    right = torch_chunk.scan

    def wrong(*arguments, **options):
        result = right(*arguments, **options)
        return result._replace(output=result.output * 1.001)

    monkeypatch.setattr(torch_chunk, "scan", wrong)
    result = invoke("doctor", "--device", "cpu", code=3)
    assert "WRONG" in result.stdout


@pytest.mark.parametrize("verb", ["generate", "measure", "doctor"])
def test_required_kernels_are_not_replaced_in_silence(tmp_path, monkeypatch, verb):
    from palimpsa_surgery.kernels import backends

    monkeypatch.setattr(backends, "_required", False)
    monkeypatch.chdir(tmp_path)
    arguments = {"generate": [SOURCE, "a"], "measure": [SOURCE, *FEW], "doctor": []}[verb]
    result = invoke(verb, *arguments, "--device", "cpu", "--require-kernels", "-q", code=3 if verb == "doctor" else 1)
    assert "kernel" in result.stderr


def test_stderr_stays_empty_when_quiet_and_stdout_is_json_alone(tmp_path):
    command = [sys.executable, "-m", "palimpsa_surgery.cli", "inspect", SOURCE, "--json", "-q"]
    code = "import sys; from palimpsa_surgery.cli import main; sys.argv = ['palimpsa', *sys.argv[1:]]; main()"
    command = [sys.executable, "-c", code, *command[3:]]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120, env=dict(os.environ))
    assert result.stderr == ""
    assert json.loads(result.stdout)["source"] == "mamba2-docs-1m"


def _row(option) -> str:
    """An option as `docs/cli.md` lists it."""
    default = "required" if option.required else option.default
    shown = "" if default in (None, False) else default if option.required else f"`{default}`"
    return f"| `{', '.join(sorted(option.opts, key=len))}` | {shown} | {option.help} |"


@pytest.mark.parametrize("verb", VERBS)
def test_the_page_has_every_option_as_the_help_has_it(verb):
    page = (Path(__file__).resolve().parent.parent / "docs" / "cli.md").read_text(encoding="utf-8")
    section = re.search(rf"^## palimpsa {verb}\b.*?(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    assert section, f"docs/cli.md does not have {verb}"
    options = [p for p in typer.main.get_command(cli.app).commands[verb].params if p.param_type_name == "option"]
    rows = [_row(option) for option in options if option.name not in ("verbose", "quiet")]
    assert re.findall(r"^\| `-.*", section.group(), re.MULTILINE) == rows


@pytest.mark.parametrize(
    ("verb", "option", "names"),
    [("plan", "rule", RULES), ("plan", "init", STARTS), ("convert", "verify", MODES), ("evaluate", "suite", SUITES)],
)
def test_the_help_of_an_option_has_every_name_that_it_takes(verb, option, names):
    parameters = typer.main.get_command(cli.app).commands[verb].params
    text = next(parameter.help for parameter in parameters if parameter.name == option)
    assert not [name for name in names if not re.search(rf"\b{name}\b", text)]


@pytest.mark.parametrize(("before", "after"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")])
def test_threads_wait_without_spinning_unless_told(before, after):
    show = "cli.app = lambda: print(os.environ['OMP_WAIT_POLICY'])"
    program = f"import os; from palimpsa_surgery import cli; {show}; cli.main()"
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"} | before
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environment, check=True
    )
    assert result.stdout.strip() == after
