"""profile.json: strict, readable, tied to its checkpoint; profile.png."""

import json
from types import SimpleNamespace

import pytest
from palimpsa_surgery.base.errors import OutputError, SchemaError
from palimpsa_surgery.surgery.families.mamba2 import MAMBA2
from palimpsa_surgery.surgery.measure import plots
from palimpsa_surgery.surgery.measure.plots import plot_profile
from palimpsa_surgery.surgery.measure.profile import (
    LayerCalibration,
    LayerProfile,
    Profile,
    read_profile,
    rounded,
    write_profile,
)


def layer(number, *, window=10.0, rate=0.1, heads=3, **other):
    return LayerProfile(
        layer=number, rate=rate, window=window, head_rate=[rate] * heads, head_window=[window] * heads, **other
    )


def profile(layers, **other):
    values = {"method": "measured", "source": "tiny", "fingerprint": "ab" * 32, "data": "text", "tokens": 128}
    return Profile(**{**values, "seq_len": 64, "layers": layers, **other})


def calibration(heads=3):
    return LayerCalibration(input_rms=1.5, importance=[2.0] * heads, spread=[[0.5] * 8] * heads)


def test_a_written_profile_reads_back_the_same(tmp_path):
    original = profile([layer(0, calibration=calibration()), layer(1, swapped=True)])
    write_profile(original, tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == original


def test_each_list_of_numbers_stands_on_one_line(tmp_path):
    write_profile(profile([layer(0, heads=4)]), tmp_path / "profile.json")
    text = (tmp_path / "profile.json").read_text()
    assert '"head_rate": [ 0.1, 0.1, 0.1, 0.1 ]' in text
    assert json.loads(text)["layers"][0]["head_window"] == [10.0] * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(sed=1), r"profile\.json:sed: .*did you mean seed\?"),
        (lambda data: data.pop("fingerprint"), r"profile\.json:fingerprint: is missing"),
        (lambda data: data["layers"][0].update(rate=-1), r"profile\.json:layers\.0\.rate: is -1"),
        (lambda data: data["layers"][0].update(windows=3), r"layers\.0\.windows: .*did you mean window\?"),
        (lambda data: data["layers"].append(data["layers"][0]), r"in the order of their numbers, .* not \[0, 0\]"),
        (lambda data: data["layers"][0].update(head_rate=[1.0]), "head_rate has 1 head, head_window 3"),
        (lambda data: data["layers"][0]["calibration"].update(importance=[1.0]), "importance has 1 head, spread 3"),
        (lambda data: data["layers"][0]["calibration"]["spread"][1].pop(), "spread has lists of 7 and 8 numbers"),
        (lambda data: data["layers"][0]["calibration"].update(spread=[[]] * 3), "spread has lists of 0 numbers"),
        (
            lambda data: data["layers"][0].update(window=99999.0),
            r"window is 99999, expected the mean of head_window, 10",
        ),
        (lambda data: data["layers"][0].update(rate=0.2), r"rate is 0.2, expected the mean of head_rate, 0.1"),
        (lambda data: data["layers"][0].update(head_window=[10.0, 10.0, 40.0]), "window is 10, expected .* 20"),
        (lambda data: data.update(schema_version=99), "schema_version: is 99, newer than the 1"),
        (lambda data: data.update(method="guessed"), "method: is 'guessed', expected 'measured' or 'static'"),
    ],
)
def test_a_mistake_is_named_with_file_and_key(tmp_path, change, message):
    path = tmp_path / "profile.json"
    write_profile(profile([layer(0, calibration=calibration())]), path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(SchemaError, match=message):
        read_profile(path)


def test_a_calibration_of_other_heads_is_refused():
    with pytest.raises(ValueError, match="calibration has 2 heads, not 3"):
        layer(0, calibration=calibration(heads=2))


@pytest.mark.parametrize("bad", ["NaN", "Infinity"])
def test_numbers_that_are_not_json_are_refused(tmp_path, bad):
    path = tmp_path / "profile.json"
    write_profile(profile([layer(0)]), path)
    path.write_text(path.read_text().replace('"rate": 0.1', f'"rate": {bad}'))
    with pytest.raises(SchemaError, match=bad):
        read_profile(path)


def checkpoint(fingerprint="ab" * 32, layers=2, heads=2, swapped=()):
    sizes = {"num_hidden_layers": layers, "num_heads": heads, "palimpsa_layers": swapped}
    return SimpleNamespace(
        source_id="other",
        family=MAMBA2,
        fingerprint=fingerprint,
        matches=fingerprint.__eq__,
        sites=MAMBA2.sites(MAMBA2.config("", sizes)),
        num_layers=layers,
        palimpsa_layers=tuple(swapped),
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fingerprint": "cd" * 32}, r"fingerprint: .* on tiny \(abababababab\), not on other \(cdcdcdcdcdcd\)"),
        (
            {"layers": 3},
            r"profile.json:layers: lists 2 layers, other has 3 with .* \(layer 2 is in one alone\); measure",
        ),
        ({"heads": 3}, r"profile.json:layers.0.head_rate: lists 2 heads, other has 3; measure"),
    ],
)
def test_a_profile_of_another_checkpoint_is_refused(changes, message):
    measured = profile([layer(0, heads=2), layer(1, heads=2)])
    measured.check_source(checkpoint())
    with pytest.raises(SchemaError, match=message):
        measured.check_source(checkpoint(**changes))


