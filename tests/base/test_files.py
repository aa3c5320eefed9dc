import errno
import math
import os
import stat

import pytest
from palimpsa_surgery.base import files
from palimpsa_surgery.base.errors import OutputError, OutputExistsError, SchemaError, UsageError


def siblings(path):
    return sorted(entry.name for entry in path.iterdir())


@pytest.mark.parametrize("value", [math.nan, math.inf, {"a": [1.0, -math.inf]}])
def test_json_that_is_not_finite_is_refused_and_the_old_file_stays(tmp_path, value):
    path = tmp_path / "profile.json"
    files.write_json(path, {"old": 1})
    with pytest.raises(SchemaError, match="not finite"):
        files.write_json(path, value)
    assert files.load_json(path) == {"old": 1}
    assert siblings(tmp_path) == ["profile.json"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": NaN}', r"p\.json: holds NaN, which is not JSON"),
        (b'{"a": 1,\n "b": }', r"p\.json:2: is not JSON"),
        (b'{"a": 1, "a": 2}', r"p\.json:a: is given twice"),
        (b'{"a": "\xff"}', r"p\.json: is not UTF-8 text"),
        (b"", r"p\.json:1: is not JSON"),
        (b"1" * 5000, r"p\.json: is JSON that cannot be read \(Exceeds the limit"),
        (b"[" * 100_000, r"p\.json: is JSON that cannot be read \(maximum recursion"),
    ],
)
def test_faulty_json_names_file_and_line(tmp_path, content, message):
    path = tmp_path / "p.json"
    path.write_bytes(content)
    with pytest.raises(SchemaError, match=message):
        files.load_json(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a: [1, 2\nb: 3", r"p\.yaml:2: is not YAML"),
        ("a: 1\nb: 2\na: 3", r"p\.yaml:3: is not YAML \(a is given twice\)"),
        ("x: !!python/object/apply:os.getcwd []", r"p\.yaml:1: is not YAML"),
        ("a: 1\n? [1, 2]\n: 3", r"p\.yaml:2: is not YAML \(a key is a list or a mapping, expected a name\)"),
        ("a:\n  ? {b: 1}\n  : 3", r"p\.yaml:2: is not YAML \(a key is a list or a mapping"),
        ("a: 2024-99-99", r"p\.yaml: is YAML that cannot be read \(month must be in 1..12"),
        ("a: " + "1" * 5000, r"p\.yaml: is YAML that cannot be read \(Exceeds the limit"),
        ("[" * 5000, r"p\.yaml: is YAML that cannot be read \(maximum recursion"),
    ],
)
def test_faulty_yaml_names_file_and_line(tmp_path, content, message):
    path = tmp_path / "p.yaml"
    path.write_text(content)
    with pytest.raises(SchemaError, match=message):
        files.load_yaml(path)


@pytest.mark.parametrize(
    "use",
    [
        lambda name: files.refuse_existing(name, force=True),
        lambda name: files.refuse_to_delete(name),
        lambda name: files.write_json(name, {}),
        lambda name: files.output_folder(name, force=True).__enter__(),
    ],
    ids=["refuse_existing", "refuse_to_delete", "write_json", "output_folder"],
)
def test_an_empty_name_is_not_the_current_folder(tmp_path, monkeypatch, use):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="the name of the output is empty; give one"):
        use("")
    assert files.named_path(".", "output") == files.Path(".")


@pytest.mark.parametrize("load", [files.load_json, files.load_yaml])
@pytest.mark.parametrize("kind", ["absent", "folder"])
def test_what_cannot_be_read_is_one_line(tmp_path, load, kind):
    path = tmp_path if kind == "folder" else tmp_path / "absent.yaml"
    with pytest.raises(SchemaError, match="cannot be read") as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_written_files_follow_the_umask(tmp_path):
    old = os.umask(0o027)
    try:
        files.write_text(tmp_path / "new" / "a.txt", "x")
        with files.output_folder(tmp_path / "out"):
            pass
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "new" / "a.txt").stat().st_mode) == 0o640
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o750


