"""Answers of two clusters are equal, differ where two tokens are about equally likely, or are wrong."""

from __future__ import annotations

import math

from tandem.deploy.engine_check.answers import TIE, CheckedAnswer, first_difference, largest_error

WANTED = CheckedAnswer([5, 6, 7], [{5: -0.1, 9: -3.0}, {6: -0.7, 8: -0.8}, {7: -0.2, 1: -2.0}])


def test_equal_answers_have_no_difference() -> None:
    assert first_difference(WANTED, CheckedAnswer([5, 6, 7], [])) is None


def test_a_tie_is_told_from_a_wrong_token() -> None:
    tied = first_difference(
        WANTED, CheckedAnswer([5, 8, 2], [{5: -0.1, 9: -3.0}, {8: -0.7, 6: -0.75}, {2: 0.0, 3: -9.0}])
    )
    assert tied is not None and tied.is_tie
    assert str(tied) == "token 1 is 8 in place of 6 (two tokens about equally likely)"
    for top, gap in (({8: -0.1, 6: -0.1 - 2 * TIE}, 2 * TIE), ({8: -0.1, 4: -0.1}, math.inf)):
        wrong = first_difference(WANTED, CheckedAnswer([5, 8], [{5: -0.1, 9: -3.0}, top]))
        assert wrong is not None and not wrong.is_tie
        assert math.isclose(wrong.gap, gap) or wrong.gap == gap


def test_a_short_answer_differs_at_its_end() -> None:
    short = first_difference(WANTED, CheckedAnswer([5, 6], WANTED.top[:2]))
    assert short is not None and (short.position, short.expected, short.found, short.is_tie) == (2, 7, -1, False)


def test_the_error_of_a_log_probability_counts_up_to_the_first_other_token() -> None:
    found = CheckedAnswer([5, 8, 7], [{5: -0.15, 9: -3.0}, {8: -0.7, 6: -5.0}, {7: -9.0, 1: -2.0}])
    assert math.isclose(largest_error(WANTED, found), 0.05)