@pytest.mark.parametrize(
    ("said", "swapped", "message"),
    [
        (
            {1},
            (),
            r"profile.json:layers.1.swapped: is true, but that layer of other is plain Mamba2; correct it, or mea",
        ),
        (
            set(),
            (0,),
            r"profile.json:layers.0.swapped: is false, but that layer of other is Palimpsa-M; correct it, or",
        ),
        ({0, 1}, (0,), r"profile.json:layers.1.swapped: is true, but that layer of other is plain Mamba2"),
    ],
)
def test_a_layer_of_another_kind_than_the_checkpoints_is_refused(said, swapped, message):
    measured = profile([layer(number, heads=2, swapped=number in said) for number in range(2)])
    measured.check_source(checkpoint(swapped=said))
    with pytest.raises(SchemaError, match=message):
        measured.check_source(checkpoint(swapped=swapped))


@pytest.mark.parametrize("nothing", [{"tokens": 0}, {"seq_len": 0}])
def test_a_measured_profile_of_no_text_is_refused(nothing):
    with pytest.raises(ValueError, match="expected both above 0 where method is measured"):
        profile([layer(0)], **nothing)


def test_descriptions_name_the_text_or_say_static():
    assert profile([layer(0)]).describe() == "128 tokens of text in sequences of 64 (seed 0)"
    static = profile([layer(0)], method="static", data="", tokens=0, seq_len=0)
    assert "static estimate" in static.describe()


def test_swapped_layers_are_listed():
    assert profile([layer(0), layer(1, swapped=True), layer(2, swapped=True)]).swapped == (1, 2)


def test_rounding_keeps_eight_digits_at_any_size():
    assert rounded([1.23456789123e-9, 123456789.123]) == [1.2345679e-9, 123456790.0]


@pytest.mark.parametrize(("layers", "heads", "chosen"), [(1, 1, ()), (24, 12, (3, 8)), (64, 80, (0, 63))])
def test_the_picture_is_drawn_at_any_size_and_marks_layers(tmp_path, layers, heads, chosen):
    drawn = profile([layer(i, window=1.0 + i, heads=heads) for i in range(layers)])
    plot_profile(drawn, tmp_path / "marked.png", chosen=chosen)
    plot_profile(drawn, tmp_path / "plain.png")
    marked, plain = (tmp_path / "marked.png").read_bytes(), (tmp_path / "plain.png").read_bytes()
    assert marked.startswith(b"\x89PNG")
    assert (marked == plain) == (not chosen)


@pytest.mark.parametrize("fails", ["plot_profile", "write_profile"])
@pytest.mark.parametrize("old", [False, True])
def test_a_full_disk_leaves_neither_half_of_a_profile_and_its_picture(fails, old, tmp_path, monkeypatch):
    def full(*args):
        raise OutputError("cannot be written (No space left on device)")

    path, picture = tmp_path / "p.json", tmp_path / "p.png"
    if old:
        path.write_text("old")
        picture.write_text("old")
    monkeypatch.setattr(plots, fails, full)
    with pytest.raises(OutputError, match="No space left"):
        plots.write_profile_and_picture(profile([layer(0)]), path, picture)
    assert sorted(tmp_path.iterdir()) == ([path, picture] if old else [])
    assert not old or path.read_text() == "old"
