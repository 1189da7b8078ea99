"""Grammars in processes: one that is slow, crashes or is one of too many affects only its own sequences."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tandem.engine.batch import Sample
from tandem.engine.sampling import grammar as grammar_module
from tandem.engine.sampling import grammars as grammars_module
from tandem.engine.sampling.grammar import GrammarState
from tandem.engine.sampling.grammar_mask import StepMask, compute_masks
from tandem.engine.sampling.grammar_messages import LoadTokenizer
from tandem.engine.sampling.grammar_process import MAX_MEMORY_BYTES
from tandem.engine.sampling.grammars import CompileQueue, Grammars, GrammarServer
from tandem.protocol.messages.grammar import COMPILE_STACK_BYTES
from tandem.protocol.messages.sampling import SamplingParams
from tandem.runtime.errors import InternalError, InvalidRequest, Overloaded
from tandem.runtime.processes.forked_process import ForkServer
from tests.support.garbage import frames_in, kept_garbage
from tests.support.hostile_grammars import CHAINS, ambiguous
from tests.unit.engine.sampling.small_grammars import BPE, END, VOCAB_SIZE, grammar_of

A, B, C = (BPE.encode(letter).ids[0] for letter in "abc")


@pytest.fixture
def server() -> Iterator[GrammarServer]:
    server = GrammarServer(LoadTokenizer(BPE.to_str().encode(), VOCAB_SIZE, END))
    yield server
    server.close()


def step(*sequences: tuple[GrammarState, list[int]]) -> StepMask:
    samples = [Sample(SamplingParams(), output_token_ids=output, grammar=state) for state, output in sequences]
    return compute_masks(samples, list(range(len(samples))))


def allows(mask: StepMask, row: int, token_id: int) -> bool:
    bits = mask.bits[mask.mask_rows[mask.rows.index(row)]]
    return bool(bits[token_id >> 3] >> (token_id & 7) & 1)


def children(server: GrammarServer) -> list[int]:
    """Returns the processes of its grammars, which are children of this process and in the fork server's session."""
    found: list[int] = []
    for thread in Path("/proc/self/task").iterdir():
        found += map(int, (thread / "children").read_text().split())
    session = server_of(server).pid
    return [pid for pid in found if pid != session and is_in_session(pid, session)]


def is_in_session(pid: int, session: int) -> bool:
    try:
        return os.getsid(pid) == session and bool(Path(f"/proc/{pid}/cmdline").read_bytes())  # else it is a zombie
    except OSError:
        return False


def server_of(server: GrammarServer) -> ForkServer:
    assert server._server._server is not None
    return server._server._server


def kill(server: ForkServer) -> None:
    os.kill(server.pid, signal.SIGKILL)
    os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)


def wait_for_children(server: GrammarServer, number: int) -> None:
    deadline = time.monotonic() + 10
    while len(children(server)) != number:
        assert time.monotonic() < deadline, children(server)
        time.sleep(0.01)


RIGHT_RECURSION = "start: " + " | ".join(f"s{i}" for i in range(300)) + "\n" + "\n".join(
    f's{i}: "a" s{i} | "b"' for i in range(300)
)  # fmt: skip


@pytest.mark.parametrize(("text", "output"), [(ambiguous(30_000), []), (RIGHT_RECURSION, [A] * 500)])
def test_a_grammar_whose_masks_take_seconds_ends_only_its_own_sequence(
    server: GrammarServer, text: str, output: list[int]
) -> None:
    slow, fine = grammar_of(server, text).new_state({END}), grammar_of(server, 'start: "ab" "c"?').new_state({END})
    begun = time.monotonic()
    mask = step((slow, output), (fine, [A]))
    assert time.monotonic() - begun < grammar_module.MASKS_TIMEOUT_S + 5
    assert set(mask.errors) == {0} and "too complex" in mask.errors[0].message
    assert allows(mask, 1, B) and not allows(mask, 1, C)
    begun = time.process_time()
    assert allows(step((fine, [A, B])), 0, C)
    assert time.process_time() - begun < 0.1  # nothing goes on in this process


