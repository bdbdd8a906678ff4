"""An API server that knows one KVOffloadRegion, one DaemonSet and some pods, for tests of a real daemon or attacher
that say when an object is there, is another one, or when nobody answers. The real API server is in
`e2e/test_node_api.py`.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

WATCH_SECONDS = 0.1
"""A watch ends after so long without an event: the daemon reads the region again."""
DAEMONSET = {"metadata": {"name": "d"}, "spec": {"selector": {}, "template": {}}}


class ScriptedApiServer:
    """Answers the node daemon; `region` and `has_daemonset` are what it tells, `statuses` what it was told."""

    def __init__(self, folder: Path, spec: dict[str, Any]) -> None:
        """`spec` is the region's, in JSON names."""
        self.region: dict[str, Any] | None = None
        self.has_daemonset = True
        self.pods: list[dict[str, Any]] = []
        self.watch_seconds = WATCH_SECONDS
        self.statuses: list[dict[str, Any]] = []
        self._spec = spec
        self._http: ThreadingHTTPServer | None = None
        self._port = 0
        self._kubeconfig = folder / "kubeconfig"

    @property
    def kubeconfig(self) -> str:
        """What `KUBECONFIG` is for the daemon."""
        return str(self._kubeconfig)

    def make_region(self, uid: str, **changes: Any) -> None:
        """The region is one of this uid from now on."""
        name = f"{self._spec['poolName']}.{self._spec['nodeName']}"
        metadata = {"name": name, "uid": uid, "generation": 1}
        self.region = {"metadata": metadata, "spec": {**self._spec, **changes}}

    def start(self) -> None:
        """Answer from now on, at the same address as before."""
        scripted = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                if "watch=True" in self.path:
                    stopped.wait(scripted.watch_seconds)
                    self._answer(200, b"")
                elif "/pods" in self.path:
                    self._object({"kind": "PodList", "metadata": {"resourceVersion": "1"}, "items": scripted.pods})
                elif "daemonsets" in self.path:
                    self._object(DAEMONSET if scripted.has_daemonset else None)
                else:
                    self._object(scripted.region)

            def do_PATCH(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                scripted.statuses.append(body["status"])
                self._object(scripted.region)

            def _object(self, found: dict[str, Any] | None) -> None:
                self._answer(200 if found else 404, json.dumps(found or {"kind": "Status"}).encode())

            def _answer(self, code: int, body: bytes) -> None:
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """A test's output is for what failed."""

        stopped = threading.Event()
        self._stopped = stopped
        self._http = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        self._http.daemon_threads = True
        self._port = self._http.server_address[1]
        cluster = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{self._port}"}}
        context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
        config = {"clusters": [cluster], "contexts": [context], "users": [{"name": "u", "user": {}}]}
        self._kubeconfig.write_text(json.dumps({**config, "current-context": "c"}))
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        """Nobody answers any more."""
        if self._http is not None:
            self._stopped.set()
            self._http.shutdown()
            self._http.server_close()
            self._http = None

    def condition(self, type: str) -> dict[str, Any]:
        """This condition as it was last told."""
        conditions = self.statuses[-1]["conditions"] if self.statuses else []
        return next((dict(one) for one in conditions if one["type"] == type), {})
