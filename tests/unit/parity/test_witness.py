"""A witness's address: where its token comes from, and that it has no login."""

import http.server
import threading

import pytest

from rlloop.config.run import CertificateConfig
from rlloop.errors import ConfigError
from rlloop.parity.certificate import Statement
from rlloop.parity.witness import Attestor, check_certificate


@pytest.mark.parametrize("address", ["ftp://me:s3cret@witness/x", "ftp:/me:s3cret@witness/x", "me:s3cret@witness/x"])
def test_a_login_at_a_scheme_that_is_not_supported_is_not_shown(address):
    with pytest.raises(ConfigError, match=r"certificate.witness has a login") as refused:
        check_certificate(CertificateConfig(witness=address))
    assert "s3cret" not in str(refused.value)
    with pytest.raises(ConfigError, match="'/nowhere/me@here/x'; it must be"):
        check_certificate(CertificateConfig(witness="/nowhere/me@here/x"))


def test_a_login_is_refused_and_a_token_is_sent_from_the_environment(tmp_path, monkeypatch):
    sent: list[str | None] = []

    class Witness(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            sent.append(self.headers["authorization"])
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    with pytest.raises(ConfigError, match=r"certificate.witness has a login .* certificate.token_env=LOGIN") as refused:
        check_certificate(CertificateConfig(witness="HTTPS://me:s3cret@witness/x"))
    assert "s3cret" not in str(refused.value)
    check_certificate(CertificateConfig(witness=str(tmp_path / "me@here.jsonl")))
    with http.server.HTTPServer(("127.0.0.1", 0), Witness) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        config = CertificateConfig(witness=f"http://127.0.0.1:{server.server_port}/@me", token_env="LOGIN")
        with pytest.raises(ConfigError, match=r"certificate.token_env names 'LOGIN'"):
            check_certificate(config)
        monkeypatch.setenv("LOGIN", "Basic bWU6cGFzcw==")
        check_certificate(config)
        Attestor(config, tmp_path, pytest.fail)(Statement("run", 1, "head", "checkpoint"))
        server.shutdown()
    assert sent == ["Basic bWU6cGFzcw=="]


@pytest.mark.parametrize("witness", [None, "heads.jsonl"])
def test_a_token_that_nothing_would_send_is_refused(tmp_path, witness):
    config = CertificateConfig(witness=witness and str(tmp_path / witness), token_env="LOGIN")
    with pytest.raises(ConfigError, match=r"token_env is 'LOGIN', .* set certificate.witness=https://"):
        check_certificate(config)
