"""Answers of vLLM's server that are not what its routes give."""

import http.server
import threading

import pytest

from rlloop.rollout.vllm.messages import Chosen
from rlloop.rollout.vllm.upstream import Upstream, UpstreamError


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b'{"results": [], "data": [3]}', b'{"results": [3], "data": 3}', b"[" * 100_000]
)
def test_an_answer_of_another_shape_is_an_error_that_names_the_server(content):
    class Server(http.server.BaseHTTPRequestHandler):
        def answer(self):
            self.rfile.read(int(self.headers["content-length"] or 0))
            self.send_response(200)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = answer

        def log_message(self, *args):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        upstream = Upstream(url)
        for ask in (upstream.models, lambda: upstream.rpc(Chosen, "rlloop_chosen", "[]")):
            with pytest.raises(UpstreamError, match=f"vLLM at {url} answers .* with something else"):
                ask()
        upstream.close()
        server.shutdown()