def test_other_sequences_of_a_grammar_continue_in_a_new_process(server: GrammarServer) -> None:
    grammar = grammar_of(server, ambiguous(30_000).replace("start:", 'start: "b" "a" | "c" "c" "c"'))
    slow, first, last = (grammar.new_state({END}) for _ in range(3))
    mask = step((first, []), (slow, [C, C]), (last, []))
    assert set(mask.errors) == {1} and mask.errors[1].code == "invalid_request"
    assert allows(mask, 0, B)
    if 2 in mask.late:  # on a loaded machine the time of the step has passed
        mask = step((first, []), (first, []), (last, []))
    assert allows(mask, 2, B)
    again = step((first, [B]), (last, []))
    assert allows(again, 0, A) and not allows(again, 0, B) and allows(again, 1, B)


def test_sequences_whose_masks_do_not_fit_skip_the_step_and_go_first_in_the_next(server: GrammarServer) -> None:
    """60 sequences of an ambiguous grammar kept a step waiting for more than a second."""
    grammar = grammar_of(server, ambiguous(600))
    states = [grammar.new_state({END}, client="attacker") for _ in range(60)]
    other = grammar_of(server, 'start: "ab"').new_state({END}, client="tenant")
    samples = [
        Sample(SamplingParams(), output_token_ids=[A] * number, grammar=each) for number, each in enumerate(states)
    ]
    samples.append(Sample(SamplingParams(), grammar=other))
    rows = list(range(len(samples)))
    has_mask: set[int] = set()
    for _ in range(len(samples)):
        budgets_s = {"attacker": 0.02, "tenant": 0.02}
        mask = compute_masks(samples, rows, budgets_s=budgets_s)
        assert not mask.errors and set(mask.rows) | mask.late == set(rows) and not set(mask.rows) & mask.late
        assert 60 in mask.rows, "the other client is not late"
        slowest_s = max(each._mask_s or 0.0 for each in states)
        assert mask.cpu_s["attacker"] <= 0.02 + slowest_s + 0.005
        new = set(mask.rows) - {60}
        assert new and (new.isdisjoint(has_mask) or has_mask >= set(range(60))), "each gets a mask before one gets two"
        has_mask |= new
    assert has_mask == set(range(60))
    assert set(compute_masks(samples, rows, budgets_s={"attacker": 0.0, "tenant": 0.02}).rows) == {60}


def test_tokens_earn_the_time_of_long_answers(server: GrammarServer) -> None:
    """A sequence may take as long as it likes in all."""
    state = grammar_of(server, "start: /a{30000}/").new_state({END})
    for length in range(0, 200, 10):
        assert allows(step((state, [A] * length)), 0, A)


def test_a_process_that_is_killed_is_replaced(server: GrammarServer) -> None:
    grammar = grammar_of(server, "start: /[ab]c*/")
    state = grammar.new_state({END})
    assert allows(step((state, [])), 0, A)
    for pid in children(server):
        os.kill(pid, signal.SIGKILL)
    wait_for_children(server, 0)
    assert set(step((state, [A])).errors) == {0}
    other = grammar.new_state({END})
    assert allows(step((other, [A])), 0, C)


def test_a_process_has_little_memory(server: GrammarServer) -> None:
    grammar = grammar_of(server, 'start: "ab"')
    limits = Path(f"/proc/{children(server)[0]}/limits").read_text().splitlines()
    max_bytes = int(next(line for line in limits if line.startswith("Max data size")).split()[3])
    assert max_bytes < MAX_MEMORY_BYTES + COMPILE_STACK_BYTES + (256 << 20), "the tokeniser takes less"
    del grammar


