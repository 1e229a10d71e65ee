"""A web server over a folder, as Python has it: without ranges. It can be ended, and tell lies."""

import functools
import http.server
import io
import os
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

SECRETS = ("hunter22", "SECRET77")


class Web:
    """Serves `folder` until it is ended; `again` serves it at the same address."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, 0
        self.asked: Counter[str] = Counter()
        """How often each file was sent."""
        self.flips: dict[str, int] = {}
        """Of these files a byte is sent wrongly."""
        self.sends: int | None = None
        """It falls silent after so many files."""
        self.again()

    def again(self) -> None:
        handler = functools.partial(_Handler, self, directory=str(self.folder))
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", self.port), handler)
        self.port = self.server.server_port
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def url(self, name: str = "") -> str:
        """With secrets."""
        return f"http://user:{SECRETS[0]}@127.0.0.1:{self.port}/{name}?token={SECRETS[1]}"

    def shown(self, name: str = "") -> str:
        return f"http://127.0.0.1:{self.port}/{name}"

    def end(self) -> None:
        """From now on nobody listens there."""
        if self.thread.is_alive():
            self.server.shutdown()
            self.server.server_close()
            self.thread.join()


class _Handler(http.server.SimpleHTTPRequestHandler):
    def __init__(self, web: Web, *args: Any, **options: Any) -> None:
        self.web = web
        super().__init__(*args, **options)

    def send_head(self) -> Any:
        """Of HEAD and GET. Without an answer the connection is closed."""
        silent = self.web.sends is not None and self.web.asked.total() >= self.web.sends
        return None if silent else super().send_head()

    def log_message(self, format: str, *args: object) -> None:
        pass

    def copyfile(self, source: Any, outputfile: Any) -> None:
        name = os.path.basename(self.path.partition("?")[0])
        self.web.asked[name] += 1
        if name in self.web.flips:
            data = bytearray(source.read())
            data[self.web.flips[name]] ^= 1
            source = io.BytesIO(data)
        with suppress(ConnectionError):  # the reader had enough
            super().copyfile(source, outputfile)
