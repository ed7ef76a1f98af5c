"""`pallasite explore --serve`: the page of a file as it is now, at a local address."""

import html
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

HOST = "localhost"


def serve(command: Sequence[str], port: int) -> int:
    """Serve until interrupted.

    Args:
        command: generates the page and writes it to the `-o` path.
        port: to listen on, on this computer only; 0: any free port.
    """
    try:
        listening = ThreadingHTTPServer((HOST, port), _handler(command))
    except (OSError, OverflowError) as error:
        print(f"pallasite explore: port {port}: {error}", file=sys.stderr)
        return 2
    with listening as server:
        print(f"http://{HOST}:{server.server_port}  (stop with Ctrl-C)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0


def _handler(command: Sequence[str]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/":
                self.send_error(404)
                return
            page = made(command).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


def made(command: Sequence[str]) -> str:
    """The page, or one with the error."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.html"
        done = subprocess.run(
            [*command, "-o", str(path)], capture_output=True, text=True, check=False
        )
        if path.exists():
            return path.read_text(encoding="utf-8")
    return f"<!doctype html><pre>{html.escape(done.stderr)}</pre>"
