# SPDX-License-Identifier: Apache-2.0
"""Who may join a run, and how hosts know its driver: tokens to hand out, a key that stays.

The driver has a key (`DriverKey`). From it follow, one way only, the pair of keys by which it is
known and the secret of every token. A token (`JoinToken`) holds its own secret and the driver's
*public* key, so:

- who has a token can join, and only its holder can: the driver knows every token by its key;
- a host speaks to nobody but the driver, whatever tokens somebody else holds: from all tokens
  together the driver's key cannot be told;
- a token that was made for one host can be withdrawn without the others.

Tokens are handed on in files that only their owner can read, or over channels that are protected;
never on a command line, in a log or in the environment. The key is in a file beside the token
(`FILE.key`) if tokens are to be there before the driver is, or to serve several runs; else it is in
the driver's memory and nowhere else.
"""

import os
import re
import stat
from pathlib import Path

import msgspec
import zmq
from zmq.utils import z85

from manyhands.values.credentials import derived, new_secret
from manyhands.values.errors import RequestError
from manyhands.values.local_folders import local_folder

_TOKEN, _KEY = "manyhands-token-2", "manyhands-driver-key-2"
_OLD = re.compile(r"[0-9a-fA-F]{64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")

CurvePair = tuple[bytes, bytes]
"""Public and secret key of a CURVE connection."""


class JoinToken(msgspec.Struct, frozen=True):
    """What a host is given to join by."""

    secret: bytes
    driver: bytes
    """The driver's public key."""
    name: str = ""
    """Of the host that it was made for; left out: of any."""

    @property
    def pair(self) -> CurvePair:
        return _pair(derived(self.secret, "joins"))

    @property
    def text(self) -> str:
        """One line."""
        return f"{_TOKEN}:{self.secret.hex()}:{z85.decode(self.driver).hex()}:{self.name}\n"

    def __repr__(self) -> str:
        return f"JoinToken(..., name={self.name!r})"


class DriverKey:
    """What the driver has, and nobody else. `file` may get more names while it is in use."""

    def __init__(
        self, seed: bytes | None = None, names: tuple[str, ...] = (), file: Path | None = None
    ) -> None:
        self._seed = new_secret() if seed is None else seed
        self.file, self._read = file, 0
        self.pair = _pair(derived(self._seed, "driver"))
        self._holders = {self.token(name).pair[0]: name for name in ("", *names)}

    def token(self, name: str = "") -> JoinToken:
        """For one host, or for any."""
        return JoinToken(derived(self._seed, f"token {name}"), self.pair[0], name)

    def holder(self, public: bytes) -> str | None:
        """For whom the token was made that has this key: "" for any host; None: there is none."""
        if public not in self._holders and self.file is not None:
            self._look_again(self.file)
        return self._holders.get(public)

    def knowing(self, name: str) -> "DriverKey":
        """The same key, with a token for a host of that name."""
        return DriverKey(self._seed, (*self.names, name), self.file)

    def _look_again(self, file: Path) -> None:
        """A token may have been made since."""
        try:
            changed = file.stat().st_mtime_ns
            if changed != self._read:
                again = read_key(file)
                self._read = changed
                if again.pair == self.pair:
                    self._holders |= again._holders
        except (OSError, RequestError):
            pass  # it was removed: what is known stays

    @property
    def names(self) -> list[str]:
        return sorted(filter(None, self._holders.values()))

    @property
    def text(self) -> str:
        return "\n".join([f"{_KEY}:{self._seed.hex()}", *self.names, ""])

    def __repr__(self) -> str:
        return "DriverKey(...)"


def key_file(token_file: Path) -> Path:
    """Where the key is of which a token file was made."""
    return token_file.with_name(token_file.name + ".key")


