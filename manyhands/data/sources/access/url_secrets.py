# SPDX-License-Identifier: Apache-2.0
"""Paths and URLs as people may see them: never with a user, a password, a token or a key.

A URL is shown without its userinfo and without the values of its query, whatever they are: what is
not shown cannot leak. The links of a chained URL (`simplecache::s3://...`) are cleaned one by one.
Local paths are shown as they are.
"""

import re
from urllib.parse import unquote, unquote_plus

_LINK = re.compile(r"(?:^|(?<=::))([A-Za-z][\w.+-]*)://")
_IN_TEXT = re.compile(r"(?:[A-Za-z][\w.+-]*::)*[A-Za-z][\w.+-]*://[^\s'\"<>`]+")
_CONTAINERS = frozenset({"abfs", "abfss", "wasb", "wasbs"})
"""Protocols that write `container@account` where others write `user@host`."""


def is_url(source: str) -> bool:
    return re.match(r"[A-Za-z][\w.+-]+(://|::)", source) is not None


def protocols(url: str) -> list[str]:
    """Of each link of a URL, outermost first: `simplecache::s3://b/x` → simplecache, s3."""
    return [link.partition("://")[0].lower() for link in url.split("::")]


def shown(url: str) -> str:
    """The path or URL without secrets; bytes that are no text are written with a backslash."""
    clean = "".join(text for text, _ in _links(url)) if is_url(url) else url
    return clean.encode("utf-8", "backslashreplace").decode()


def hide(text: str, url: str) -> str:
    """Somebody else's message about this URL, with nothing in it that `shown` would not show."""
    text = text.replace(url, shown(url))
    for secret in sorted((s for _, found in _links(url) for s in found), key=len, reverse=True):
        text = text.replace(secret, "***")
    return _IN_TEXT.sub(lambda found: shown(found[0]), text)


def _links(url: str) -> list[tuple[str, list[str]]]:
    """Each link of a chained URL: what may be shown of it, and its secrets."""
    starts = [found.start() for found in _LINK.finditer(url)]
    if not starts:
        return [(url, [])]
    ends = [*starts[1:], len(url)]
    links = [_link(url[start:end]) for start, end in zip(starts, ends, strict=True)]
    return [(url[: starts[0]], []), *links]


def _link(link: str) -> tuple[str, list[str]]:
    protocol, _, rest = link.partition("://")
    user, rest = _userinfo(protocol.lower(), rest)
    secrets = _spellings([user, *user.split(":", 1)])
    body, mark, query = _cut_query(rest)
    chain = "::" if mark and rest.endswith("::") else ""
    values = [part.partition("=")[2] or part for part in re.split("[&;?#]", query)]
    secrets += _spellings([*values, query.removesuffix("::")])
    return f"{protocol}://{body}{'?...' if mark else ''}{chain}", secrets


def _userinfo(protocol: str, rest: str) -> tuple[str, str]:
    """What stands before the host. A password may hold any character, even those it should not."""
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    if "@" in authority:
        user, _, _ = authority.rpartition("@")
        if protocol in _CONTAINERS and ":" not in user:
            return "", rest
        return user, rest[len(user) + 1 :]
    port = authority.rpartition(":")[2]
    a_port = port.isdigit() and authority.count(":") == 1
    if ":" in authority and not a_port and not authority.startswith("[") and "@" in rest:
        user, _, host = rest.rpartition("@")
        return user, host
    return "", rest


def _cut_query(rest: str) -> tuple[str, str, str]:
    found = re.search("[?#]", rest)
    if found is None:
        return rest, "", ""
    return rest[: found.start()], found[0], rest[found.end() :]


def _spellings(words: list[str]) -> list[str]:
    """The words as they stand and as they read when unquoted; the shortest would hide too much."""
    both = {form for word in words for form in (word, unquote(word), unquote_plus(word))}
    return sorted(word for word in both if len(word) >= 4)
