"""Networks from TOML text: rates in bytes a second, delays in seconds, and one line for whatever is wrong."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geotrain.base import COORDINATOR, Link, Peer
from geotrain.errors import ConfigError
from geotrain.topology import TopologyPeer, parse, to_toml

HOME = Path(__file__).parents[2] / "peers" / "topologies" / "home.toml"

TWO = """
[[peer]]
name = "anna"
region = "north"
flops = 2e9
memory_gib = 0.5
up_mbit_per_s = 8
down_mbit_per_s = 80
duty = 0.5

[[peer]]
name = "ben"

[[link]]
src = "anna"
dst = "ben"
mbit_per_s = 4
latency_ms = 12.5
"""


def test_units_and_defaults() -> None:
    topology = parse(TWO)
    assert topology.peers == {
        "anna": TopologyPeer(2e9, 1 << 29, 1e6, 1e7, "north", 0.5),
        "ben": TopologyPeer(None, None, math.inf, math.inf, "", 1.0),
    }
    assert topology.links == [Link("anna", "ben", 5e5, 0.0125)]
    assert topology.link("ben", "anna") == Link("ben", "anna", 1e7, 0.0)


def test_the_narrowest_of_uplink_link_and_downlink_counts() -> None:
    topology = parse(TWO)
    assert topology.link("anna", "ben").rate_bytes_per_s == 5e5
    assert topology.link("ben", "anna").rate_bytes_per_s == 1e7
    assert topology.link(COORDINATOR, "anna").rate_bytes_per_s == 1e7
    assert topology.link(COORDINATOR, "ben").rate_bytes_per_s == math.inf


@given(st.integers(1, 6))
def test_take_keeps_the_first_peers_and_their_links(n: int) -> None:
    home = parse(HOME.read_text())
    taken = home.take(n)
    assert list(taken.peers) == list(home.peers)[:n]
    assert len(taken.links) == n * (n - 1) + n  # each other, and from the coordinator
    for link in taken.links:
        assert link in home.links and link == taken.link(link.src, link.dst)


@pytest.mark.parametrize("n", [0, 7, 100])
def test_take_refuses_what_there_is_not(n: int) -> None:
    with pytest.raises(ConfigError, match=f"has 6 peers, not {n}"):
        parse(HOME.read_text()).take(n)


PEER = '[[peer]]\nname = "anna"\n'
PAIR = PEER + '[[peer]]\nname = "ben"\n'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "it describes no peer; write a [[peer]] table"),
        ("peer = []", "it describes no peer"),
        ("[train]\nsteps = 3", "unknown key 'train'; known are peer, link"),
        ("[[peer]", "malformed"),
        ("[peer]\nname = 'anna'", "peer"),
        ("[[peer]]\nup_mbit_per_s = 3", "name is missing"),
        ("[[peer]]\nname = 'an na'", "letters"),
        ("[[peer]]\nname = 3", "name"),
        (PEER + "up_mbit = 3", "up_mbit_per_s"),
        (PEER + "up_mbit_per_s = 0", "up_mbit_per_s"),
        (PEER + "down_mbit_per_s = -1", "down_mbit_per_s"),
        (PEER + "up_mbit_per_s = nan", "up_mbit_per_s"),
        (PEER + "up_mbit_per_s = inf", "up_mbit_per_s"),
        (PEER + "up_mbit_per_s = 'fast'", "up_mbit_per_s"),
        (PEER + "duty = 1.5", "duty"),
        (PEER + "duty = 0", "duty"),
        (PEER + "memory_gib = 0", "memory_gib"),
        (PEER + PEER, "'anna' is there twice"),
        ('[[peer]]\nname = "coordinator"', "choose another"),
        (PAIR + "[[links]]\nsrc = 'anna'", "link"),
        (PAIR + "[[link]]\nsrc = 'anna'", "dst is missing"),
        (PAIR + "[[link]]\nsrc = 'anna'\ndst = 'carl'", "'carl'"),
        (PAIR + "[[link]]\nsrc = 'anna'\ndst = 'anna'", "itself"),
        (PAIR + "[[link]]\nsrc = 'anna'\ndst = 'ben'\n" * 2, "twice"),
        (PAIR + "[[link]]\nsrc = 'anna'\ndst = 'ben'\nlatency_ms = -1", "latency_ms"),
        (PAIR + "[[link]]\nsrc = 'anna'\ndst = 'ben'\nlatency = 1", "latency_ms"),
        (PAIR + "[[link]]\nsrc = 'anna'\ndst = 'ben'\nmbit_per_s = 0", "mbit_per_s"),
    ],
)
def test_one_line_says_what_is_wrong(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, "net.toml")
    line = str(caught.value)
    assert line.startswith("net.toml: ") and says in line and "\n" not in line


def test_what_is_written_is_read_back() -> None:
    peers = [Peer("anna", 2e9, 3 << 28, 1e6, math.inf, "north"), Peer("ben", 1e9, 1 << 30)]
    links = [Link("anna", "ben", 5e5, 0.02), Link("ben", "anna", math.inf, 0.0)]
    seen = parse(to_toml(peers, links))
    assert seen.peers == {
        "anna": TopologyPeer(2e9, 3 << 28, 1e6, math.inf, "north", 1.0),
        "ben": TopologyPeer(1e9, 1 << 30, math.inf, math.inf, "", 1.0),
    }
    assert seen.links == links


def test_home_is_four_unequal_peers_and_two_more_on_home_lines() -> None:
    home = parse(HOME.read_text())
    assert [peer.duty for peer in home.peers.values()][:4] == [1.0, 0.7, 0.5, 0.35]
    assert len(home.peers) == 6
    for src in home.peers:
        assert home.up_bytes_per_s(src) < home.down_bytes_per_s(src)
        for dst in home.peers:
            if src != dst:
                assert 20 <= home.link(src, dst).rate_bytes_per_s * 8 / 1e6 <= 100
                assert 0.005 <= home.link(src, dst).latency_s <= 0.040
        assert 0.005 <= home.link(COORDINATOR, src).latency_s <= 0.040
