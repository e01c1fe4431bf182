"""Compiles a grammar's text to a matcher at the answer's start. Caches nothing."""

from __future__ import annotations

import numpy as np
from llguidance import LLMatcher, LLParserLimits

from baton.rpc.errors import InvalidRequest
from baton.worker.core import Constraint, ConstraintForm
from baton.worker.sampling.grammar.compilation.wording import plain_problem
from baton.worker.sampling.grammar.limits import GrammarLimits
from baton.worker.sampling.grammar.translation.constraint import field_of, grammar_of
from baton.worker.sampling.grammar.vocabulary import Vocabulary


def compile_grammar(
    vocabulary: Vocabulary, constraint: Constraint, grammar: str, limits: GrammarLimits, plain: bool = False
) -> LLMatcher:
    """Compiles the constraint's grammar and computes its first mask. Raises InvalidRequest with the field."""
    parser_limits = _parser_limits(constraint.form, limits, plain)
    matcher = LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=parser_limits)
    if not matcher.is_error():
        # The first mask is shared by all copies, and reveals grammars that are too expensive from the start.
        scratch = np.empty(vocabulary.num_words, np.int32)
        matcher.unsafe_compute_mask_ptr(scratch.ctypes.data, scratch.nbytes)
    if matcher.is_error():
        raise refusal(constraint, problem_of(matcher))
    return matcher


def problem_of(matcher: LLMatcher) -> str:
    """Returns the matcher's error, without its state and its grammar; empty without an error."""
    problem, _, _ = matcher.get_error().partition("\n<state>")
    return problem


def grammar_of_checked(constraint: Constraint) -> str:
    """Returns the grammar's text, as grammar_of. Raises the library's errors as InvalidRequest."""
    try:
        return grammar_of(constraint)
    except ValueError as error:
        raise refusal(constraint, str(error)) from error
    except RecursionError as error:
        raise refusal(constraint, "its parts and $refs are nested too deeply") from error


def refusal(constraint: Constraint, problem: str) -> InvalidRequest:
    """Returns the error for a constraint that the library rejected."""
    field = field_of(constraint)
    return InvalidRequest(f"{field}: {plain_problem(problem)}", field=field)


def _parser_limits(form: ConstraintForm, limits: GrammarLimits, plain: bool) -> LLParserLimits:
    written = form in (ConstraintForm.GRAMMAR, ConstraintForm.STRUCTURAL_TAG) and not plain
    return LLParserLimits(
        max_items_in_row=limits.max_written_row_items if written else limits.max_row_items,
        initial_lexer_fuel=limits.max_lexer_fuel,
        max_grammar_size=limits.max_grammar_size,
        step_lexer_fuel=limits.max_step_fuel,
        step_max_items=limits.max_written_step_items if written else limits.max_step_items,
        max_lexer_states=limits.max_plain_lexer_states if plain else limits.max_lexer_states,
        verbose_errors=True,  # the library reports a matcher's work in them
    )
