"""Who gives whom what of the frozen weights."""

from geotrain.base import Link, TensorSpec
from geotrain.holdings import Holdings
from geotrain.protocol import Holder, NamedSpec

WANTED = [NamedSpec(name, TensorSpec((4,), "float32"), digest) for name, digest in (("a", "A"), ("b", "B"), ("c", ""))]
ADDRESSES = {name: f"{name}:1" for name in ("anna", "ben", "carl")}


def holders(book, links, addresses=ADDRESSES):
    return book.holders("anna", WANTED, addresses, [Link(src, "anna", rate, 0.0) for src, rate in links.items()])


def test_the_best_link_of_those_who_have_it():
    book = Holdings()
    book.has("ben", ["A", "B"])
    book.has("carl", ["B"])
    assert holders(book, {"ben": 1e6, "carl": 2e6}) == (Holder("ben:1", ("a",)), Holder("carl:1", ("b",)))
    assert holders(book, {"ben": 2e6, "carl": 1e6}) == (Holder("ben:1", ("a", "b")),)
    assert holders(book, {}) == (), "who is not known to be linked is not asked"
    assert holders(book, {"ben": 1e6}, {"anna": "anna:1"}) == (), "nor who is gone"


def test_what_a_peer_has_it_does_not_ask_for():
    book = Holdings()
    book.has("ben", ["A", "B"])
    book.has("anna", ["A"])
    assert holders(book, {"ben": 1e6}) == (Holder("ben:1", ("b",)),)


def test_a_faster_coordinator_gives_itself():
    book = Holdings()
    book.has("ben", ["A", "B"])
    book.served("anna", 10, 1e-6)
    assert holders(book, {"ben": 1e6}) != (), "a few bytes say nothing of a rate"
    book.served("carl", 8 << 20, 1.0)
    assert holders(book, {"ben": 1e6}) == (), "it is to others what it may be to this one"
    book.served("anna", 4 << 20, 8.0)
    assert holders(book, {"ben": 1e6}) == (Holder("ben:1", ("a", "b")),)