def test_a_link_is_followed_not_replaced(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link.json").symlink_to(tmp_path / "real" / "a.json")
    files.write_json(tmp_path / "link.json", 1)
    assert (tmp_path / "link.json").is_symlink()
    assert files.load_json(tmp_path / "real" / "a.json") == 1


def test_a_pipe_is_written_to_directly(tmp_path):
    reader, writer = os.pipe()
    files.write_text(f"/dev/fd/{writer}", "through")
    os.close(writer)
    assert os.read(reader, 100) == b"through"
    os.close(reader)


def test_a_full_disk_while_writing_a_file(tmp_path, monkeypatch):
    path = tmp_path / "plan.yaml"
    files.write_text(path, "old")

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OutputError, match=r"No space left on device.*untouched") as caught:
        files.write_text(path, "new")
    assert "\n" not in str(caught.value)
    assert path.read_text() == "old"
    assert siblings(tmp_path) == ["plan.yaml"]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_an_existing_output_is_refused_without_force(tmp_path, kind):
    path = tmp_path / "out"
    if kind == "file":
        path.write_text("mine")
    else:
        path.mkdir()
        (path / "README.md").write_text("mine")
    with pytest.raises(OutputExistsError, match="--force"), files.output_folder(path):
        pytest.fail("the block must not run")
    assert siblings(tmp_path) == ["out"]
    with files.output_folder(path, force=True) as folder:
        (folder / "new.txt").write_text("new")
        assert path.exists(), "the old output stays until the new one is complete"
    assert siblings(path) == ["new.txt"]
    assert siblings(tmp_path) == ["out"]


@pytest.mark.parametrize("force", [False, True])
def test_the_folder_one_works_in_is_not_replaced_even_when_empty(tmp_path, monkeypatch, force):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(OutputExistsError, match="would delete here"), files.output_folder(".", force=force):
        pytest.fail("the block must not run")
    assert files.Path.cwd() == tmp_path / "here"


def test_an_empty_folder_is_no_obstacle(tmp_path):
    (tmp_path / "out").mkdir()
    with files.output_folder(tmp_path / "out") as folder:
        (folder / "a").write_text("a")
    assert siblings(tmp_path / "out") == ["a"]


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
def test_an_error_inside_leaves_the_old_folder_and_nothing_else(tmp_path, error):
    path = tmp_path / "out"
    path.mkdir()
    (path / "old").write_text("old")
    with pytest.raises(type(error)), files.output_folder(path, force=True) as folder:
        (folder / "half").write_text("half")
        raise error
    assert siblings(tmp_path) == ["out"]
    assert siblings(path) == ["old"]


def test_a_full_disk_inside_the_block_is_one_clear_line(tmp_path):
    with pytest.raises(OutputError, match="No space left"), files.output_folder(tmp_path / "out"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert siblings(tmp_path) == []


def test_another_os_error_inside_the_block_is_not_blamed_on_the_output(tmp_path):
    with pytest.raises(FileNotFoundError), files.output_folder(tmp_path / "out"):
        raise FileNotFoundError(errno.ENOENT, "no such input")
    assert siblings(tmp_path) == []


def test_an_output_that_appears_meanwhile_is_not_replaced(tmp_path):
    with pytest.raises(OutputExistsError, match="--force"), files.output_folder(tmp_path / "out") as folder:
        (folder / "mine").write_text("slow")
        with files.output_folder(tmp_path / "out") as other:
            (other / "theirs").write_text("fast")
    assert siblings(tmp_path) == ["out"]
    assert siblings(tmp_path / "out") == ["theirs"]


def test_windows_flushes_through_handles_that_may_write(tmp_path, monkeypatch):
    modes, real = [], os.open
    monkeypatch.setattr(files, "_WINDOWS", True)
    monkeypatch.setattr(files.os, "open", lambda path, flags, *rest: modes.append(flags) or real(path, flags, *rest))
    (tmp_path / "a").write_text("a")
    files.flush(tmp_path / "a")
    assert modes == [os.O_RDWR]


def loop(folder):
    (folder / "loop").symlink_to(folder / "loop")
    return folder / "loop"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (lambda folder: f"{folder}/a\0b", r"a\\x00b.*cannot be the name of the output"),
        (loop, "loop: cannot be the output .Too many levels of symbolic links"),
        (lambda folder: folder / ("x" * 5000), "x: cannot be the output .File name too long"),
    ],
    ids=["NUL", "loop", "long"],
)
@pytest.mark.parametrize("use", [files.write_json, lambda path, _: files.refuse_existing(path, force=True)])
def test_names_that_no_file_can_have(tmp_path, name, message, use):
    with pytest.raises(UsageError, match=message):
        use(name(tmp_path), {})