def test_a_step_waits_no_longer_for_a_server_that_does_not_start(
    server: GrammarServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starting the process that loads the tokeniser again had a limit of its own, of a minute."""
    state = grammar_of(server, 'start: "ab" "c"').new_state({END})
    step((state, []))
    hangs = tmp_path / "hangs"
    hangs.write_text("#!/bin/sh\nexec sleep 60\n")
    hangs.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(hangs))
    large = LoadTokenizer(bytes(16 << 20), VOCAB_SIZE, END)  # more than a socket holds
    monkeypatch.setattr(server, "_config", msgspec.msgpack.encode(large))
    kill(server_of(server))
    begun = time.monotonic()
    sample = Sample(SamplingParams(), output_token_ids=[A], grammar=state)
    assert not compute_masks([sample], [0]).errors, "the grammar's process goes on without the server"
    for pid in children(server):
        os.kill(pid, signal.SIGKILL)
    masks = [compute_masks([sample], [0], timeout_s=0.5) for _ in range(2)]
    assert masks[0].errors and masks[1].errors[0].code == "internal_error"
    assert time.monotonic() - begun < 30


def test_a_process_ends_with_its_grammar(server: GrammarServer) -> None:
    grammar = grammar_of(server, "start: /[ab]c*/")
    state = grammar.new_state({END})
    step((state, []))
    assert len(children(server)) == 1
    del grammar, state
    wait_for_children(server, 0)


def test_a_closed_server_starts_no_other_process(server: GrammarServer) -> None:
    """Compilations that were still queued when a worker ended started it again, and left it behind."""
    process = server_of(server)
    server.close()
    with pytest.raises(InternalError, match="the worker ends"):
        server.open(5.0)
    assert not Path(f"/proc/{process.pid}").exists()


def test_ended_sequences_are_forgotten(server: GrammarServer) -> None:
    grammar = grammar_of(server, 'start: "ab"')
    step((grammar.new_state({END}), []))
    assert len(grammar.ended_state_ids) == 1
    assert not step((grammar.new_state({END}), [A])).errors


def test_grammars_are_served_after_their_server_was_killed(noise_model: Any) -> None:
    grammars = Grammars(str(noise_model), 2048, lambda: None)
    try:
        first = grammars.get('start: "a"')
        assert first is not None
        first.process()
        server = grammars._server.result()
        kill(server_of(server))
        second = grammars.get('start: "b"')
        assert second is not None and not step((second.new_state({0}), [])).errors
    finally:
        grammars.close()


SLOW_TO_COMPILE = 'start: %json {"allOf": [' + ",".join(
    f'{{"type": "string", "pattern": "a{i}"}}' for i in range(60)
) + "]}"  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL, None], ids=["SIGSEGV", "SIGKILL", "stack"])
def test_a_grammar_whose_compilation_ends_its_process_costs_no_other(
    noise_model: Any, number: signal.Signals | None
) -> None:
    """A chain of 45 KB ended the worker three times for each request. number: signal to send; None overflows."""
    grammars = Grammars(str(noise_model), 2048, lambda: None)
    try:
        before = grammars.get('start: "a" "b"', "other")
        assert before is not None and not step((before.new_state({0}), [])).errors
        server = grammars._server.result()
        known, before_pid = children(server), server_of(server).pid
        lost = grammars.get(SLOW_TO_COMPILE if number is not None else CHAINS["rules"](200_000), "attacker")
        assert lost is not None
        if number is not None:
            wait_for_children(server, len(known) + 1)
            [pid] = set(children(server)) - set(known)
            os.kill(pid, number)
        with pytest.raises(InvalidRequest, match="compiling it took too long, or failed"):
            lost.process()
        wait_for_children(server, len(known))
        assert children(server) == known and server_of(server).pid == before_pid
        assert not step((before.new_state({0}), [])).errors
        after = grammars.get('start: "b"', "attacker")
        assert after is not None and not step((after.new_state({0}), [])).errors
    finally:
        grammars.close()


@pytest.mark.extended
def test_a_grammar_that_compiles_for_too_long_is_refused_while_others_are_served(noise_model: Any) -> None:
    patterns = ",".join(f'{{"type": "string", "pattern": "a{i}"}}' for i in range(60))
    grammars = Grammars(str(noise_model), 2048, lambda: None)
    try:
        slow = [grammars.get(f'start: "{i}" %json {{"allOf": [{patterns}]}}', "attacker") for i in range(3)]
        fine = grammars.get('start: "a"', "other")
        assert fine is not None and slow[0] is not None
        fine.process()
        assert not slow[0].is_compiled, "it would have waited for this one"
        with pytest.raises(InvalidRequest, match="compiling it took too long"):
            slow[0].process()
    finally:
        grammars.close()


def test_one_client_cannot_use_all_processes(noise_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars_module, "MAX_GRAMMARS", 4)
    monkeypatch.setattr(grammars_module, "MAX_CLIENT_GRAMMARS", 2)
    monkeypatch.setattr(grammars_module, "_NUM_CACHED_GRAMMARS", 3)
    grammars = Grammars(str(noise_model), 2048, lambda: None)
    try:
        held = [grammars.get(f'start: "{i}"', "a") for i in range(2)]
        with pytest.raises(Overloaded, match="2 of them yours"):
            grammars.get('start: "2"', "a")
        optional = grammars.get('start: "2"', "a", is_optional=True)
        assert optional is not None and optional.is_compiled
        mask = step((optional.new_state({END}, is_optional=True), []))
        assert mask.rows == [] and mask.errors == {}, "it is not constrained"
        held += [grammars.get(f'start: "{i}"', "b") for i in range(3, 5)]
        with pytest.raises(Overloaded, match="at most 4"):
            grammars.get('start: "5"', "c")
        assert all(grammar is not None and grammar.process() for grammar in held)
        held.clear()
        assert grammars.get('start: "6"', "c") is not None
    finally:
        grammars.close()


def test_processes_that_are_idle_for_long_end(noise_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the last few and those that sequences use. What has ended is compiled again."""
    now = 0.0
    for module in (grammars_module, grammar_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    grammars = Grammars(str(noise_model), 2048, lambda: None)
    try:
        made = [grammars.get(f'start: "{letter}"+', "a") for letter in "abcdefgh"]
        assert all(each is not None and each.process() for each in made)
        assert made[0] is not None and made[1] is not None
        used = made[0].new_state({0})
        slept = made[1].new_state({0})
        made.clear()
        server = grammars._server.result()
        now = 59.0
        grammars.end_idle()
        wait_for_children(server, 8)
        used.grammar.send([], 60.0, 1.0)
        now = 61.0
        grammars.end_idle()
        wait_for_children(server, 4 + 1)
        assert slept.grammar.process(), "its sequence goes on"
        assert grammars.get('start: "a"+', "a") is used.grammar
        assert grammars.get('start: "b"+', "a") is not slept.grammar
    finally:
        grammars.close()


def test_a_grammar_that_cannot_be_compiled_leaves_no_garbage(noise_model: Any) -> None:
    grammars = Grammars(str(noise_model), 2048, lambda: None)
    try:
        broken = grammars.get("start: nothing")
        assert broken is not None
        with kept_garbage() as garbage:
            with pytest.raises(InvalidRequest, match="unknown name"):
                broken.process()
            again = grammars.get("start: nothing else")
            assert again is not None
            with pytest.raises(InvalidRequest):
                again.process()
            grammars._cached.clear()
            del again
        assert not frames_in("engine/sampling/", garbage)
    finally:
        grammars.close()


def test_clients_take_turns_and_have_one_compilation_at_a_time() -> None:
    queue: CompileQueue[str] = CompileQueue()
    for job in ("a1", "a2", "a3", "b1", "c1", "b2"):
        queue.push(job[0], job)
    assert [queue.pop(), queue.pop()] == [("a", "a1"), ("b", "b1")]
    queue.finish("a")
    assert queue.pop() == ("c", "c1")
    queue.finish("c")
    assert queue.pop() == ("a", "a2")
    assert queue.pop() is None  # a and b have one each
    queue.finish("b")
    assert queue.pop() == ("b", "b2")
    queue.finish("a")
    assert queue.pop() == ("a", "a3")
