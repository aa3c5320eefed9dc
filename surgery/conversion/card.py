"""README.md of a model folder: the model card. Facts come from the report; license and base model from the source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import EvalResult, ModelCardData

from ...base.console import counted
from ...mixers.geometry import GATE_FP32, MIXER_FP32
from ..checkpoint.licenses import card_metadata, license_terms, license_text
from ..families.hybrids import DELTAS, HYBRIDS, PREFIX
from ..families.mamba2 import MAMBA2
from ..measure.profile import Profile
from ..planning.inits import INITS
from ..planning.plan import Plan

if TYPE_CHECKING:
    from ..checkpoint.checkpoint import Checkpoint

MARKER = "<!-- card written by palimpsa-surgery; remove this line to keep your own text -->"
PAPER = "https://arxiv.org/abs/2602.09075"
TAGS = ["palimpsa", "mamba2", "state-space", "metaplasticity"]
DELTA_TAGS = ["palimpsa", "gated-deltanet", "delta-rule", "metaplasticity"]
_UNTESTED = "This rule is palimpsa-surgery's own, in nobody's paper, and untested as to benefit."


@dataclass(frozen=True)
class CardFacts:
    """What the card says.

    Attributes:
        name: of the model: the folder's name, or the Hub id it is pushed to.
        plan: the surgery; None when the folder has none.
        profile: the source's figures, when it was measured.
        license: as in the source's card, None when it names none.
        base_model: a Hub id, None when the source is not on the Hub and names none.
        swapped: every swapped layer, those of an earlier surgery included.
        dtype: of the stored weights.
        family: name of the family of the model.
        mixed: whether some of its layers hold no mixer that can be swapped.
        remarks: what a user should know of how its source was run, sentences without a full stop.
        verification: lines of figures, such as `metaplasticity off: 2.1e-07`.
        terms: `license_name` and `license_link` of the source's card, where its license is `other`.
        training: how it was fine-tuned, a line for each fact.
        evaluation: the section on an evaluation.
        results: the same as metadata.
        picture: whether `profile.png` is in the folder.
    """

    name: str
    plan: Plan | None
    swapped: tuple[int, ...]
    dtype: str
    family: str = MAMBA2.name
    mixed: bool = False
    remarks: tuple[str, ...] = ()
    profile: Profile | None = None
    license: str | list[str] | None = None
    base_model: str | None = None
    verification: Mapping[str, str] = field(default_factory=dict)
    terms: Mapping[str, str] = field(default_factory=dict)
    training: tuple[str, ...] = ()
    evaluation: str = ""
    results: Sequence[EvalResult] = ()
    picture: bool = True


def checkpoint_facts(checkpoint: Checkpoint) -> dict[str, Any]:
    """The arguments of `CardFacts` that a checkpoint itself decides."""
    return {
        "family": checkpoint.family.name,
        "mixed": checkpoint.is_mixed,
        "remarks": checkpoint.family.remarks(checkpoint.config),
        "license": checkpoint.license,
        "base_model": checkpoint.base_model,
        "terms": license_terms(card_metadata(checkpoint.path)),
    }


def render_card(facts: CardFacts) -> str:
    """The text of README.md, front matter included."""
    sections = {
        "Swapped layers": _layers(facts),
        "Verification": _verification(facts) if facts.plan else "",
        "Training": "\n".join(f"- {line}" for line in facts.training),
        "Evaluation": facts.evaluation,
        "Use": _usage(facts),
        "Files": _files(facts),
        "License": _license(facts),
    }
    parts = [_front_matter(facts), MARKER, "", f"# {facts.name}", "", _summary(facts), ""]
    for title, text in sections.items():
        parts += [f"## {title}", "", text, ""] if text else []
    return "\n".join(parts)


def front_matter(name: str, results: Sequence[EvalResult] = (), **values: Any) -> str:
    """The YAML block that opens the card of a model of that name; values that are None are left out."""
    if results:
        values |= {"model_name": name.split("/")[-1], "eval_results": list(results)}
    return f"---\n{ModelCardData(**values).to_yaml()}\n---"


def _front_matter(facts: CardFacts) -> str:
    return front_matter(
        facts.name,
        facts.results,
        license=facts.license,
        **(facts.terms if facts.license else {}),
        base_model=facts.base_model,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=DELTA_TAGS if facts.family in DELTAS else TAGS,
    )


def _what(facts: CardFacts) -> str:
    if facts.family != MAMBA2.name:
        return f"hybrid {HYBRIDS[facts.family].plain} (`{facts.family}`)"
    return "hybrid Mamba2" if facts.mixed else "Mamba2"


def _summary(facts: CardFacts) -> str:
    if not facts.swapped:
        source = f", fine-tuned from `{facts.base_model}`" if facts.base_model else ""
        return (
            f"A {_what(facts)} language model{source}, stored in the layout of `{PREFIX}{facts.family}` with no layer "
            "swapped."
        )
    if facts.family in DELTAS:
        return _delta_summary(facts)
    count = len(facts.swapped)
    if facts.plan is None:
        return f"A {_what(facts)} language model with {counted(count, 'Palimpsa-M layer')} ([paper]({PAPER}))."
    source = facts.base_model or facts.plan.source
    layers, was = counted(count, "layer"), "was" if count == 1 else "were"
    groups = counted(facts.plan.gate.groups, "importance")
    return (
        f"A {_what(facts)} language model made from `{source}`, in which {layers} {was} replaced by Palimpsa-M: "
        f"a Mamba2 mixer whose synapses carry an importance that protects what was learned from being overwritten "
        f"([paper]({PAPER})). All weights of the source are kept; each swapped layer adds a low-rank importance gate "
        f"(rank {facts.plan.beta_rank}, {groups} per head), a scale and a prior per head."
    )


def _delta_summary(facts: CardFacts) -> str:
    layers = counted(len(facts.swapped), "layer")
    if facts.plan is None:
        return f"A {_what(facts)} language model with the metaplastic delta rule in {layers}. {_UNTESTED}"
    source = facts.base_model or facts.plan.source
    return (
        f"A {_what(facts)} language model made from `{source}`: in {layers} the gated delta rule became the "
        "metaplastic delta rule, whose keys carry an importance that protects what was learned from being overwritten. "
        f"{_UNTESTED} All weights of the source are kept; each of these layers adds a low-rank importance gate (rank "
        f"{facts.plan.beta_rank}, one importance per head and key), a scale and a prior per head."
    )


def _layers(facts: CardFacts) -> str:
    if not facts.swapped:
        return ""
    picture = ["", "![window and rate of every head of every layer](profile.png)"]
    start = ["", _start(facts)] if facts.plan else []
    return "\n".join([_layer_table(facts), *start, *(picture if facts.profile and facts.picture else [])])


def _layer_table(facts: CardFacts) -> str:
    if facts.profile is None or facts.plan is None:
        rule = f", listed by hand (rule: {facts.plan.rule})" if facts.plan else ""
        return f"Layers: {', '.join(map(str, facts.swapped))}{rule}."
    rows = ["| layer | window (tokens) | rate (nats per token) | why |", "| --- | --- | --- | --- |"]
    for layer in facts.swapped:
        figures = facts.profile.of(layer)
        why = facts.plan.reasons.get(layer, "" if layer in facts.plan.layers else "swapped before")
        rows.append(f"| {layer} | {figures.window:.4g} | {figures.rate:.4g} | {why} |")
    how = f"Rule: {facts.plan.rule}. Figures: {facts.profile.describe()}; means over heads, per head in `profile.json`."
    return "\n".join([*rows, "", how])


def _start(facts: CardFacts) -> str:
    meaning = INITS[facts.plan.init].meaning.format(strength=facts.plan.strength)
    return (
        f"Start: **{facts.plan.init}** ({meaning}), scale form `{facts.plan.beta_scale_form}`, seed {facts.plan.seed}."
    )


def _verification(facts: CardFacts) -> str:
    remarks = [part for remark in facts.remarks for part in ("", f"{remark}.")]
    if not facts.verification:
        return "\n".join(["Not verified at conversion (`--verify none`).", *remarks])
    rows = [f"| {what} | {figure} |" for what, figure in facts.verification.items()]
    head = "Of the written files against the source, fp32, relative L2, before any fine-tuning:"
    return "\n".join([head, "", "| | |", "| --- | --- |", *rows, *remarks])


def _usage(facts: CardFacts) -> str:
    return (
        "```python\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "\n"
        f'model = AutoModelForCausalLM.from_pretrained("{facts.name}", trust_remote_code=True)\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{facts.name}", trust_remote_code=True)\n'
        "```\n"
        "\n"
        "The repository carries its own code, so nothing else needs to be installed. With `palimpsa-surgery`\n"
        "installed, `import palimpsa_surgery.modeling` first and leave the flag out; its command line fine-tunes and\n"
        "evaluates the model too."
    )


def _files(facts: CardFacts) -> str:
    profile = ", `profile.json` and `profile.png` hold the forget rates of the source" if facts.profile else ""
    surgery = f"`plan.yaml` is the surgery as data, `surgery_report.json` accounts for every tensor{profile}. "
    kept = (*MIXER_FP32, *GATE_FP32) if facts.family == MAMBA2.name else GATE_FP32
    *names, last = (f"`{name}`" for name in kept)
    dtypes = f"Weights are stored in {facts.dtype}; {', '.join(names)} and {last} in float32."
    return (surgery if facts.plan else "") + dtypes


def _license(facts: CardFacts) -> str:
    if facts.license:
        name = f" ({facts.terms['license_name']})" if "license_name" in facts.terms else ""
        link = f" Its text: {facts.terms['license_link']}" if "license_link" in facts.terms else ""
        return f"{license_text(facts.license)}{name}, carried over from the source.{link}"
    return "The source's card names no license; its terms apply."


def is_own_card(text: str) -> bool:
    """Whether a README was written by this package and may be replaced."""
    return MARKER in text


def kept_readme(folder: str | Path) -> str | None:
    """The text of a README.md that a user wrote in `folder`, or None when there is none to keep."""
    path = Path(folder) / "README.md"
    if not path.is_file():
        return None
    text = path.read_text(encoding="utf-8", errors="replace")
    return None if is_own_card(text) else text
