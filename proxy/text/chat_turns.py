"""Other orders of a chat's turns, for chat templates that refuse or drop the order that a client sent.

All functions take messages in the form of chat templates, return new lists, and take time in proportion to the chat.
"""

from __future__ import annotations

from typing import Any

Message = dict[str, Any]

SYSTEM_ROLES = ("system", "developer")
_BETWEEN = "\n\n"
"""Separates the texts of turns that become one."""
_ACKNOWLEDGEMENT = "Understood."
"""Text of a turn of the assistant between a tool's result and a turn of the user, as Mistral's own clients send it."""


def is_system(message: Message) -> bool:
    return message["role"] in SYSTEM_ROLES


def with_one_system(messages: list[Message], role: str) -> list[Message]:
    """Returns the chat with the text of all system and developer turns in one turn at its beginning.

    role: of that turn. Later turns with images or video stay where they are, as turns of the user: the order of the
    media must not change.
    """
    moved = [
        each for i, each in enumerate(messages) if is_system(each) and (i == 0 or isinstance(each["content"], str))
    ]
    if not moved:
        return messages
    kept = {id(message) for message in moved}
    rest = (each for each in messages if id(each) not in kept)
    return [_joined(*moved) | {"role": role}, *(each | {"role": "user"} if is_system(each) else each for each in rest)]


def with_system_of_user(messages: list[Message]) -> list[Message]:
    """Returns the chat with its first turn, of the system, as the beginning of the user's first turn."""
    system = messages[0] | {"role": "user"}
    if len(messages) > 1 and messages[1]["role"] == "user":
        return [_joined(system, messages[1]), *messages[2:]]
    return [system, *messages[1:]]


def with_joined_turns(messages: list[Message]) -> list[Message]:
    """Returns the chat with consecutive turns of the user, and of the assistant, as one turn."""
    joined: list[Message] = []
    run: list[Message] = []
    for message in messages:
        role = message["role"]
        # What follows a call is no part of its turn.
        if run and (role not in ("user", "assistant") or role != run[-1]["role"] or "tool_calls" in run[-1]):
            joined.append(_joined(*run))
            run = []
        run.append(message)
    return [*joined, _joined(*run)] if run else joined


def without_empty_answers(messages: list[Message], keeps_last: bool) -> list[Message]:
    """Returns the chat without turns of the assistant that have neither content, calls nor reasoning.

    keeps_last: the last turn stays. A chat of nothing else stays too.
    """
    last = len(messages) - 1 if keeps_last else None
    changed = [
        message
        for index, message in enumerate(messages)
        if index == last
        or message["role"] != "assistant"
        or any(message.get(field) for field in ("content", "tool_calls", "reasoning"))
    ]
    return changed or messages


def with_text_in_thoughts(messages: list[Message]) -> list[Message]:
    """Returns the chat whose turns with calls have no text beside thinking: it becomes the end of the thinking."""
    changed = []
    for message in messages:
        text, thoughts = message["content"], message.get("reasoning")
        if "tool_calls" in message and isinstance(text, str) and text and thoughts:
            thoughts = f"{thoughts}{_BETWEEN}{text}"
            message = message | {"content": "", "reasoning": thoughts, "reasoning_content": thoughts}
        changed.append(message)
    return changed


def with_answers_to_results(messages: list[Message]) -> list[Message]:
    """Returns the chat with a turn of the assistant between results of tools and a turn of the user."""
    changed: list[Message] = []
    for message in messages:
        if message["role"] == "user" and changed and changed[-1]["role"] == "tool":
            changed.append({"role": "assistant", "content": _ACKNOWLEDGEMENT})
        changed.append(message)
    return changed


def with_results_behind_calls(messages: list[Message]) -> list[Message]:
    """Returns the chat with each result after the turn that has its call, and with the name of the tool.

    A result that names no earlier call stays where it is, and gets the name of the last one. Those with images or video
    stay too: the order of the media must not change.
    """
    places: list[list[Message]] = []  # a turn, and the results that belong behind it
    calls: dict[str | None, tuple[int, str]] = {}  # place and name of the latest call with each id
    last_name = None
    for message in messages:
        for call in message.get("tool_calls", ()):
            last_name = call["function"]["name"]
            if "id" in call:
                calls[call["id"]] = (len(places), last_name)
        if message["role"] != "tool" or not places:
            places.append([message])
            continue
        here = len(places) - 1
        place, name = calls.get(message.get("tool_call_id"), (here, last_name))
        named = message if name is None or "name" in message else message | {"name": name}
        places[place if isinstance(message["content"], str) else here].append(named)
    return [message for place in places for message in place]


def with_single_calls(messages: list[Message]) -> list[Message]:
    """Returns the chat with one call in each turn of the assistant, followed by the results of that call."""
    changed: list[Message] = []
    index = 0
    while index < len(messages):
        message = messages[index]
        index += 1
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            changed.append(message)
            continue
        numbers = {call["id"]: number for number, call in enumerate(calls) if "id" in call}
        results: list[list[Message]] = [[] for _ in calls]
        place = 0
        while index < len(messages) and messages[index]["role"] == "tool":
            result = messages[index]
            results[numbers.get(result.get("tool_call_id"), min(place, len(calls) - 1))].append(result)
            place += 1
            index += 1
        for number, call in enumerate(calls):
            turn = {"role": message["role"], "content": ""} if number else message
            changed += [turn | {"tool_calls": [call]}, *results[number]]
    return changed


def _joined(*turns: Message) -> Message:
    """Returns turns of one role as one turn, with the first one's name."""
    if len(turns) == 1:
        return turns[0]
    joined = dict(turns[-1]) | dict(turns[0])
    contents = [turn["content"] for turn in turns if turn["content"]]
    if all(isinstance(content, str) for content in contents):
        joined["content"] = _BETWEEN.join(contents)
    else:
        joined["content"] = [part for content in contents for part in _parts(content)]
    for field in ("reasoning", "reasoning_content", "thinking"):
        if given := [turn[field] for turn in turns if turn.get(field)]:
            joined[field] = _BETWEEN.join(given)
    if calls := [call for turn in turns for call in turn.get("tool_calls", ())]:
        joined["tool_calls"] = calls
    return joined


def _parts(content: str | list[Any]) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def with_parts(message: Message) -> Message:
    """Returns the message with content that is a list of parts."""
    return message | {"content": _parts(message["content"])}
