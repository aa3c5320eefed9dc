"""One way to open a tokenizer: what is refused, what is written beside a model, when two are the same."""

import json
import shutil
import subprocess
import sys

import hub_server
import pico
import pytest
from huggingface_hub import constants
from palimpsa_surgery.base.errors import CheckpointError
from palimpsa_surgery.base.files import load_json
from palimpsa_surgery.base.text import embedded_checkpoint_path
from palimpsa_surgery.recipes.evaluation.evaluate import evaluate
from palimpsa_surgery.recipes.evaluation.generation import generate
from palimpsa_surgery.sharing.hub import push_to_folder
from palimpsa_surgery.surgery.checkpoint.checkpoint import open_checkpoint
from palimpsa_surgery.surgery.checkpoint.sources import tokenizer_file_name, tokenizer_files
from palimpsa_surgery.surgery.checkpoint.tokenizer import encode_alike, load_tokenizer, open_tokenizer, with_tokenizer
from palimpsa_surgery.surgery.conversion.convert import MeasureOptions, convert
from palimpsa_surgery.surgery.conversion.export import export

EMBEDDED = embedded_checkpoint_path()
HF = {"model_type": "mamba2"}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def swap_two_words(content):
    vocabulary = content["model"]["vocab"]
    one, two = list(vocabulary)[300:302]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]


def drop_merges(content):
    del content["model"]["merges"][50:]


def lower_case(content):
    content["normalizer"] = {"type": "Lowercase"}


def pad(content):
    content["padding"] = {
        "strategy": "BatchLongest",
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }


# Opening.


@pytest.mark.parametrize(
    ("option", "advice"),
    [
        ("data.tokenizer", "name another tokenizer with data.tokenizer$"),
        (None, "put files there that transformers reads without it$"),
    ],
)
def test_a_message_names_the_option_of_its_caller(tmp_path, option, advice):
    pico.write_tokenizer(tmp_path, auto_map={"AutoTokenizer": ["my.Tok", None]})
    with pytest.raises(CheckpointError, match=advice):
        load_tokenizer(tmp_path, option=option)


@pytest.mark.parametrize("files", [{}, {"tokenizer_config.json": {}}, {"chat_template.jinja": TEMPLATE}])
@pytest.mark.parametrize("config", [None, {}, HF, {"model_type": "llama"}])
def test_no_tokenizer_is_made_up(tmp_path, config, files):
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"(has no tokenizer|cannot be read .*); give one with --tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"model": 3}', b"\xff"])
def test_a_damaged_tokenizer_is_refused(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"its tokenizer cannot be read .*; give one with --tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("file", "auto_map"),
    [
        ("tokenizer_config.json", {"AutoTokenizer": ["my.Tok", None]}),
        ("tokenizer_config.json", {"AutoTokenizer": [None, "my.Tok"]}),
        ("tokenizer_config.json", ["my.Tok", None]),
        ("config.json", {"AutoConfig": "my.Config", "AutoTokenizer": "my.Tok"}),
    ],
)
@pytest.mark.parametrize("config", [{}, HF])
def test_a_tokenizer_with_code_of_its_own_is_refused_by_name(tmp_path, config, file, auto_map):
    pico.write_tokenizer(tmp_path / "model", tokenizer_class="Tok")
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    path = tmp_path / "model" / file
    path.write_text(json.dumps({**load_json(path), "auto_map": auto_map}))
    with pytest.raises(CheckpointError, match=rf"{file} says that its tokenizer is code of its own \(my\.Tok\)"):
        load_tokenizer(tmp_path / "model")


@pytest.mark.parametrize("config", [None, {}, HF])
@pytest.mark.parametrize("kind", [{}, {"slow": True}, {"bare": True}])
def test_each_form_of_one_tokenizer_gives_the_same_ids(tmp_path, config, kind):
    pico.write_tokenizer(tmp_path, **kind)
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    text = "CREATE TABLE t(a, b); -- Ünïcode 123"
    assert load_tokenizer(tmp_path)(text)["input_ids"] == load_tokenizer(EMBEDDED)(text)["input_ids"]


def test_a_converted_folder_is_opened_without_a_warning_of_transformers(tmp_path):
    """In a process of its own: here the type of the model is known already."""
    shutil.copytree(EMBEDDED, tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "palimpsa_mamba2"}))
    code = (
        "import sys; from palimpsa_surgery.surgery.checkpoint.tokenizer import load_tokenizer\n"
        "load_tokenizer(sys.argv[1])"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "model"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "to instantiate a model of type" not in done.stderr


def test_a_home_folder_is_found(tmp_path, monkeypatch):
    pico.write_tokenizer(tmp_path / "mine")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_tokenizer("~/mine").eos_token_id == 0


@pytest.mark.parametrize(
    ("source", "message"),
    [("./gone", "no such folder; give a tokenizer's folder or a Hub id"), ("{}/tokenizer.json", "is a file, expected")],
)
def test_a_place_without_a_folder_is_refused(source, message):
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(source.format(EMBEDDED))


def test_of_a_hub_id_only_the_tokenizer_is_fetched(tmp_path, monkeypatch):
    with hub_server.for_the_client(monkeypatch, tmp_path) as server:
        folder = pico.write_tokenizer(tmp_path / "here", chat_template=TEMPLATE)
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "rag.jinja").write_text("rag")
        (folder / "model.safetensors").write_bytes(b"large")
        files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
        server.repositories["a/b"] = hub_server.Repository(private=False)
        server.repositories["a/b"].commit(
            {name: hub_server.Blob(path.read_bytes(), lfs=False) for name, path in files.items()}
        )
        loaded = load_tokenizer("a/b")
        fetched = {path.name for path in (tmp_path / "hub").rglob("snapshots/**/*") if path.is_file()}
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert load_tokenizer("a/b").get_vocab() == loaded.get_vocab()
    assert fetched == {"tokenizer.json", "tokenizer_config.json", "rag.jinja"}
    assert encode_alike(loaded, load_tokenizer(EMBEDDED))


