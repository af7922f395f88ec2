"""Bytes in, the same bytes out; a tokenizer file is read or refused with its name."""

import numpy as np
import pytest

from needlework.data import EOT, byte_tokenizer, decode_bytes, encode_bytes, eot_id, load_tokenizer
from needlework.data.tokenizer import byte_ids, encode, encode_documents, is_byte_tokenizer


def test_any_bytes_come_back():
    data = bytes(range(256)) + np.random.default_rng(0).bytes(10_000)
    ids = encode_bytes(data)
    assert ids.tolist() == list(data)
    assert decode_bytes(np.append(ids, 256)) == data


def test_the_tokenizer_and_the_fast_path_agree_on_text():
    tokenizer = byte_tokenizer()
    text = 'def f(x):\n\treturn x  # naïve, "日本語" 🪡\r\n\0\x7f'
    assert encode(tokenizer, text).tolist() == encode_bytes(text.encode()).tolist()
    assert tokenizer.decode(encode(tokenizer, text).tolist()) == text


def test_byte_b_has_id_b_and_end_of_text_is_256():
    tokenizer = byte_tokenizer()
    assert byte_ids(tokenizer).tolist() == list(range(256))
    assert eot_id(tokenizer) == tokenizer.token_to_id(EOT) == 256
    assert tokenizer.get_vocab_size() == 257


def test_a_saved_tokenizer_loads_from_its_file_and_its_folder(tmp_path):
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    assert is_byte_tokenizer(load_tokenizer(tmp_path / "tokenizer.json"))
    assert is_byte_tokenizer(load_tokenizer(tmp_path))


def test_a_missing_or_foreign_tokenizer_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.json"):
        load_tokenizer(tmp_path / "nowhere.json")
    (tmp_path / "other.json").write_text('{"version": 1}')
    with pytest.raises(ValueError, match=r"other\.json is not a `tokenizers` JSON file"):
        load_tokenizer(tmp_path / "other.json")


def test_a_tokenizer_without_bytes_or_end_of_text_is_refused():
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({"needle": 0, "hay": 1}, unk_token="hay"))
    with pytest.raises(ValueError, match="256 of the 256 bytes"):
        byte_ids(words)
    with pytest.raises(ValueError, match="no end-of-text token; tried"):
        eot_id(words)


def test_a_file_that_asks_for_one_length_cuts_and_pads_no_text(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8, pad_id=256, pad_token=EOT)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    again = load_tokenizer(tmp_path)
    for text in ("a text of many bytes", "a"):
        assert encode(again, text).tolist() == list(text.encode())
        assert [ids.tolist() for ids in encode_documents(again, [text])] == [list(text.encode())]
