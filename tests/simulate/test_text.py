from baton.rpc.block_hash import hash_blocks
from baton.services.simulate.requests.text import Texts


def test_hashes_of_a_text_are_those_of_its_tokens():
    texts = Texts(16)
    system = texts.start(texts.new_content(), 10)
    question = texts.extend(system, texts.new_content(), 100)
    word = texts.extend(question, texts.new_content(), 3)
    answer = texts.extend(word, texts.new_content(), 77)
    for text in (system, question, word, answer):
        assert text.num_tokens == len(text.token_ids())
        assert text.block_hashes == hash_blocks(texts.namespace, text.token_ids(), 16)


def test_equal_texts_are_one():
    texts = Texts(16)
    system = texts.start(texts.new_content(), 40)
    assert texts.extend(system, 7, 20) is texts.extend(system, 7, 20)
    assert texts.extend(system, 7, 20) is not texts.extend(system, 7, 21)
    assert texts.extend(system, 7, 20).block_hashes != texts.extend(system, 8, 20).block_hashes
