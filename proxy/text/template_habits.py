"""What a chat template takes and shows, found out by rendering small chats with it, and a chat in the forms to try.

Templates say in no other way what they support. Many raise an exception for an order of turns that clients send: a
second turn of the system or a late one (Qwen 3.5), any system (Gemma 2), two turns of the user one after another
(Mistral, Llama 2), two calls in one turn (Llama 3), ids of another form (Mistral). Others leave out without a word what
they do not expect (GPT-OSS, MiniMax M2).

The functions below `TemplateHabits` put turns into another order. They take messages in the form of chat templates,
return new lists, and take time in proportion to the chat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import pairwise, takewhile
from typing import Any

from tandem.proxy.text.prompt import Message
from tandem.proxy.text.tool_calls import with_other_arguments, with_short_call_ids

_WORD = "tandem"
_SHORT_ID, _OTHER_IDS = "Abcdefgh1", ("call_000000000000000000000000", "1")
"""An id that templates of the Mistral family take, and ids that one or another of them refuses."""
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Efforts of thinking that APIs have, from the lowest to the highest."""


class TemplateHabits:
    """Each question is answered when a chat first needs its answer, and the answer is kept."""

    def __init__(self, render: Callable[..., str]) -> None:
        """render: applies the template to messages, and to variables as keywords; may raise any exception."""
        self._apply = render
        self._shown: dict[tuple[str, ...], bool | None] = {}
        self._efforts: dict[str, str | None] = {}

    def forms(self, messages: list[Message], keeps_last: bool, is_own: bool) -> Iterator[list[Message]]:
        """Yields the chat in the forms to render, until the template takes one: six at most.

        The first is the chat as it is, except for what the template would leave out without a word. The second one has
        only the changes that the template was seen to need. Then come all changes of the order that small chats may
        not have shown to be needed, and other forms of the calls' arguments.
        keeps_last: the answer continues the last message. is_own: the template is the client's, who knows what it
        leaves out.
        """
        if not is_own:
            messages = self._with_taken_ids(messages)
            if any(self._shows(roles) is False for roles in _system_orders(messages)):
                messages = self._with_shown_system(messages, keeps_last)
            messages = self._with_shown_calls(messages, keeps_last)
        yield messages
        changed = self._with_taken_turns(self._with_taken_ids(messages) if is_own else messages, keeps_last)
        if changed != messages:
            yield changed
        if not keeps_last:
            ordered = with_joined_turns(with_results_behind_calls(changed))
            if ordered != changed:
                yield ordered
        if is_system(changed[0]) and not (keeps_last or any(message["role"] == "user" for message in changed)):
            yield with_system_of_user(changed)  # some need the user's turn only where there are tools
        yield from with_other_arguments(changed)

    def taken_effort(self, effort: str) -> str | None:
        """Returns the effort of thinking that the template takes and that is nearest; None if it takes none of them.

        Some raise an exception for efforts that clients send by default: Mistral's know only none and high.
        """
        if effort not in _EFFORTS:
            return effort
        if effort not in self._efforts:
            rank = _EFFORTS.index(effort)
            others = sorted(_EFFORTS[1:], key=lambda each: (abs(_EFFORTS.index(each) - rank), -_EFFORTS.index(each)))
            tried = [effort, *(others if rank else ())]  # no other effort than none stops the thinking
            chat = [{"role": "user"}]
            is_known = self._takes(chat)  # else every effort would seem to be refused
            taken = (each for each in tried if not is_known or self._takes(chat, reasoning_effort=each))
            self._efforts[effort] = next(taken, None)
        return self._efforts[effort]

    @cached_property
    def requires_parts(self) -> bool:
        """Whether content that is a string is left out, and a list of parts is shown."""
        message = {"role": "user", "content": _WORD}
        as_text, as_parts = self._render([message], as_parts=False), self._render([message], as_parts=True)
        return _WORD not in (as_text or "") and _WORD in (as_parts or "")

    @cached_property
    def requires_short_ids(self) -> bool:
        """Whether some ids of calls are refused, and those of nine letters and digits are taken."""
        return self._takes_call(_call([_SHORT_ID])) and not all(self._takes_call(_call([each])) for each in _OTHER_IDS)

    @cached_property
    def _refuses_parallel_calls(self) -> bool:
        return self._takes_call(_call([_SHORT_ID])) and not self._takes_call(_call([_SHORT_ID, "Abcdefgh2"]))

    @cached_property
    def _leaves_out_parallel_calls(self) -> bool:
        text = self._render(_call([_SHORT_ID, "Abcdefgh2"])) or ""
        return f"{_WORD}call0" in text and f"{_WORD}call1" not in text

    @cached_property
    def _leaves_out_late_results(self) -> bool:
        """Whether it shows results only directly behind their call, and no others."""
        [user, call, result] = _call([_SHORT_ID])
        return self._shows_last([user, call, result]) is True and self._shows_last([user, call, user, result]) is False

    @cached_property
    def _shows_results_of_functions(self) -> bool:
        """Whether the role is known that results had before calls had ids."""
        [user, call, result] = _call([_SHORT_ID])
        return self._shows_last([user, call, result | {"role": "function"}]) is True

    @cached_property
    def _refuses_empty_answers(self) -> bool:
        user, assistant = {"role": "user"}, {"role": "assistant"}
        chat, with_empty = [user, assistant, user], [user, assistant | {"content": ""}, user]
        return self._takes(chat) and not self._takes(with_empty)

    @cached_property
    def _refuses_text_beside_thoughts(self) -> bool:
        [user, call, result] = _call([_SHORT_ID])
        thoughts = {"reasoning": _WORD, "reasoning_content": _WORD}
        takes_each = self._takes_call([user, call | thoughts, result])
        return takes_each and not self._takes_call([user, call | thoughts | {"content": _WORD}, result])

    @cached_property
    def _refuses_user_after_result(self) -> bool:
        chat = _call([_SHORT_ID])
        return self._takes_call(chat) and not self._takes_call([*chat, {"role": "user"}])

    @cached_property
    def _refuses_repeated_roles(self) -> bool:
        user, assistant = {"role": "user"}, {"role": "assistant"}
        return (self._takes([user]) and not self._takes([user, user])) or (
            self._takes([user, assistant, user]) and not self._takes([user, assistant, assistant, user])
        )

    def _with_taken_ids(self, messages: list[Message]) -> list[Message]:
        has_ids = any("tool_calls" in message or message["role"] == "tool" for message in messages)
        return with_short_call_ids(messages) if has_ids and self.requires_short_ids else messages

    def _with_shown_calls(self, messages: list[Message], keeps_last: bool) -> list[Message]:
        """Returns the chat with its calls and results in the form in which the template leaves none of them out."""
        if any(each["role"] == "function" for each in messages) and not self._shows_results_of_functions:
            messages = [each | {"role": "tool"} if each["role"] == "function" else each for each in messages]
        if any(len(each.get("tool_calls", ())) > 1 for each in messages) and self._leaves_out_parallel_calls:
            messages = with_single_calls(messages)
        if not keeps_last and _has_late_results(messages) and self._leaves_out_late_results:
            messages = with_results_behind_calls(messages)
        return messages

    def _with_taken_turns(self, messages: list[Message], keeps_last: bool) -> list[Message]:
        if not all(self._shows(roles) for roles in _system_orders(messages)):
            messages = self._with_shown_system(messages, keeps_last)
        if self._lacks_user(messages) and not (keeps_last and len(messages) == 1):
            messages = with_system_of_user(messages)
        if not all(message["content"] for message in messages) and self._refuses_empty_answers:
            messages = without_empty_answers(messages, keeps_last)
        if (
            any("tool_calls" in each and "reasoning" in each for each in messages)
            and self._refuses_text_beside_thoughts
        ):
            messages = with_text_in_thoughts(messages)
        if any(len(message.get("tool_calls", ())) > 1 for message in messages) and self._refuses_parallel_calls:
            messages = with_single_calls(messages)
        if any(message["role"] == "tool" for message in messages) and self._refuses_user_after_result:
            messages = with_answers_to_results(messages)
        return with_joined_turns(messages) if self._refuses_repeated_roles else messages

    def _lacks_user(self, messages: list[Message]) -> bool:
        """Returns whether the template demands a turn of the user, or demands it before those of the assistant."""
        system, assistant, user = {"role": "system"}, {"role": "assistant"}, {"role": "user"}
        if not is_system(messages[0]) or not self._takes([system, user]):
            return False
        roles = [message["role"] for message in messages]
        return ("user" not in roles and not self._takes([system])) or (
            roles[1:2] == ["assistant"] and not self._takes([system, assistant, user])
        )

    def _with_shown_system(self, messages: list[Message], keeps_last: bool) -> list[Message]:
        """Returns the chat with its system turns where the template shows them."""
        roles = {message["role"] for message in messages if is_system(message)}
        if not roles or (keeps_last and is_system(messages[-1])):
            return messages
        role = "developer" if roles == {"developer"} and self._shows(("developer", "user")) else "system"
        changed = with_one_system(messages, role)
        is_alone = all(is_system(message) for message in changed)
        if is_system(changed[0]) and not self._shows((role,) if is_alone else (role, "user")):
            changed = with_system_of_user(changed)
        return changed

    def _shows(self, roles: tuple[str, ...]) -> bool | None:
        """Returns whether the template shows the system turns of a chat with these roles; None if it refuses it."""
        if roles not in self._shown:
            text = self._render([{"role": role} for role in roles])
            words = [f"{_WORD}{number}" for number, role in enumerate(roles) if role in SYSTEM_ROLES]
            self._shown[roles] = None if text is None else all(word in text for word in words)
        return self._shown[roles]

    def _shows_last(self, messages: list[Message]) -> bool | None:
        """Returns whether the template shows the last turn; None if it refuses the chat."""
        text = self._render(messages)
        return None if text is None else f"{_WORD}{len(messages) - 1}" in text

    def _takes(self, messages: list[Message], **variables: Any) -> bool:
        return self._render(messages, **variables) is not None

    def _takes_call(self, messages: list[Message]) -> bool:
        return self._takes(messages) or any(self._takes(others) for others in with_other_arguments(messages))

    def _render(self, messages: list[Message], as_parts: bool | None = None, **variables: Any) -> str | None:
        """Returns None if the template refuses the messages. Messages without content get words that differ."""
        messages = [{"content": f"{_WORD}{number}"} | message for number, message in enumerate(messages)]
        if self.requires_parts if as_parts is None else as_parts:
            messages = [with_parts(message) for message in messages]
        try:
            return self._apply(messages, **variables)
        except Exception:  # any error of the template
            return None