def far_words(content):
    content["model"]["vocab"] |= {f"far{number}": 4093 + number for number in range(9)}


def far_special(content):
    kind = {"special": True, "normalized": False, "single_word": False, "lstrip": False, "rstrip": False}
    content["added_tokens"] += [{**kind, "id": 4093 + number, "content": f"<|far{number}|>"} for number in range(9)]


def drops(content):
    content["model"]["dropout"] = 0.25


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (
            far_words,
            r"has ids up to 4101 \('far8'\), but the model's embedding has 4096 rows; give one with --tokenizer",
        ),
        (far_special, r"has ids up to 4101 \('<\|far8\|>'\), but the model's embedding has 4096 rows"),
        (drops, r"leaves out merges by chance \(dropout 0.25\), so one text has other ids each time; set that to null"),
    ],
)
@pytest.mark.parametrize("own", [True, False], ids=["own", "named"])
def test_a_tokenizer_that_cannot_be_the_models_is_refused_wherever_it_is_opened(tmp_path, edit, match, own):
    pico.write_mamba_ssm(tmp_path / "source", rows=4096, vocab=4096, layers=2)
    bad = pico.write_tokenizer(tmp_path / "source" if own else tmp_path / "named", edit=edit)
    named = None if own else bad
    checkpoint = open_checkpoint(tmp_path / "source")
    calls = [
        lambda: open_tokenizer(checkpoint, named),
        lambda: with_tokenizer(checkpoint, named),
        lambda: load_tokenizer(bad, rows=4096),
        lambda: convert(checkpoint.path, tmp_path / "out", layers=(0,), measuring=MeasureOptions(tokenizer=named)),
        lambda: generate(checkpoint.path, "a", tokenizer=named),
        lambda: evaluate(checkpoint.path, suites=["loss"], tokenizer=named),
    ]
    for call in calls:
        with pytest.raises(CheckpointError, match=match):
            call()
    assert not (tmp_path / "out").exists()


# Being the same.


@pytest.mark.parametrize("change", [{"slow": True}, {"edit": pad}, {"chat_template": TEMPLATE}, {"name_or_path": "x"}])
def test_tokenizers_that_encode_alike_are_the_same(tmp_path, change):
    assert encode_alike(load_tokenizer(EMBEDDED), load_tokenizer(pico.write_tokenizer(tmp_path, **change)))


@pytest.mark.parametrize(
    "change",
    [
        {"edit": swap_two_words},
        {"edit": drop_merges},
        {"edit": lower_case},
        {"edit": pico.with_first_token},
        {"eos_token": "the"},
        {"split_special_tokens": True},
    ],
)
def test_tokenizers_that_encode_otherwise_differ(tmp_path, change):
    assert not encode_alike(load_tokenizer(EMBEDDED), load_tokenizer(pico.write_tokenizer(tmp_path, **change)))


# What is written.

SMALL = {"rows": 4096, "vocab": 4093, "layers": 2}
NAMED = {"bos_token": "the", "eos_token": "<|endoftext|>", "pad_token": "of"}


def token_ids(folder):
    config, generation = (load_json(folder / f"{name}.json") for name in ("config", "generation_config"))
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    return [tuple(content.get(key) for key in keys) for content in (config, generation)]


