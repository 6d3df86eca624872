"""A local HTTP server with the part of MLflow's REST API that the project uses, its limits, and faults on demand."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.support.local_server import LocalServer

Answer = tuple[int, dict[str, Any]]
ARTIFACTS = "/api/2.0/mlflow-artifacts/artifacts/"


class FakeMlflow(LocalServer):
    """Serves `runs` under `url` while it is a context manager. It keeps duplicates of metrics, which MLflow would drop.

    `after` are faults that follow a request which took effect; each writes the answer by itself. `always` replaces every answer.
    """

    def __init__(self, artifact_root: str = "mlflow-artifacts:/") -> None:
        self.artifact_root = artifact_root
        self.experiments: dict[str, str] = {"Default": "0"}
        self.runs: dict[str, dict[str, Any]] = {}
        self.files: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []  # method and path
        self.authorizations: list[str | None] = []
        self.after: dict[str, Callable[[_Handler], None]] = {}  # by the request's last word; used once
        self.always: Callable[[_Handler], None] | None = None
        self.lock = threading.Lock()
        super().__init__(_Handler)
        self.url = self.root

    def metrics_of(self, run_id: str) -> list[tuple[int, str, float]]:
        """Return (step, name, value) of everything that was logged, duplicates included, in order."""
        return sorted((metric["step"], metric["key"], metric["value"]) for metric in self.runs[run_id]["metrics"])

    def do(self, method: str, query: dict[str, str], content: dict[str, Any]) -> Answer:
        match method:
            case "experiments/get-by-name" if query["experiment_name"] in self.experiments:
                return 200, {"experiment": {"experiment_id": self.experiments[query["experiment_name"]]}}
            case "experiments/create":
                self.experiments[content["name"]] = str(len(self.experiments))
                return 200, {"experiment_id": self.experiments[content["name"]]}
            case "runs/create":
                run_id = f"run{len(self.runs)}"
                self.runs[run_id] = {**content, "status": "RUNNING", "stage": "active", "params": {}, "metrics": []}
                return 200, {"run": self.shown(run_id)}
            case "runs/get" if query["run_id"] in self.runs:
                return 200, {"run": self.shown(query["run_id"])}
            case "runs/search":
                found = re.fullmatch(r"tags\.(\w+) = '(\w+)'", content["filter"])
                assert found
                tag = {"key": found[1], "value": found[2]}
                names = [name for name, run in self.runs.items() if tag in run["tags"]]
                return 200, {"runs": [self.shown(name) for name in names]}
            case "metrics/get-history":
                metrics = self.runs[query["run_id"]]["metrics"]
                return 200, {"metrics": [metric for metric in metrics if metric["key"] == query["metric_key"]]}
            case "runs/update":
                self.runs[content["run_id"]] |= content
                return 200, {"run_info": {}}
            case "runs/log-batch":
                return self.log_batch(self.runs[content["run_id"]], content)
        return 404, {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": f"{method} {query}"}

    def log_batch(self, run: dict[str, Any], content: dict[str, Any]) -> Answer:
        metrics, params = content.get("metrics", []), content.get("params", [])
        if len(metrics) > 1000 or len(params) > 100:
            return 400, {"error_code": "INVALID_PARAMETER_VALUE", "message": "too many"}
        for item in [*metrics, *params]:
            if not re.fullmatch(r"[\w.\- :/]{1,250}", item["key"]) or len(str(item["value"])) > 6000:
                return 400, {"error_code": "INVALID_PARAMETER_VALUE", "message": item["key"]}
        for param in params:
            if run["params"].setdefault(param["key"], param["value"]) != param["value"]:
                return 400, {"error_code": "INVALID_PARAMETER_VALUE", "message": "Changing param values is not allowed"}
        run["metrics"] += metrics
        return 200, {}

    def shown(self, run_id: str) -> dict[str, Any]:
        run = self.runs[run_id]
        info = {
            "run_id": run_id,
            "experiment_id": run["experiment_id"],
            "status": run["status"],
            "lifecycle_stage": run["stage"],
            "artifact_uri": f"{self.artifact_root}{run['experiment_id']}/{run_id}/artifacts",
        }
        params = [{"key": key, "value": value} for key, value in run["params"].items()]
        return {"info": info, "data": {"params": params, "tags": run["tags"]}}


class _Handler(BaseHTTPRequestHandler):
    owner: FakeMlflow

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def do_PUT(self) -> None:
        self._serve()

    def log_message(self, format: str, *args: Any) -> None:
        """Stay quiet."""

    def _serve(self) -> None:
        server, address = self.owner, urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        with server.lock:
            server.requests.append((self.command, address.path))
            server.authorizations.append(self.headers.get("Authorization"))
            fault = server.always
            if fault is None:
                fault = server.after.pop(address.path.rpartition("/")[2], None)
                answer = self._carry_out(address.path, address.query, body)
        if fault is not None:
            fault(self)
        else:
            self.reply(answer[0], json.dumps(answer[1]).encode())

    def _carry_out(self, path: str, query: str, body: bytes) -> Answer:
        if self.command == "PUT":
            self.owner.files[path.removeprefix(ARTIFACTS)] = body
            return 200, {}
        questions = {key: values[0] for key, values in parse_qs(query).items()}
        return self.owner.do(path.removeprefix("/api/2.0/mlflow/"), questions, json.loads(body or b"{}"))

    def reply(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def reply(status: int, body: bytes, **headers: str) -> Callable[[_Handler], None]:
    """Return a fault: this answer. A header may be wrong, such as Content-Length."""
    return lambda handler: handler.reply(status, body, **headers)


def hang_up(handler: _Handler) -> None:
    handler.close_connection = True


def drip(handler: _Handler) -> None:
    """Send a header that never ends, a byte at a time."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
    for _ in range(400):
        time.sleep(0.02)
        try:
            handler.wfile.write(b"x")
        except OSError:
            return


def never_answer(handler: _Handler) -> None:
    """Keep the connection open for longer than anybody waits."""
    time.sleep(5)
