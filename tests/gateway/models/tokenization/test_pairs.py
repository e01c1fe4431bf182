"""Pairs of texts have the ids that the tokenizer gives them."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from baton.gateway.models.tokenization.pairs import read_pair_template

WORDS = ["[UNK]", "[CLS]", "[SEP]", "a", "b", "red", "fox", "ran"]
FORMS = {
    "bert": ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"),
    "roberta": ("[CLS] $A [SEP]", "[CLS] $A [SEP] [SEP] $B [SEP]"),
    "no special tokens": None,
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_pair_is_joined_as_the_tokenizer_does(form: tuple[str, str] | None) -> None:
    rust = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    rust.pre_tokenizer = pre_tokenizers.Whitespace()
    if form is not None:
        special = [(word, WORDS.index(word)) for word in ("[CLS]", "[SEP]")]
        rust.post_processor = processors.TemplateProcessing(form[0], form[1], special)
    template = read_pair_template(rust)
    first, second = (rust.encode(text, add_special_tokens=False).ids for text in ("red fox", "fox ran a"))
    expected = rust.encode("red fox", "fox ran a")
    pair = template.joined(first, second)
    assert pair.token_ids == expected.ids
    assert expected.sequence_ids.index(1) == pair.second_start
    assert template.num_tokens == len(expected.ids) - 5
