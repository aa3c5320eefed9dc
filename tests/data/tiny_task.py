"""The questions of tiny_task.yaml and tiny_text_task.yaml."""

import datasets

QUESTIONS = [
    ("The CREATE TABLE statement is used to create a new", [" table", " river", " cat"], 0),
    ("The SELECT statement is used to query the", [" moon", " database", " of"], 1),
    ("SQLite is a C", ["-language library", " sandwich", " zebra"], 0),
    ("If the index does not", [" purple", " exist", " exists exists"], 1),
    ("The return value of the", [" function", " and", " ("], 0),
    ("A transaction may be rolled", [" table", " the", " back"], 2),
]


def load(**_):
    """The questions as a data set with one split."""
    rows = [{"prompt": prompt, "endings": endings, "answer": answer} for prompt, endings, answer in QUESTIONS]
    return {"test": datasets.Dataset.from_list(rows)}