@pytest.mark.parametrize("layout", ["mamba_ssm", "hf"])
@pytest.mark.parametrize("kind", [{}, {"slow": True}])
def test_the_ids_of_a_tokenizer_that_was_named_go_into_both_configs(tmp_path, layout, kind):
    write = {"mamba_ssm": pico.write_mamba_ssm, "hf": pico.write_hf}[layout]
    write(tmp_path / "source", **({} if layout == "mamba_ssm" else {"config": {"eos_token_id": 9}}), **SMALL)
    named = pico.write_tokenizer(tmp_path / "named", **kind, **NAMED)
    convert(tmp_path / "source", tmp_path / "out", layers=(0,), measuring=MeasureOptions(tokenizer=named))
    loaded = load_tokenizer(tmp_path / "out")
    expected = (loaded.bos_token_id, 0, loaded.pad_token_id)
    assert token_ids(tmp_path / "out") == [expected, expected]
    assert encode_alike(loaded, load_tokenizer(named))


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, {}, (0, 0)),
        ({"eos_token_id": [0, 7]}, {}, (0, [0, 7])),
        ({"temperature": 0.5}, {}, (0, 0)),
        (None, {"eos_token_id": 9}, (9, 9)),
    ],
)
@pytest.mark.parametrize("kind", [{}, {"slow": True}])
@pytest.mark.parametrize("write", [convert, export])
def test_the_own_tokenizer_fills_what_the_configs_leave_open(tmp_path, write, kind, generation, config, expected):
    pico.write_mamba_ssm(tmp_path / "source", config=config, **SMALL)
    pico.write_tokenizer(tmp_path / "source", **kind)
    if generation is not None:
        (tmp_path / "source" / "generation_config.json").write_text(json.dumps(generation))
    how = {"layers": (0,), "verify": "none"} if write is convert else {"layout": "palimpsa_mamba2"}
    write(tmp_path / "source", tmp_path / "out", **how)
    assert tuple(ids[1] for ids in token_ids(tmp_path / "out")) == expected


def test_a_tokenizer_that_was_named_goes_before_the_own_one(tmp_path):
    pico.write_mamba_ssm(tmp_path / "source", **SMALL)
    pico.write_tokenizer(tmp_path / "source", auto_map={"AutoTokenizer": ["my.Tok", None]})
    (tmp_path / "source" / "generation_config.json").write_text('{"eos_token_id": [3, 4], "top_k": 5}')
    named = with_tokenizer(
        open_checkpoint(tmp_path / "source"), pico.write_tokenizer(tmp_path / "named", eos_token="the")
    )
    end = open_tokenizer(named).eos_token_id
    assert end not in (0, 3, 4)
    assert named.config.eos_token_id == end
    assert named.generation_config == {"eos_token_id": end, "top_k": 5, "bos_token_id": 0}
    assert [path.parent.name for path in named.tokenizer_files] == ["named"] * 2


def test_an_id_without_a_row_is_not_written(tmp_path):
    pico.write_mamba_ssm(tmp_path / "source", rows=4093, vocab=4093, layers=2)
    pico.write_tokenizer(tmp_path / "source", pad_token="<pad>")
    checkpoint = open_checkpoint(tmp_path / "source")
    assert open_tokenizer(checkpoint).pad_token_id == 4093
    assert with_tokenizer(checkpoint).config.pad_token_id is None


def test_a_bare_tokenizer_is_read_after_the_conversion_as_before_it(tmp_path):
    pico.write_hf(tmp_path / "source", **SMALL)
    pico.write_tokenizer(tmp_path / "source", bare=True)
    convert(tmp_path / "source", tmp_path / "out", layers=(0,), verify="none")
    before, after = load_tokenizer(tmp_path / "source"), load_tokenizer(tmp_path / "out")
    assert encode_alike(before, after)
    assert (before.eos_token_id, before.bos_token_id) == (after.eos_token_id, after.bos_token_id) == (0, 0)


def test_every_chat_template_comes_along(tmp_path):
    pico.write_mamba_ssm(tmp_path / "source", **SMALL)
    pico.write_tokenizer(tmp_path / "source")
    (tmp_path / "source" / "chat_template.jinja").write_text(TEMPLATE)
    more = tmp_path / "source" / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("tools")
    names = [tokenizer_file_name(path) for path in tokenizer_files(tmp_path / "source")]
    assert names[-1] == "additional_chat_templates/tool_use.jinja"
    convert(tmp_path / "source", tmp_path / "out", layers=(0,), verify="none")
    export(tmp_path / "out", tmp_path / "exported", layout="palimpsa_mamba2")
    push_to_folder(tmp_path / "exported", "a/b", tmp_path / "pushed")
    for folder in ("out", "exported", "pushed"):
        assert load_tokenizer(tmp_path / folder).chat_template == {"default": TEMPLATE, "tool_use": "tools"}


def test_a_list_of_chat_templates_comes_along(tmp_path):
    pico.write_mamba_ssm(tmp_path / "source", **SMALL)
    templates = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "tools"}]
    pico.write_tokenizer(tmp_path / "source", chat_template=templates)
    convert(tmp_path / "source", tmp_path / "out", layers=(0,), verify="none")
    assert load_tokenizer(tmp_path / "out").chat_template == {"default": TEMPLATE, "tool_use": "tools"}


def test_a_push_refuses_a_tokenizer_whose_code_stays_behind(tmp_path):
    pico.write_mamba_ssm(tmp_path / "source", **SMALL)
    shutil.copyfile(EMBEDDED / "tokenizer.json", tmp_path / "source" / "tokenizer.json")
    convert(tmp_path / "source", tmp_path / "out", layers=(0,), verify="none")
    pico.write_tokenizer(tmp_path / "out", auto_map={"AutoTokenizer": ["my.Tok", None]})
    with pytest.raises(CheckpointError, match=r"code of its own \(my\.Tok\)"):
        push_to_folder(tmp_path / "out", "a/b", tmp_path / "pushed")
