"""What-if phrases: each changes what it says, and a wrong one is answered in one line."""

import pytest

from geotrain.base import Link, Peer
from geotrain.errors import ConfigError
from geotrain.whatif import what_if

MBIT = 1e6 / 8
PEERS = [
    Peer("attic", 1e12, 2**33, up_bytes_per_s=20 * MBIT, down_bytes_per_s=100 * MBIT),
    Peer("shed", 2e12, 2**34, up_bytes_per_s=50 * MBIT, down_bytes_per_s=80 * MBIT),
]
LINKS = [Link("attic", "shed", 20 * MBIT, 0.02), Link("shed", "attic", 5 * MBIT, 0.02)]


def change(text: str) -> tuple[dict[str, Peer], dict[tuple[str, str], Link]]:
    peers, links = what_if(text, PEERS, LINKS)
    return {p.name: p for p in peers}, {(link.src, link.dst): link for link in links}


def test_a_faster_uplink_lifts_the_links_that_it_held_back():
    peers, links = change("peer attic up 100")
    assert peers["attic"].up_bytes_per_s == 100 * MBIT
    assert links["attic", "shed"].rate_bytes_per_s == 80 * MBIT  # the shed's downlink is next
    assert links["shed", "attic"].rate_bytes_per_s == 5 * MBIT


def test_a_downlink_does_not_lift_a_link_that_is_slow_by_itself():
    peers, links = change("peer attic down 3; peer shed down 10")
    assert peers["attic"].down_bytes_per_s == 3 * MBIT
    assert links["shed", "attic"].rate_bytes_per_s == 3 * MBIT
    assert links["attic", "shed"].rate_bytes_per_s == 10 * MBIT
    assert change("peer attic down 200")[1]["shed", "attic"].rate_bytes_per_s == 5 * MBIT


def test_speed_memory_links_and_leaving():
    peers, links = change("peer shed speed x2.5; peer shed memory 4; link shed attic 40 7")
    assert peers["shed"].flops_per_s == 5e12
    assert peers["shed"].memory_bytes == 4 * 2**30
    assert links["shed", "attic"] == Link("shed", "attic", 40 * MBIT, 0.007)
    assert change("link shed attic 900")[1]["shed", "attic"] == Link("shed", "attic", 50 * MBIT, 0.02)
    peers, links = change("remove shed")
    assert [*peers] == ["attic"]
    assert not links


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("peer cellar up 100", "there is no peer 'cellar'; there are attic, shed"),
        ("peer attic up fast", "'fast' in"),
        ("peer attic up 0", "above 0"),
        ("peer attic speed 2", "is not understood; say"),
        ("link attic attic 5", "is not understood"),
        ("attic up 5", "is not understood"),
        ("remove nobody", "there is no peer"),
    ],
)
def test_a_wrong_phrase_is_one_line(text: str, says: str):
    with pytest.raises(ConfigError, match=says) as error:
        change(text)
    assert "\n" not in str(error.value)