def key_for(token_file: Path) -> DriverKey:
    """The driver's key that goes with a token file; both are made when neither is there."""
    beside = key_file(local_folder(token_file, "a token", "the token's file"))
    if token_file.exists():
        token = read_token(token_file)
        if not beside.exists():
            raise RequestError(
                f"{beside} is not there: the driver's key, from which {token_file} was made. Start "
                f"the run where that is, or make a new pair: manyhands token {token_file}"
            )
        key = read_key(beside)
        if key.token(token.name) != token:
            raise RequestError(
                f"{token_file} was not made from {beside}: hosts with this token would not know "
                f"this driver. Remove both and make a new pair: manyhands token {token_file}"
            )
        return key
    key = read_key(beside) if beside.exists() else DriverKey(file=beside)
    _write(beside, key.text)
    write_token(token_file, key.token())
    return key


def make_token(token_file: Path, name: str | None) -> Path:
    """A token in a file, with the key beside it; or, from that key, one for a host of that name,
    whose file is returned."""
    if name is None:
        if token_file.exists():
            raise RequestError(f"{token_file} is there already. Remove it to have another token.")
        key_for(token_file)
        return token_file
    if not _NAME.fullmatch(name):
        raise RequestError(
            f"--for {name}: a host's name here has letters, digits, and . _ - (63 at most)."
        )
    key, own = key_for(token_file), token_file.with_name(f"{token_file.name}.{name}")
    if own == key_file(token_file):
        raise RequestError(f"--for {name}: {own} is where the driver's key is. Take another name.")
    _write(key_file(token_file), key.knowing(name).text)
    write_token(own, key.token(name))
    return own


def write_token(path: Path, token: JoinToken) -> None:
    """For others to join by: a file that only its owner can read."""
    _write(path, token.text)


def read_token(path: Path) -> JoinToken:
    """The token in a file; one that others can read is refused."""
    return parse_token(_read(path, "token file"), str(path))


def parse_token(text: str, where: str) -> JoinToken:
    if _OLD.fullmatch(text.strip()):
        raise RequestError(
            f"{where} holds a token as older versions made them, with which any host could pose as "
            "the driver. Make a new one where the run is started: manyhands token FILE"
        )
    mark, _, rest = text.strip().partition(":")
    parts = rest.split(":", 2)
    if mark != _TOKEN or len(parts) != 3:
        what = "the driver's key, which stays where it is; hosts get" if mark == _KEY else "no"
        raise RequestError(
            f"{where} holds {what} token: one line, as `manyhands train --listen` and "
            "`manyhands token` write it."
        )
    secret, driver = (_bytes(part, where) for part in parts[:2])
    return JoinToken(secret, z85.encode(driver), parts[2])


def read_key(path: Path) -> DriverKey:
    first, *names = _read(path, "driver's key").splitlines() or [""]
    mark, _, seed = first.partition(":")
    if mark != _KEY:
        raise RequestError(f"{path} holds no driver's key, as `manyhands token` writes it.")
    return DriverKey(_bytes(seed, str(path)), tuple(filter(None, names)), path)


def _pair(secret: bytes) -> CurvePair:
    encoded = z85.encode(secret)
    return zmq.curve_public(encoded), encoded


def _bytes(text: str, where: str) -> bytes:
    try:
        found = bytes.fromhex(text)
    except ValueError:
        found = b""
    if len(found) != 32:
        raise RequestError(f"{where} is damaged: it does not hold 64 hexadecimal digits.")
    return found


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "w") as file:
            os.fchmod(fd, 0o600)
            file.write(text)
    except OSError as error:
        raise RequestError(f"{path} cannot be written: {error}") from error


def _read(path: Path, what: str) -> str:
    try:
        mode = path.stat().st_mode
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"the {what} {path} cannot be read: {error}") from error
    if stat.S_ISREG(mode) and mode & 0o077:
        raise RequestError(
            f"the {what} {path} can be read by others (mode {mode & 0o777:o}). Make a new one, "
            f"or, if nobody has read it: chmod 600 {path}"
        )
    return text
