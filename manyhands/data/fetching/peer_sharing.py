# SPDX-License-Identifier: Apache-2.0
"""A worker's part in the exchange of shards between hosts: it serves its host's cache, and learns
from each view who else does.

What is placed is placed on caches, not on hosts: hosts that share a folder are one keeper, however
they are called. Who keeps what follows from the shards, the policy and the caches of a view; nobody
is asked. A keeper that does not have its shard yet fetches it when it is first needed, for all: so
the origin is asked once, unless a keeper is lost or has no room.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from manyhands.data.fetching.placement import Placement, ShardHost, place
from manyhands.data.fetching.shard_cache import key_of
from manyhands.data.fetching.shard_server import ShardServer
from manyhands.data.fetching.transfer import AT_ONCE, NOBODY, Peer, Peers
from manyhands.data.fetching.wanted_shards import WantedShards
from manyhands.data.shards.manifest import ShardInfo
from manyhands.values.credentials import Credentials
from manyhands.values.view import Keeper


class Sharing:
    """All data of a task that comes from peers. One thread calls it, its server's another."""

    def __init__(
        self, shards_of: dict[Peer, Sequence[ShardInfo]], policy: str, secret: bytes, at: str
    ) -> None:
        """`at`: the address of this host, for others."""
        self.shards_of, self.policy = shards_of, policy
        self.credentials = Credentials.of(secret, "shards")
        self.cache = next(iter(shards_of)).cache
        self.identity = self.cache.identity()
        self._peer_of = {key_of(s): peer for peer, shards in shards_of.items() for s in shards}
        self._coming: dict[str, Future[None]] = {}
        self._pool = ThreadPoolExecutor(AT_ONCE, "fetching for others")
        shards = [shard for some in shards_of.values() for shard in some]
        bind = f"tcp://{at}:0"
        self.server = ShardServer(self.cache, shards, self.credentials, bind, self._is_coming)

    @property
    def address(self) -> str:
        return self.server.address

    def meet(self, keepers: Sequence[Keeper], *, late: bool) -> None:
        """The caches of a view. `late`: others have trained before it."""
        caches = sorted(keeper.cache for keeper in keepers)
        if self.identity not in caches:
            return
        kept: set[str] = set()
        for peer, shards in self.shards_of.items():
            known = peer.peers
            book = Peers(
                self._placed(shards, caches),
                {keeper.cache: keeper.address for keeper in keepers},
                self.credentials,
                self.identity,
                earlier=known.earlier,
                shown={keeper.cache: keeper.host for keeper in keepers},
            )
            if known is NOBODY and late and len(caches) > 1:
                others = [cache for cache in caches if cache != self.identity]
                book = replace(book, earlier=self._placed(shards, others))
            elif known.placement != book.placement:
                book = replace(book, earlier=known.placement)
            peer.peers = book
            kept |= {key_of(shard) for shard in shards if peer.keeps(shard)}
        self.cache.kept = frozenset(kept)

    def _placed(self, shards: Sequence[ShardInfo], caches: Sequence[str]) -> Placement:
        return place(shards, [ShardHost(cache) for cache in caches], self.policy)

    def _is_coming(self, info: ShardInfo) -> bool:
        """Somebody asked for a shard that is not here. Only who keeps it fetches it for others, and
        nobody waits for anyone else: two who each think that the other keeps it do not wait."""
        key = key_of(info)
        peer = self._peer_of[key]
        if not peer.keeps(info):
            return False
        fetching = self._coming.get(key)
        if fetching is None:
            self._coming[key] = self._pool.submit(_fetch, peer, info)
            return True
        if not fetching.done():
            return True
        del self._coming[key]
        return fetching.exception() is None  # it has come meanwhile; the next question finds it

    def close(self) -> None:
        self.server.close()
        self._pool.shutdown(wait=False, cancel_futures=True)


def _fetch(peer: Peer, info: ShardInfo) -> None:
    peer.path(info)
    peer.release(info)


def share(wanted: Sequence[WantedShards], policy: str, secret: bytes, at: str) -> Sharing | None:
    """What of this data comes from peers, as the settings say; None: nothing does."""
    found: dict[Peer, Sequence[ShardInfo]] = {}
    for each in wanted:
        if isinstance(each.transfer, Peer) and each.transfer.peers is NOBODY:
            found[each.transfer] = each.shards
    return Sharing(found, policy, secret, at) if found else None
