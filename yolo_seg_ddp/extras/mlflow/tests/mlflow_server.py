"""A local HTTP server with the part of MLflow's REST API that the project uses, and faults on
demand.
"""

import json
import re
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from tests.support.local_server import LocalServer


class FakeMlflow(LocalServer):
    """Serves `runs` under `root` while it is a context manager. It keeps duplicates of metrics,
    which MLflow would drop.

    `after` are faults that follow a request which took effect; each writes the answer by itself.
    `always` replaces every answer.
    """

    def __init__(self, artifact_root: str = "mlflow-artifacts:/") -> None:
        self.artifact_root = artifact_root
        self.experiments = ["Default"]  # by number
        self.runs: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}  # by their name without folders
        self.authorizations: list[str | None] = []  # one a request
        # by the request's last word; used once
        self.after: dict[str, Callable[[_Handler], None]] = {}
        self.always: Callable[[_Handler], None] | None = None
        super().__init__(_Handler)

    def metrics(self, number: int = 0) -> list[tuple[int, str, float]]:
        """Return (step, name, value) of everything that was logged to a run, duplicates included,
        in order.
        """
        return sorted(
            (metric["step"], metric["key"], metric["value"])
            for metric in self.runs[number]["metrics"]
        )

    def do(self, method: str, content: dict[str, Any]) -> dict[str, Any] | None:
        """Carry out a request of the API; None: what it asks for does not exist."""
        run = self.runs[int(content["run_id"])] if "run_id" in content else {}
        match method:
            case "experiments/get-by-name" if content["experiment_name"] in self.experiments:
                return {
                    "experiment": {
                        "experiment_id": str(self.experiments.index(content["experiment_name"]))
                    }
                }
            case "experiments/create":
                self.experiments.append(content["name"])
                return {"experiment_id": str(len(self.experiments) - 1)}
            case "runs/create":
                run_id = str(len(self.runs))
                self.runs.append(
                    {**content, "id": run_id, "status": "RUNNING", "params": {}, "metrics": []}
                )
                return {"run": self.shown(self.runs[-1])}
            case "runs/get":
                return {"run": self.shown(run)}
            case "runs/search":
                _, key, _ = content["filter"].split("'")
                places = content["experiment_ids"]
                return {
                    "runs": [self.shown(run) for run in self.runs if self.has(run, key, places)]
                }
            case "metrics/get-history":
                return {
                    "metrics": [
                        metric
                        for metric in run["metrics"]
                        if metric["key"] == content["metric_key"]
                    ]
                }
            case "runs/update":
                run.update(content)
                return {"run_info": {}}
            case "runs/log-batch":
                metrics, params = content.get("metrics", []), content.get("params", [])
                assert max(len(metrics) / 10, len(params)) <= 100, "MLflow's limits"
                assert all(
                    run["params"].setdefault(one["key"], one["value"]) == one["value"]
                    for one in params
                )
                run["metrics"] += metrics
                return {}
        return None

    def has(self, run: dict[str, Any], key: str, places: list[str]) -> bool:
        is_there = run["experiment_id"] in places and "is_deleted" not in run
        return is_there and {"key": "run_folder_key", "value": key} in run["tags"]

    def shown(self, run: dict[str, Any]) -> dict[str, Any]:
        facts = {
            "run_id": run["id"],
            "experiment_id": run["experiment_id"],
            "status": run["status"],
        }
        params = [{"key": key, "value": value} for key, value in run["params"].items()]
        return {
            "info": {**facts, "artifact_uri": f"{self.artifact_root}{run['id']}"},
            "data": {"params": params},
        }


class _Handler(BaseHTTPRequestHandler):
    owner: FakeMlflow

    def log_message(self, format: str, *args: Any) -> None:
        """Stay quiet."""

    def serve(self) -> None:
        server, address = self.owner, urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        server.authorizations.append(self.headers.get("Authorization"))
        if server.always is not None:
            return server.always(self)
        name = address.path.rpartition("/")[2]
        answer: dict[str, Any] | None = {}
        if self.command == "PUT":
            server.files[name] = body
        else:
            content = dict(parse_qsl(address.query)) if self.command == "GET" else json.loads(body)
            answer = server.do(re.sub("^/api/2.0/mlflow/", "", address.path), content)
        missing = {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": self.path}
        reply_as_usual = reply(
            200 if answer is not None else 404,
            json.dumps(missing if answer is None else answer).encode(),
        )
        return server.after.pop(name, reply_as_usual)(self)

    do_GET = do_POST = do_PUT = serve


def reply(status: int, body: bytes, **headers: str) -> Callable[[_Handler], None]:
    """Return what writes this answer. A header may be wrong, such as Content-Length."""

    def write(handler: _Handler) -> None:
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)

    return write


def hang_up(handler: _Handler) -> None:
    handler.close_connection = True


def never_answer(handler: _Handler) -> None:
    """Keep the connection open for longer than anybody waits."""
    time.sleep(5)