@pytest.mark.parametrize("name", ["out", "deep/er/out"])
def test_a_place_that_is_not_writable_is_refused_before_the_work(tmp_path, monkeypatch, name):
    monkeypatch.setattr(files.os, "access", lambda path, mode: False)
    with pytest.raises(OutputError, match=r"not writable.*choose another output"):
        files.refuse_existing(tmp_path / name, force=True)


@pytest.mark.parametrize(("load", "text"), [(files.load_json, '{"a": 1}'), (files.load_yaml, "a: 1")])
def test_a_byte_order_mark_is_read_over(tmp_path, load, text):
    (tmp_path / "a").write_text(text, encoding="utf-8-sig")
    assert load(tmp_path / "a") == {"a": 1}


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_real_write_that_fails_leaves_the_old_content(tmp_path, kind):
    """A limit on the size of files stands in for a full disk: the operating system itself refuses the write."""
    resource = pytest.importorskip("resource", reason="POSIX only")
    path = tmp_path / "out"
    if kind == "file":
        path.write_text("old")
    else:
        path.mkdir()
        (path / "old").write_text("old")
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        code = 1
        try:
            if kind == "file":
                files.write_bytes(path, b"x" * 5000)
            else:
                with files.output_folder(path, force=True) as folder:
                    (folder / "new").write_bytes(b"x" * 5000)
        except OutputError as error:
            code = 0 if "File too large" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert siblings(tmp_path) == ["out"]
    assert (path if kind == "file" else path / "old").read_text() == "old"


def test_a_parent_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        files.write_text(tmp_path / "file" / "plan.yaml", "x")
    with pytest.raises(OutputError, match="cannot be written"), files.output_folder(tmp_path / "file" / "out"):
        pytest.fail("the block must not run")


@pytest.mark.parametrize("where", [".", "deep/er"])
def test_a_forced_replacement_never_deletes_an_input_inside_it(tmp_path, where):
    whole, kept = tmp_path / "models", tmp_path / "models" / where / "source"
    kept.mkdir(parents=True)
    with pytest.raises(OutputExistsError, match="would delete source, which is in use"):
        files.refuse_to_delete(whole, kept)
    with pytest.raises(OutputExistsError, match="would delete source, which is in use and is it"):
        files.refuse_to_delete(kept, kept)
    files.refuse_to_delete(kept, whole)
    files.refuse_to_delete(tmp_path / "models-2", kept)


