"""Tokens: what they hold, what they do not, and whose they are."""

from pathlib import Path

import pytest

from manyhands.values.errors import RequestError
from manyhands.values.join_token import (
    DriverKey,
    JoinToken,
    key_file,
    key_for,
    make_token,
    parse_token,
    read_key,
    read_token,
    write_token,
)


def test_a_token_comes_back_as_it_was_written(tmp_path: Path) -> None:
    for token in (DriverKey().token(), DriverKey().token("b-1.site")):
        write_token(tmp_path / "token", token)
        assert read_token(tmp_path / "token") == token
        assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
        assert token.secret.hex() not in repr(token)


def test_the_drivers_key_is_in_no_token() -> None:
    key = DriverKey()
    mine, yours = key.token(), key.token("b")
    secrets = {mine.secret, yours.secret, *mine.pair, *yours.pair}
    assert mine.driver == yours.driver == key.pair[0]
    assert key.pair[1] not in secrets and key.pair[1].hex() not in mine.text + yours.text
    assert mine.secret != yours.secret and mine.pair != yours.pair


def test_each_token_is_known_by_its_key(tmp_path: Path) -> None:
    file = tmp_path / "token"
    key = key_for(file)
    assert key.holder(key.token().pair[0]) == ""
    stranger = DriverKey()
    assert key.holder(stranger.token().pair[0]) is None
    assert key.holder(key.token("b").pair[0]) is None, "nobody made it yet"
    own = make_token(file, "b")
    assert key.holder(read_token(own).pair[0]) == "b", "made while the key is in use"
    make_token(file, "c")
    assert read_key(key_file(file)).names == ["b", "c"]
    assert key_for(file).pair == key.pair


def test_a_token_file_and_its_key_belong_together(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    assert make_token(one, None) == one
    with pytest.raises(RequestError, match="is there already"):
        make_token(one, None)
    key = key_for(one)
    one.unlink()
    assert key_for(one).pair == key.pair and one.exists(), "from the key it is made again"
    make_token(other, None)
    key_file(other).rename(key_file(one))
    with pytest.raises(RequestError, match="was not made from"):
        key_for(one)
    with pytest.raises(RequestError, match=r"other.key is not there.*manyhands token"):
        key_for(other)
    key_file(one).chmod(0o644)
    with pytest.raises(RequestError, match="can be read by others"):
        key_for(one)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("ab" * 32, "older versions.*manyhands token"),
        ("", "no token"),
        (DriverKey().text, "the driver's key, which stays"),
        (DriverKey().token().text.replace(":", ":zz", 1), "damaged"),
        ("manyhands-token-2:aa:bb:", "damaged"),
    ],
    ids=["old", "empty", "key", "garbled", "short"],
)
def test_what_is_no_token_is_told_as_what_it_is(text: str, told: str) -> None:
    with pytest.raises(RequestError, match=f"here.*{told}"):
        parse_token(text, "here")


@pytest.mark.parametrize("name", ["", "a/b", "../x", "a b", "-x", "x" * 64, "key"])
def test_names_that_cannot_be_files_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(RequestError, match="--for"):
        make_token(tmp_path / "token", name)


def test_secrets_are_not_shown() -> None:
    key = DriverKey()
    token: JoinToken = key.token()
    seed = key.text.splitlines()[0].partition(":")[2]
    for shown in (repr(key), str(key), repr(token), f"{[key, token]}"):
        assert seed not in shown and token.secret.hex() not in shown and "b'" not in shown
