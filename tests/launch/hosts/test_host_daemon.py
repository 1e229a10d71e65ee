"""A host's own end, and who it listens to."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq
from zmq.auth import CURVE_ALLOW_ANY
from zmq.auth.thread import ThreadAuthenticator

from manyhands.launch.hosts.host_daemon import Offer, serve
from manyhands.stories.join import join
from manyhands.values.credentials import Credentials
from manyhands.values.errors import RequestError
from manyhands.values.join_token import DriverKey, JoinToken, write_token


@contextmanager
def pretender(public: bytes, secret: bytes) -> Generator[tuple["zmq.Socket[bytes]", int]]:
    """A server with these keys, to whom everybody is welcome."""
    context = zmq.Context()
    auth = ThreadAuthenticator(context)
    auth.start()
    auth.configure_curve(domain="*", location=CURVE_ALLOW_ANY)
    router = context.socket(zmq.ROUTER)
    router.curve_server, router.linger = True, 0
    router.curve_publickey, router.curve_secretkey = public, secret
    try:
        yield router, router.bind_to_random_port("tcp://127.0.0.1")
    finally:
        router.close()
        auth.stop()
        context.term()


def keys_of_a_holder(token: JoinToken) -> list[tuple[bytes, bytes]]:
    """What can be made of a token: its own pair, the server that once followed from the secret,
    and somebody else's key under the driver's name."""
    once = Credentials.of(token.secret, "join")
    return [
        token.pair,
        (once.server_public, once.server_secret),
        (token.driver, zmq.curve_keypair()[1]),
    ]


@pytest.mark.parametrize("which", range(3))
def test_a_token_holder_cannot_pose_as_the_driver(which: int) -> None:
    token = DriverKey().token()
    with pretender(*keys_of_a_holder(token)[which]) as (router, port):
        offer = Offer("127.0.0.1", port, token, slots=1, name="b", patience_s=0.5)
        try:
            code = serve(offer, lambda text: None)
        except RequestError as error:
            assert "does not accept this token" in str(error)
        else:
            assert code == 1
        assert not router.poll(0), "it was told something"


def test_the_driver_itself_is_spoken_to() -> None:
    key = DriverKey()
    with pretender(*key.pair) as (router, port):
        offer = Offer("127.0.0.1", port, key.token(), slots=1, name="b", patience_s=0.5)
        assert serve(offer, lambda text: None) == 1, "it is not answered"
        assert router.poll(0), "it was told that a host is here"


def test_an_address_that_is_none_of_this_host(tmp_path: Path) -> None:
    write_token(tmp_path / "token", DriverKey().token())
    with pytest.raises(RequestError, match=r"--address 192\.0\.2\.1 is none of this host's"):
        join(
            "127.0.0.1:7077",
            tmp_path / "token",
            slots=1,
            name="b",
            address="192.0.2.1",
            patience_s=1,
            tied=False,
            say=print,
        )