@pytest.mark.parametrize("kept", ["elsewhere/model", "out/link", "by-link/text.json"])
def test_a_forced_replacement_follows_links_of_an_input_and_keeps_the_links(tmp_path, kept):
    for folder in ("out/texts", "elsewhere/model"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("out/texts/text.json", "out/model.safetensors", "elsewhere/text.json"):
        (tmp_path / file).write_text("[]")
    (tmp_path / "elsewhere" / "model" / "model.safetensors").symlink_to(tmp_path / "out" / "model.safetensors")
    (tmp_path / "out" / "link").symlink_to(tmp_path / "elsewhere" / "text.json")
    (tmp_path / "by-link").symlink_to(tmp_path / "out" / "texts")
    with pytest.raises(OutputExistsError, match=r"out: replacing this would delete .*, which is in use and lies in it"):
        files.refuse_to_delete(tmp_path / "out", tmp_path / kept)
    assert files.inputs_within(tmp_path / "out", tmp_path / "elsewhere" / "text.json", None, tmp_path / "none") == []


@pytest.mark.parametrize("output", [".", "..", "../../work"])
def test_a_forced_replacement_never_deletes_the_current_folder(tmp_path, monkeypatch, output):
    here = tmp_path / "work" / "here"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    with pytest.raises(OutputExistsError, match="would delete here"):
        files.refuse_to_delete(output)


def test_a_forced_replacement_never_deletes_an_input_file(tmp_path):
    (tmp_path / "text.json").write_text("[]")
    with pytest.raises(OutputExistsError, match=r"would delete text\.json, which is in use and is it"):
        files.refuse_to_replace([tmp_path / "text.json"], None, tmp_path / "text.json", force=True)


@pytest.mark.parametrize(
    ("names", "ours"),
    [
        (("config.json", "model-00001-of-00002.safetensors"), True),
        (("config.json", "pytorch_model.bin"), True),
        (("adapter_config.json",), True),
        (("recipe.yaml", "metrics.jsonl"), True),
        (("config.json", "model.safetensors", "tokenizer.json", "modeling_x.py", "LICENSE", "eval-loss.png"), True),
        (("config.json", "index.js"), False),
        (("a", "b", "c", "d"), False),
        (("data", "notes.txt", "recipe.yaml"), False),
        (("a.csv", "data", "config.json", "model.safetensors"), False),
    ],
)
def test_a_forced_replacement_deletes_only_what_this_program_has_written(tmp_path, names, ours):
    for name in names:
        (tmp_path / name).write_text("")
    if ours:
        files.refuse_to_delete(tmp_path)
        return
    with pytest.raises(OutputExistsError, match=f"no model, adapter or run folder, .* delete {names[0]}, {names[1]}"):
        files.refuse_to_delete(tmp_path)


def test_a_forced_replacement_is_of_a_folder_by_a_folder_and_of_a_file_by_a_file(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OutputExistsError, match="file: is a file, and a folder is to be written"):
        files.refuse_to_delete(tmp_path / "file")
    with pytest.raises(OutputExistsError, match="folder: is a folder, and a file is to be written"):
        files.refuse_to_replace([tmp_path / "folder"], force=True)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "adapter_config.json"])
@pytest.mark.parametrize("there", [True, False])
def test_no_report_has_the_name_of_a_file_that_a_model_is_read_from(tmp_path, there, name):
    if there:
        (tmp_path / name).write_text("{}")
    with pytest.raises(OutputExistsError, match=rf"{name}: is the name of a file that a model or a run is read from"):
        files.refuse_to_replace([tmp_path / name], force=True)
    files.refuse_to_replace([tmp_path / "eval.json"], force=True)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("model.safetensors", r"is a link to model\.safetensors, which is no such file"),
        ("pytorch_model.bin", r"is a link to pytorch_model\.bin"),
        ("notes", "is a link to notes"),
        ("config.json", "is the name of a file that a model or a run is read from"),
    ],
)
@pytest.mark.parametrize("there", [True, False])
def test_a_link_is_no_way_to_replace_a_file_of_another_kind(tmp_path, target, message, there):
    (tmp_path / "out.json").symlink_to(tmp_path / target)
    if there:
        (tmp_path / target).write_text("weights")
    with pytest.raises(OutputExistsError, match=rf"out\.json: {message}"):
        files.refuse_to_replace([tmp_path / "out.json"], force=True)


def test_a_link_to_a_file_of_the_same_kind_is_followed(tmp_path):
    (tmp_path / "out.json").symlink_to(tmp_path / "other.json")
    files.refuse_to_replace([tmp_path / "out.json"], force=True)


def test_a_forced_replacement_never_changes_a_folder_that_is_read(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.json").write_text("[]")
    with pytest.raises(OutputExistsError, match="lies in texts, which is read; choose an output outside it"):
        files.refuse_to_replace([tmp_path / "texts" / "a.json"], tmp_path / "texts", force=True)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_flush_that_fails_is_an_error_of_the_folder(tmp_path, monkeypatch, number):
    calls = []

    def fsync(handle):
        calls.append(handle)
        if len(calls) == 1:  # the system reports a failed write once
            raise OSError(number, os.strerror(number))

    with pytest.raises(OutputError, match=os.strerror(number)), files.output_folder(tmp_path / "out") as folder:
        (folder / "weights").write_text("large")
        monkeypatch.setattr(files.os, "fsync", fsync)
    assert siblings(tmp_path) == []
