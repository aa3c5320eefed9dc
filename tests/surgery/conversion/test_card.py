"""The model card: facts of the report, license and base model of the source alone, a user's own text kept."""

import pytest
import yaml
from palimpsa_surgery.sharing.adapter_card import render_adapter_card
from palimpsa_surgery.surgery.checkpoint.licenses import license_terms
from palimpsa_surgery.surgery.conversion.card import MARKER, CardFacts, is_own_card, kept_readme, render_card
from palimpsa_surgery.surgery.measure.profile import LayerProfile, Profile
from palimpsa_surgery.surgery.planning.plan import Plan


def make_plan(**over):
    values = {"source": "tiny", "fingerprint": "ab", "layers": (0, 2), "beta_rank": 4, "beta_groups": 8}
    return Plan(**{**values, "rule": "window", "reasons": {0: "longest"}, **over})


def make_profile():
    layers = [LayerProfile(layer=i, rate=0.25, window=12.5, head_rate=[0.25], head_window=[12.5]) for i in range(3)]
    return Profile(
        method="measured", source="tiny", fingerprint="ab", data="text", tokens=128, seq_len=64, layers=layers
    )


def facts(**over):
    values = {"name": "tiny-palimpsa", "plan": make_plan(), "swapped": (0, 1, 2), "dtype": "bfloat16"}
    return CardFacts(**{**values, "profile": make_profile(), **over})


def front_matter(card):
    return yaml.safe_load(card.split("---\n")[1])


def test_license_and_base_model_are_carried_over():
    values = front_matter(render_card(facts(license="apache-2.0", base_model="state-spaces/mamba2-2.7b")))
    assert (values["license"], values["base_model"]) == ("apache-2.0", "state-spaces/mamba2-2.7b")


def test_what_the_source_does_not_say_is_not_invented():
    card = render_card(facts())
    assert not {"license", "base_model"} & set(front_matter(card))
    assert "The source's card names no license" in card


def test_hub_metadata_names_library_and_task():
    values = front_matter(render_card(facts()))
    assert (values["library_name"], values["pipeline_tag"]) == ("transformers", "text-generation")
    assert "palimpsa" in values["tags"]


def test_swapped_layers_stand_with_windows_and_reasons():
    card = render_card(facts())
    assert "| 0 | 12.5 | 0.25 | longest |" in card
    assert "| 1 | 12.5 | 0.25 | swapped before |" in card
    assert "3 layers were replaced" in card
    assert "128 tokens of text in sequences of 64" in card


def test_a_single_layer_reads_as_one_and_no_profile_as_a_list():
    card = render_card(facts(swapped=(2,), profile=None))
    assert "1 layer was replaced" in card
    assert "Layers: 2, listed by hand" in card
    assert "profile.json" not in card


@pytest.mark.parametrize(
    ("init", "strength", "form", "words"),
    [
        ("identity", None, "abs", "the logits of the source"),
        ("calibrated", 0.25, "abs", "mean importance growth of 0.25"),
        ("paper", None, "softplus", "random start of the paper"),
    ],
)
def test_the_start_is_named(init, strength, form, words):
    card = render_card(facts(plan=make_plan(init=init, strength=strength, beta_scale_form=form)))
    assert f"Start: **{init}**" in card
    assert words in card


def test_verification_figures_or_their_absence_are_said():
    assert "| metaplasticity off | 2.1e-07 |" in render_card(facts(verification={"metaplasticity off": "2.1e-07"}))
    assert "Not verified at conversion" in render_card(facts())


def test_usage_loads_with_and_without_the_package():
    card = render_card(facts())
    # Both calls: AutoTokenizer reads the config first, and would ask a person whether to run its code.
    assert card.count('from_pretrained("tiny-palimpsa", trust_remote_code=True)') == 2
    assert "import palimpsa_surgery.modeling" in card


def test_a_card_with_the_marker_is_ours_and_one_without_is_kept(tmp_path):
    assert kept_readme(tmp_path) is None
    (tmp_path / "README.md").write_text(render_card(facts()))
    assert is_own_card(render_card(facts()))
    assert kept_readme(tmp_path) is None
    (tmp_path / "README.md").write_text(render_card(facts()).replace(MARKER, ""))
    assert "tiny-palimpsa" in kept_readme(tmp_path)


def test_another_license_keeps_its_name_and_link():
    card = render_card(facts(license="other", terms={"license_name": "odd", "license_link": "https://example.org/odd"}))
    assert front_matter(card)["license_link"] == "https://example.org/odd"
    assert "`other` (odd), carried over from the source. Its text: https://example.org/odd" in card
    assert license_terms({"license": "other", "license_name": "odd", "license_link": None}) == {"license_name": "odd"}


@pytest.mark.parametrize(
    ("over", "present", "absent"),
    [
        ({}, "(profile.png)", "## Training"),
        ({"picture": False}, "| 0 | 12.5 |", "(profile.png)"),
        ({"training": ("40 steps",)}, "## Training\n\n- 40 steps", "## Evaluation"),
        ({"plan": None}, "with 3 Palimpsa-M layers", "## Verification"),
        ({"plan": None, "swapped": ()}, "no layer swapped", "## Swapped layers"),
        ({"plan": None, "swapped": (), "base_model": "bob/base"}, "fine-tuned from `bob/base`", "plan.yaml"),
    ],
)
def test_sections_follow_the_facts(over, present, absent):
    card = render_card(facts(**over))
    assert present in card
    assert absent not in card


def test_an_adapter_without_new_parameters_says_nothing_of_them():
    config = {"r": 1, "lora_alpha": 2, "target_modules": ["in_proj"]}
    text = render_adapter_card("alice/a", "alice/m", [], config, {"license": "mit"}, (), None)
    assert "stored whole" not in text
    assert "## Training" not in text
    assert front_matter(text)["license"] == "mit"
    assert 'PeftModel.from_pretrained(base, "alice/a")' in text


@pytest.mark.parametrize(
    "verification", [{}, {"metaplasticity off": "relative error 2.1e-07"}], ids=["none", "verified"]
)
def test_a_correction_of_the_step_size_is_said_beside_the_figures(verification):
    text = render_card(facts(verification=verification, remarks=("The class bounds step sizes otherwise",)))
    section = text.partition("## Verification")[2].partition("## ")[0]
    assert section.rstrip().endswith("\n\nThe class bounds step sizes otherwise.")


@pytest.mark.parametrize(
    ("family", "mixed", "what"),
    [
        ("mamba2", False, "A Mamba2 language model"),
        ("mamba2", True, "A hybrid Mamba2 language model"),
        ("bamba", True, "A hybrid Mamba2 (`bamba`) language model"),
    ],
)
def test_a_model_with_layers_of_attention_is_called_a_hybrid(family, mixed, what):
    assert what in render_card(facts(family=family, mixed=mixed))
