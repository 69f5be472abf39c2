"""The evaluation sets of `make eval-published`, and its verdict."""

from __future__ import annotations

from benchmarks.quality import __main__ as quality
from benchmarks.quality import data

SOURCE = '''
def shortest_path(graph):
    """Compute the shortest path between two nodes.

    {body}

    Parameters
    ----------
    graph : a graph

    >>> shortest_path(1)
    """

def short():
    """Return."""

def _private():
    """Compute the shortest path between two nodes.

    {body}
    """
'''


def test_docstring_becomes_its_first_paragraph_and_the_rest_without_doctests() -> None:
    body = " ".join(["Nodes that cannot be reached raise an error."] * 6)
    ((name, (summary, rest)),) = data.split_docstrings(SOURCE.replace("{body}", body))
    assert name == "shortest_path"
    assert summary == "Compute the shortest path between two nodes."
    assert rest == f"{body} Parameters graph : a graph"


def test_duplicate_texts_are_not_known_items() -> None:
    found = [
        ("a", "same", "one"),
        ("b", "same", "two"),
        ("c", "three", "four"),
        ("d", "five", "four"),
        ("e", "six", "seven"),
    ]
    documents, queries, judgements = data.known_items(found)
    assert documents == {"e": "seven"}
    assert queries == {"query e": "six"}
    assert judgements == {"query e": {"e": 1}}


def test_grades_are_the_steps_of_the_scale_that_people_used() -> None:
    assert [data.grade(similarity) for similarity in (0.2, 0.26, 0.4, 0.52, 0.8, 1.0)] == [
        0,
        0,
        1,
        2,
        3,
        4,
    ]


def test_format_beyond_the_bound_is_named() -> None:
    rows = [
        {"model": f"M/{form}", "nDCG@10": value}
        for form, value in (("float32", 0.5), ("bfloat16", 0.4985), ("int8", 0.503))
    ]
    (miss,) = quality.differences("lee", rows)
    assert miss == "lee: nDCG@10 of M/int8 is +0.0030 of float32's, the bound is 0.002"
