"""What is believed of a network after synthetic traces of it."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geotrain.base import LinkUse
from geotrain.links import SHIFT_SAMPLES, LinkBook, Rate, with_sample

MB = 1_000_000


def use(src, dst, rate, nbytes=8 * MB, delay_s=None):
    return LinkUse(src, dst, nbytes, nbytes, nbytes / rate, delay_s)


def rate_of(book, src, dst, now_s=0.0):
    return {(e.src, e.dst): e for e in book.estimates([src, dst], now_s)}[src, dst].rate_bytes_per_s


@given(st.lists(st.floats(0.9, 1.1), min_size=1, max_size=60))
def test_noise_of_ten_percent_stays_within_the_noise(factors):
    rate = Rate()
    for step, factor in enumerate(factors):
        rate = with_sample(rate, factor * 5e6, float(step))
    assert 0.9 * 5e6 * (1 - 1e-9) <= rate.bytes_per_s <= 1.1 * 5e6 * (1 + 1e-9)
    assert rate.low <= 1.1 * 5e6
    assert rate.spread < 0.15


@given(st.floats(1e4, 1e9), st.sampled_from([0.1, 0.3, 3.0, 10.0]), st.booleans(), st.integers(0, 10**6))
def test_a_change_is_believed_after_three_samples(before, factor, limited, seed):
    noise, rate = random.Random(seed), Rate()
    for step in range(30):
        rate = with_sample(rate, before * noise.uniform(0.9, 1.1), float(step))
    for step in range(SHIFT_SAMPLES):
        rate = with_sample(rate, before * factor * noise.uniform(0.9, 1.1), 30.0 + step, limited)
    assert 0.89 <= rate.bytes_per_s / (before * factor) <= 1.11


def test_samples_that_fill_no_link_only_say_at_least():
    rate = with_sample(Rate(), 10e6, 0.0)
    assert with_sample(rate, 1e6, 1.0, limited=True).bytes_per_s == 10e6
    assert with_sample(rate, 30e6, 1.0, limited=True).bytes_per_s == 30e6
    assert with_sample(Rate(), 1e6, 0.0, limited=True).bytes_per_s == 1e6


def test_a_long_round_trip_makes_a_short_sample_limited():
    book = LinkBook()
    for seconds in (0.0, 10.0):
        uses = [use("a", "b", 12e6, 8 * MB, 0.1), use("b", "a", 12e6, 8 * MB, 0.1)]
        book.saw(uses, seconds, seconds + 10)
    assert rate_of(book, "a", "b") == 12e6  # 8 MB are 3.3 bandwidth-delay products: not enough
    book.saw([use("a", "b", 11e6, 8 * MB, 0.1)], 10.0, 20.0)
    assert rate_of(book, "a", "b") == 12e6
    book.saw([use("a", "b", 9e6, 80 * MB, 0.1)], 20.0, 30.0)
    assert rate_of(book, "a", "b") == 9e6


@given(
    st.floats(-1e4, 1e4),
    st.floats(0.001, 0.3),
    st.floats(0.001, 0.3),
    st.lists(st.tuples(st.floats(0, 0.5), st.floats(0, 0.5)), min_size=1, max_size=10),
)
def test_offsets_are_wrong_by_half_a_round_trip_at_most(offset, there_s, back_s, queues):
    """b's clock is `offset` ahead of a's; queues add to the delays now and then."""
    book = LinkBook()
    for out, back in [*queues, (0.0, 0.0)]:
        uses = [use("a", "b", 1e6, delay_s=there_s + out + offset), use("b", "a", 1e6, delay_s=back_s + back - offset)]
        book.saw(uses, 0.0, 100.0)
    assert abs(book.offsets(["a", "b"])["b"] - offset) <= abs(there_s - back_s) / 2 + 1e-6
    for estimate in book.estimates(["a", "b"], 0.0):
        assert abs(estimate.latency_s - (there_s + back_s) / 2) < 1e-6


def test_offsets_take_the_nearest_way():
    """a and c are far and uneven; b is near both."""
    book = LinkBook()
    ahead = {"a": 0.0, "b": 5.0, "c": -3.0}
    delays = {("a", "b"): 0.01, ("b", "a"): 0.01, ("b", "c"): 0.02, ("c", "b"): 0.02, ("a", "c"): 0.5, ("c", "a"): 0.1}
    book.saw([use(s, d, 1e6, delay_s=t + ahead[d] - ahead[s]) for (s, d), t in delays.items()], 0.0, 1e3)
    found = book.offsets(["a", "b", "c", "nobody"])
    assert {name: round(seconds, 9) for name, seconds in found.items()} == ahead


def survey(book, rates):
    for i, ((src, dst), rate) in enumerate(rates.items()):
        book.saw([use(src, dst, rate)], 100.0 * i, 100.0 * (i + 1), probe=True)


@given(st.floats(0.1, 0.7), st.lists(st.floats(0.95, 1.05), min_size=6, max_size=6))
def test_a_shared_uplink_is_found_and_the_links_keep_their_own_rates(part, jitter):
    """b and c could each get 10 MB/s from a; both together get `part` of 20."""
    book, cap = LinkBook(), 20e6 * part
    survey(book, {("a", "b"): 10e6, ("a", "c"): 10e6})
    for step, factor in enumerate(jitter):
        each = cap / 2 * factor
        uses = [use("a", "b", each, 5 * each), use("a", "c", each, 5 * each)]
        book.saw(uses, 1000 + 5.5 * step, 1005.5 + 5.5 * step)
    up, down = book.caps()
    assert abs(up["a"] / cap - 1) < 0.15
    assert not down
    assert rate_of(book, "a", "b") == rate_of(book, "a", "c") == 10e6


def test_a_shared_downlink_is_found():
    book = LinkBook()
    survey(book, {("b", "a"): 10e6, ("c", "a"): 10e6})
    for step in range(4):
        book.saw([use("b", "a", 3e6, 15e6), use("c", "a", 3e6, 15e6)], 1000 + 5 * step, 1005 + 5 * step)
    up, down = book.caps()
    assert not up and abs(down["a"] / 6e6 - 1) < 0.05


@given(st.floats(0.05, 0.6))
def test_one_link_that_gets_slow_is_not_taken_for_a_shared_end(factor):
    book = LinkBook()
    survey(book, {("a", "b"): 10e6, ("a", "c"): 10e6})
    for step in range(5):
        slow = 10e6 * factor
        book.saw([use("a", "b", slow, 5 * slow), use("a", "c", 10e6, 50e6)], 1000 + 5 * step, 1005 + 5 * step)
    assert book.caps() == ({}, {})
    assert abs(rate_of(book, "a", "b") / (10e6 * factor) - 1) < 0.1
    assert rate_of(book, "a", "c") == 10e6


def test_a_cap_that_is_exceeded_is_forgotten():
    book = LinkBook()
    survey(book, {("a", "b"): 10e6, ("a", "c"): 10e6})
    for step in range(4):
        book.saw([use("a", "b", 3e6, 15e6), use("a", "c", 3e6, 15e6)], 1000 + 5 * step, 1005 + 5 * step)
    assert book.caps()[0]
    book.saw([use("a", "b", 10e6, 50e6), use("a", "c", 10e6, 50e6)], 1020, 1025)
    assert book.caps() == ({}, {})


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 6), st.floats(0.001, 0.05), st.integers(0, 10**6))
def test_probes_stay_within_their_part_of_what_is_sent(peers, share, seed):
    noise, book = random.Random(seed), LinkBook()
    names = [f"p{i}" for i in range(peers)]
    sent = probed = 0
    for step in range(100):
        uses = [use(a, b, noise.uniform(1e6, 1e8)) for a, b in pairwise(names)]
        sent += sum(u.nbytes for u in uses)
        book.saw(uses, 10.0 * step, 10.0 * step + 10)
        for probe in book.probes(names, 10.0 * step + 10, share=share):
            probed += probe.nbytes
            book.saw([use(probe.src, probe.dst, 2e6, probe.nbytes)], 10.0 * step, 10.0 * step + 10, probe=True)
    assert probed <= share * sent


def test_probes_go_to_the_links_that_were_not_seen_for_longest_and_never_to_those_in_use():
    book = LinkBook()
    survey(book, {("c", "b"): 1e6, ("b", "c"): 1e6})
    book.saw([use("a", "b", 1e6, 3000 * MB)], 300.0, 400.0)
    wanted = [(p.src, p.dst) for p in book.probes(["a", "b", "c"], 400.0)]
    assert wanted == [("a", "c"), ("b", "a"), ("c", "a"), ("c", "b"), ("b", "c")]


def test_tests_that_could_not_wait_are_paid_by_later_probes():
    book = LinkBook()
    book.saw([use("a", "b", 1e6, 10 * MB)], 390.0, 400.0)
    assert len(book.probes("ab", 400.0)) == 1
    assert book.test(("b", "a")).nbytes == 64 << 10
    for sent, probes in ((5 * MB, 0), (10 * MB, 1)):
        book.saw([use("a", "b", 1e6, sent)], 400.0, 410.0)
        assert len(book.probes("ab", 410.0)) == probes


def test_links_that_may_have_changed_are_tried_again_at_once_within_the_budget():
    book = LinkBook()
    survey(book, {("c", "b"): 1e6, ("b", "c"): 1e6})
    book.saw([use("a", "b", 1e6, 100 * MB)], 390.0, 400.0)
    book.saw([use("a", "c", 1e6)], 399.0, 400.0, probe=True)
    wanted = [(p.src, p.dst) for p in book.probes(["a", "b", "c"], 400.0, {("a", "c")})]
    assert wanted[0] == ("a", "c") and len(wanted) > 1
    assert book.probes(["a", "b", "c"], 400.0, {("a", "c")}, share=0.001) == []


def test_a_short_frame_counts_among_those_that_tell_of_a_faster_link():
    rate = Rate()
    for at_s in (0.0, 1.0, 2.0, 3.0):
        rate = with_sample(rate, 1e6, at_s)
    for at_s, limited in ((4.0, True), (5.0, False), (6.0, False)):
        rate = with_sample(rate, 10e6, at_s, limited)
    assert rate.settled and rate.bytes_per_s == pytest.approx(10e6)


def test_a_link_is_in_doubt_until_it_is_measured_and_again_while_it_is_not_what_it_was():
    book = LinkBook()
    survey(book, {("a", "b"): 10e6})
    assert book.doubtful("ab", since_s=100.0) == {("b", "a")}
    assert book.doubtful("ab", since_s=101.0) == {("a", "b"), ("b", "a")}
    for at_s, doubted in ((101.0, True), (102.0, True), (103.0, False)):  # believed after three samples
        book.saw([use("a", "b", 1e6)], at_s - 1, at_s, probe=True)
        assert (("a", "b") in book.doubtful("ab", since_s=101.0)) == doubted


def test_a_first_frame_that_does_not_fill_a_link_leaves_it_in_doubt_and_the_next_is_longer():
    book = LinkBook()
    back = use("b", "a", 20e6, 80 * MB, 0.02)
    book.saw([back], 0.0, 5.0)
    book.saw([use("a", "b", 2e6, 64 << 10, 0.02)], 5.0, 6.0, probe=True)
    assert book.doubtful("ab", since_s=0.0) == {("a", "b")}
    assert book.test(("a", "b")).nbytes == 0.2 * MB
    book.saw([use("a", "b", 6e6, 0.2 * MB, 0.02)], 6.0, 7.0, probe=True)
    assert book.doubtful("ab", since_s=0.0) == frozenset() and rate_of(book, "a", "b") == 6e6


def test_unknown_pairs_are_guessed_from_their_ends_and_say_so():
    book = LinkBook()
    survey(book, {("a", "b"): 10e6, ("c", "b"): 2e6, ("b", "c"): 1e6})
    guess = next(e for e in book.estimates(["a", "b", "c"], 0.0) if (e.src, e.dst) == ("a", "c"))
    assert guess.guessed and guess.rate_bytes_per_s == 1e6  # what gets out of a, and what gets into c
    assert LinkBook().links(["a", "b"], 0.0) == []


def test_age_is_counted_from_the_last_sample():
    book = LinkBook()
    book.saw([use("a", "b", 1e6)], 0.0, 8.0)
    assert book.estimates(["a", "b"], 20.0)[0].age_s == 12.0
