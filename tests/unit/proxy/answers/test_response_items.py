"""Items of answers of the Responses API, and the events that make them."""

from __future__ import annotations

import time

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tandem.proxy.answers.messages import encode_event
from tandem.proxy.answers.responses import MAX_SEPARATE_ITEMS, ItemWriter
from tandem.proxy.api.responses_api.responses_answer import (
    ArgumentsDone,
    ArgumentsPiece,
    FunctionCallItem,
    ItemAdded,
    ItemDone,
    OutputMessage,
    OutputTextPiece,
    ReasoningItem,
    ReasoningPiece,
)
from tandem.proxy.parsers.parsed import Parsed

words = st.text(max_size=5)
pieces = st.lists(
    st.one_of(st.builds(lambda w: Parsed(reasoning=w), words), st.builds(lambda w: Parsed(content=w), words)),
    max_size=6,
)


@given(before=pieces, num_calls=st.integers(0, 3))
def test_events_of_items_lose_nothing(before: list[Parsed], num_calls: int) -> None:
    parts = list(before)
    for i in range(num_calls):
        parts += [Parsed(names={i: f"f{i}"}, arguments={i: '{"n": '}), Parsed(arguments={i: f"{i}}}"})]
    writer = ItemWriter()
    events = []
    for event in (event for part in parts for event in writer.push(part)):
        encode_event(event)
        events.append(msgspec.json.decode(msgspec.json.encode(event), type=type(event)))  # as it was then
    events += list(writer.end("incomplete"))
    added = [event.output_index for event in events if isinstance(event, ItemAdded)]
    assert added == list(range(len(writer.items))) == [e.output_index for e in events if isinstance(e, ItemDone)]
    assert [item.status for item in writer.items] == ["completed"] * (len(added) - 1) + ["incomplete"] * bool(added)
    for index, item in enumerate(writer.items):
        own = [event for event in events if getattr(event, "output_index", -1) == index]
        match item:
            case FunctionCallItem():
                assert "".join(e.delta for e in own if isinstance(e, ArgumentsPiece)) == item.arguments
                assert [e.arguments for e in own if isinstance(e, ArgumentsDone)] == [item.arguments]
            case OutputMessage():
                assert "".join(e.delta for e in own if isinstance(e, OutputTextPiece)) == item.content[0].text
            case ReasoningItem():
                assert "".join(e.delta for e in own if isinstance(e, ReasoningPiece)) == item.content[0].text
    texts = [item.content[0].text for item in writer.items if isinstance(item, OutputMessage)]
    assert "".join(texts) == "".join(part.content for part in before)
    assert sum(isinstance(item, FunctionCallItem) for item in writer.items) == num_calls


def test_an_answer_that_alternates_between_thinking_and_text_has_few_items() -> None:
    writer = ItemWriter()
    parts = [part for i in range(2_000) for part in (Parsed(reasoning=f"{i} "), Parsed(content=f"{i} "))]
    parts.insert(3_000, Parsed(names={0: "f"}, arguments={0: "{}"}))
    events = [event for part in parts for event in writer.push(part)] + list(writer.end())
    assert sum(isinstance(event, ItemAdded) for event in events) == len(writer.items) == MAX_SEPARATE_ITEMS + 2
    written = "".join(event.delta for event in events if isinstance(event, (OutputTextPiece, ReasoningPiece)))
    kept = "".join(i.content[0].text for i in writer.items if isinstance(i, (OutputMessage, ReasoningItem)))
    assert kept == written == "".join(f"{i} {i} " for i in range(2_000))


def test_a_long_item_takes_time_linear_in_its_length() -> None:
    def cpu_s(num_pieces: int) -> float:
        writer, piece = ItemWriter(), Parsed(content="a few words, ")
        began_at = time.process_time()
        for _ in range(num_pieces):
            for _ in writer.push(piece):
                pass
        list(writer.end())
        [item] = writer.items
        assert isinstance(item, OutputMessage) and len(item.content[0].text) == num_pieces * len(piece.content)
        return time.process_time() - began_at

    assert cpu_s(160_000) < 40 * cpu_s(16_000)
