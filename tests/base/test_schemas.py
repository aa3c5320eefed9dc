from typing import Any, Literal

import pytest
from palimpsa_surgery.base import schemas
from palimpsa_surgery.base.errors import SchemaError, UsageError


class Head(schemas.StrictPart):
    window: float
    rank: int = 1


class Plan(schemas.StrictModel):
    layers: list[int]
    heads: dict[str, Head] = {}
    start: Head | None = None
    rule: Literal["window", "rate"] = "window"


class SecondPlan(schemas.StrictModel):
    schema_version: int = 2
    layers: list[int]

    @classmethod
    def upgrade(cls, data: dict[str, Any], version: int) -> dict[str, Any]:
        return {"layers": [data["layer"]]} if version == 1 else super().upgrade(data, version)


@pytest.mark.parametrize("suffix", ["json", "yaml", "yml"])
def test_written_files_read_back_equal(tmp_path, suffix):
    plan = Plan(layers=[4, 8], heads={"4": Head(window=1e-9)}, start=Head(window=3.5, rank=2))
    path = tmp_path / f"plan.{suffix}"
    schemas.write_model(plan, path)
    assert schemas.read_model(Plan, path) == plan
    first = path.read_bytes()
    schemas.write_model(schemas.read_model(Plan, path), path)
    assert path.read_bytes() == first


def test_yaml_is_meant_for_reading():
    text = schemas.dump_yaml(Plan(layers=[4, 8], start=Head(window=1.0)))
    assert "layers: [4, 8]\n" in text
    assert "start:\n  window: 1.0\n" in text


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"layer": [1], "layers": [1]}, r"plan\.yaml:layer: there is no such key; did you mean layers\?"),
        (
            {"layers": [1], "zzz": 1},
            r"plan\.yaml:zzz: there is no such key; the keys are schema_version, layers, heads",
        ),
        ({}, r"plan\.yaml:layers: is missing; add it"),
        ({"layers": ["x"]}, r"plan\.yaml:layers\.0: is 'x', expected a valid integer"),
        ({"layers": [1], "rule": "widnow"}, r"plan\.yaml:rule: is 'widnow', expected 'window' or 'rate'"),
        ({"layers": [1], "heads": {"q": {"windw": 1, "window": 1}}}, r"heads\.q\.windw: .* did you mean window\?"),
        ({"layers": [1], "start": {"rnak": 1, "window": 1}}, r"plan\.yaml:start\.rnak: .* did you mean rank\?"),
        ({"layers": [1], "start": {"window": float("nan")}}, r"start\.window: is nan, expected a finite number"),
    ],
)
def test_each_fault_is_a_sentence_with_its_place(data, message):
    with pytest.raises(SchemaError, match=message) as caught:
        schemas.validate_model(Plan, {"schema_version": 1, **data}, "plan.yaml")
    assert "\n" not in str(caught.value)


def test_all_faults_come_at_once():
    data = {"schema_version": 1, "layers": ["x", 1.5], "rule": "w", "layer": 3}
    with pytest.raises(UsageError) as caught:
        schemas.validate_model(Plan, data, "plan.yaml", error=UsageError)
    assert str(caught.value).count("plan.yaml:") == 4


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "plan.yaml: is empty, expected keys and values of a plan"),
        ([1], "plan.yaml: is a list"),
        ({"layers": [1]}, "schema_version: is missing; add schema_version: 1"),
        ({"schema_version": "new"}, "schema_version: is 'new', expected a whole number"),
        ({"schema_version": True}, "schema_version: is True, expected a whole number"),
        ({"schema_version": 2}, "schema_version: is 2, newer than the 1 this release knows; update"),
        ({"schema_version": 0}, "schema_version: is 0, which this release no longer reads"),
    ],
)
def test_versions_are_read_or_refused_by_name(data, message):
    with pytest.raises(SchemaError, match=message):
        schemas.validate_model(Plan, data, "plan.yaml")


def test_an_older_version_is_upgraded_when_the_schema_says_how():
    plan = schemas.validate_model(SecondPlan, {"schema_version": 1, "layer": 7}, "plan.yaml")
    assert (plan.layers, plan.schema_version) == ([7], 2)
    with pytest.raises(SchemaError, match="is 0, which this release no longer reads"):
        schemas.validate_model(SecondPlan, {"schema_version": 0}, "plan.yaml")


def test_a_model_cannot_be_built_with_a_foreign_version_or_changed():
    with pytest.raises(ValueError, match="is 3; this release works with version 1"):
        Plan(layers=[1], schema_version=3)
    with pytest.raises(ValueError, match="frozen"):
        Plan(layers=[1]).layers = [2]


def test_a_file_without_a_telling_suffix(tmp_path):
    with pytest.raises(SchemaError, match=r"name it \.json or \.yaml"):
        schemas.write_model(Plan(layers=[1]), tmp_path / "plan.txt")
