"""An HTTP server in a thread of this process."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = tuple[int, dict[str, str], bytes]  # status, headers, content


class Listening(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # the kernel resets connections that wait beyond it


@contextlib.contextmanager
def serving(answer: Callable[[BaseHTTPRequestHandler, bytes], Answer]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, headers, content = answer(self, body)
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(content))}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                with contextlib.suppress(BrokenPipeError):  # a client that waits no longer
                    self.wfile.write(content)

        do_HEAD = do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    listening = Listening(("127.0.0.1", 0), Handler)
    threading.Thread(target=listening.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listening.server_port}"
    finally:
        listening.shutdown()
        listening.server_close()