def _has_late_results(messages: list[Message]) -> bool:
    """Returns whether a turn stands between a call and a result."""
    return any(
        after["role"] == "tool" and before["role"] != "tool" and "tool_calls" not in before
        for before, after in pairwise(messages)
    )


def _system_orders(messages: list[Message]) -> Iterator[tuple[str, ...]]:
    """Yields short chats, as their roles, with system turns where these messages have them."""
    leading = [message["role"] for message in takewhile(is_system, messages)]
    later = next((each["role"] for each in messages[len(leading) :] if is_system(each)), None)
    begin = tuple(leading[:2])
    if later is not None:
        yield (*begin, "user", later)
        yield (*begin, "user", "assistant", later, "user")
    elif begin:
        yield begin if len(leading) == len(messages) else (*begin, "user")


def _call(ids: list[str]) -> list[dict[str, Any]]:
    """Returns a chat with calls that have these ids, and their results."""
    names = [f"{_WORD}call{number}" for number in range(len(ids))]
    calls = [
        {"id": each, "type": "function", "function": {"name": name, "arguments": {}}}
        for each, name in zip(ids, names, strict=True)
    ]
    results = [{"role": "tool", "name": name, "tool_call_id": each} for each, name in zip(ids, names, strict=True)]
    return [{"role": "user"}, {"role": "assistant", "content": "", "tool_calls": calls}, *results]


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
