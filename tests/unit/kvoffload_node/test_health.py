"""The daemon's endpoints: who connects and says nothing does not keep a thread."""

import socket

import pytest

from kvoffload_node import health


def test_a_connection_that_says_nothing_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "REQUEST_SECONDS", 0.1)
    server = health.start_endpoints(0, {"/healthz": lambda: (200, health.TEXT, b"ok\n")})
    try:
        silent = [socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=10) for _ in range(8)]
        silent[0].sendall(b"GET /heal")
        for sock in silent:
            assert sock.recv(100) == b""
            sock.close()
    finally:
        server.shutdown()
        server.server_close()
