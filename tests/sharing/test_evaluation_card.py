"""What a card shows of an evaluation: a table that stays short, and whether the text was held out."""

import pytest
from palimpsa_surgery.recipes.evaluation.report import EvalReport, SeenText, seen_sentence
from palimpsa_surgery.sharing.evaluation_card import card_evaluation

SEEN = SeenText(name="a.jsonl", documents=3, of=9)


def row(name, value=1.0, better="lower", **at):
    figure = {"value": value, "error": 0.1}
    return {"name": name, "at": at, "unit": "nats", "better": better, "samples": 3, "model": figure}


def shown(suites, seen=None, against=None):
    def model(name, seen):
        sizes = {"layout": "mamba_ssm", "parameters": 7, "dtype": "float32", "palimpsa_layers": []}
        return {"name": name, "fingerprint": "0" * 64, "seen": seen, **sizes}

    report = EvalReport(
        version="0",
        model=model("m", seen),
        against=against and model(*against),
        data={"name": "text.jsonl", "tokens": 9, "tokenizer": "m"},
        device="cpu",
        suites={name: {"rows": rows} for name, rows in suites.items()},
    )
    return card_evaluation(report)


LENGTHS = (512, 1024, 2048)
MANY = {
    "loss": [row(name, 2.5, length=length) for length in LENGTHS for name in ("loss", "perplexity")],
    "positions": [row("loss", start=2**i) for i in range(12)],
    "recall": [row("accuracy", 0.5, "higher", pairs=p, distance=d) for p in (4, 16) for d in (0, *LENGTHS)],
    "needle": [row(name, depth=d, length=n) for name in ("accuracy", "key loss") for d in (0, 1) for n in LENGTHS],
    "importance": [row("head spread", layer=layer) for layer in range(30)],
    "speed": [row("decode", 100.0, "higher")],
    "lm_eval": [row("arc_easy acc", 0.25, "higher"), row("lambada perplexity", 9.0)],
}


def body(figures):
    return [line.split(" | ") for line in figures.table().splitlines() if line.startswith("| ")][2:]


def test_a_long_table_is_cut_to_what_stands_for_each_measurement():
    figures = shown(MANY)
    rows = body(figures)
    assert len(rows) == 15
    assert [cells[1] for cells in rows[:2]] == ["arc_easy acc", "lambada perplexity"]
    found = {(cells[0].removeprefix("| "), cells[1]) for cells in rows}
    assert found == {(s, r["name"]) for s, made in MANY.items() for r in made if s != "importance"}, "one of each"
    assert any("length 2,048" in cells[2] for cells in rows if cells[0] == "| loss")
    assert "These are 15 of 41 rows; [eval.json](eval.json) has them all." in figures.table()


def test_a_short_table_is_whole():
    figures = shown({"loss": MANY["loss"]})
    assert len(body(figures)) == 6
    assert "[eval.json]" not in figures.table()


def test_the_metadata_has_every_loss_and_benchmark_and_what_the_table_shows():
    figures = shown(MANY)
    assert {result.dataset_name for result in figures.results()} == {"text.jsonl", "arc_easy", "lambada"}
    names = [result.metric_name for result in figures.results()]
    for length in ("512", "1,024", "2,048"):
        assert {f"loss (length {length})", f"perplexity (length {length})"} <= set(names)
    assert len(names) < 25
    assert not any("decode" in name for name in names)


@pytest.mark.parametrize(
    ("documents", "of", "text"),
    [
        (1, 1, "the only document of the text is in a.jsonl, which m was trained on"),
        (9, 9, "all 9 documents of the text are in a.jsonl, which m was trained on"),
        (1, 9, "1 of the 9 documents of the text is in a.jsonl, which m was trained on"),
        (3, 9, "3 of the 9 documents of the text are in a.jsonl, which m was trained on"),
        (None, 9, "the text has the name of the one that m was trained on (a.jsonl), which was not here to compare"),
    ],
)
def test_what_was_trained_on_is_a_sentence(documents, of, text):
    assert seen_sentence(SeenText(name="a.jsonl", documents=documents, of=of), "m") == text


def test_a_card_says_when_the_text_was_trained_on():
    table = shown({"loss": MANY["loss"]}, SEEN, ("b", SEEN)).table()
    for subject in ("this model", "the other model"):
        assert (
            f"**Not held out:** 3 of the 9 documents of the text are in a.jsonl, which {subject} was trained" in table
        )
    assert "Not held out" not in shown({"loss": MANY["loss"]}, None, ("b", None)).table()
