"""Tickets: a careless paste still works, anything else says what to do."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geotrain.errors import TicketError
from geotrain.identity import Ticket, new_token, same_token

TICKET = Ticket(("127.0.0.1:4000", "[::1]:4000"), "run-1", bytes(range(16)))


def test_ticket_round_trips_through_a_careless_paste():
    text = str(TICKET)
    assert text.startswith("gt1-") and "=" not in text
    assert Ticket.parse(f"  {text[:30]}\n {text[30:]} ") == TICKET


@pytest.mark.parametrize(
    "text",
    ["", "hello", "gt1-", "gt1-!!!!", "gt1-AAAA", str(TICKET)[:-3], "gt1-" + "A" * 5000],
)
def test_broken_tickets_say_what_to_do(text):
    with pytest.raises(TicketError, match="copy"):
        Ticket.parse(text)


@settings(max_examples=300)
@given(st.integers(0, len(str(TICKET)) - 1), st.characters(codec="ascii"))
def test_one_wrong_character_is_noticed(position, character):
    text = str(TICKET)
    wrong = text[:position] + character + text[position + 1 :]
    if "".join(wrong.split()) == text:
        return
    try:
        assert Ticket.parse(wrong) == TICKET  # the last base64 character may carry unused bits
    except TicketError:
        pass


def test_a_ticket_of_another_version_is_refused():
    other = Ticket(TICKET.addresses, TICKET.run, TICKET.token, version=99)
    with pytest.raises(TicketError, match="version 99"):
        Ticket.parse(str(other))


def test_a_ticket_with_a_bad_address_is_refused():
    with pytest.raises(TicketError):
        Ticket.parse(str(Ticket(("nohost",), "r", bytes(16))))


def test_tokens():
    token = new_token()
    assert len(token) == 16 and token != new_token()
    assert same_token(token, bytes(token)) and not same_token(token, b"") and not same_token(b"x", token)
