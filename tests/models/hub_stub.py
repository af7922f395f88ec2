"""A hub on this machine: the endpoints that huggingface_hub's client calls to make a model, commit to it and fetch it, and nothing else."""

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

APART = 1000  # bytes; larger files are stored apart from git


class Hub:
    """repositories: name -> its files, the newest commit's. Names in `lost` are left out of a commit, in `changed` altered."""

    def __init__(self):
        self.repositories, self.stored, self.commits, self.calls = {}, {}, 0, []
        self.lost, self.changed, self.refuses = set(), set(), set()  # refuses: parts of paths that are answered with 403

    @property
    def oid(self):
        return f"{self.commits:040x}"

    def answer(self, method, path, body):
        """(status, headers, content) of a request."""
        self.calls.append(f"{method} {path}")
        if any(part in path for part in self.refuses):
            return 403, {}, {"error": "not for you"}
        match method, path.strip("/").split("/"):
            case "POST", ["api", "validate-yaml"]:
                return 200, {}, {"errors": [], "warnings": []}
            case "POST", ["api", "repos", "create"]:
                asked = json.loads(body)
                name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
                self.repositories.setdefault(name, {})
                return 200, {}, {"url": f"{self.url}/{name}", "private": asked.get("private")}
            case "POST", ["api", "models", _, _, "preupload", _]:
                files = json.loads(body)["files"]
                mode = lambda file: "lfs" if file["size"] > APART else "regular"
                return 200, {}, {"files": [{"path": f["path"], "uploadMode": mode(f), "shouldIgnore": False} for f in files]}
            case "POST", [_, _, "info", "lfs", "objects", "batch"]:
                place = lambda oid: {"upload": {"href": f"{self.url}/lfs/{oid}"}}
                objects = [one | {"actions": place(one["oid"])} for one in json.loads(body)["objects"]]
                return 200, {}, {"transfer": "basic", "objects": objects}
            case "PUT", ["lfs", oid]:
                self.stored[oid] = body
                return 200, {}, b""
            case "POST", ["api", "models", owner, model, "commit", _]:
                self._commit(f"{owner}/{model}", [json.loads(line) for line in body.splitlines()])
                url = f"{self.url}/{owner}/{model}/commit/{self.oid}"
                return 200, {}, {"success": True, "commitOid": self.oid, "commitUrl": url, "hookOutput": ""}
            case "GET", ["api", "models", owner, model, "tree", _]:
                return 200, {}, [self._entry(*file) for file in self.repositories[f"{owner}/{model}"].items()]
            case "GET", ["api", "models", _, _, "tree", _, *folder] if folder:
                return 404, {"X-Error-Code": "EntryNotFound"}, {"error": "Entry not found"}
            case "GET", ["api", "models", owner, model, *_]:
                if f"{owner}/{model}" not in self.repositories:
                    return 404, {"X-Error-Code": "RepoNotFound"}, {"error": "Repository not found"}
                files = [{"rfilename": name} for name in self.repositories[f"{owner}/{model}"]]
                return 200, {}, {"id": f"{owner}/{model}", "sha": self.oid, "siblings": files}
            case "GET" | "HEAD", [owner, model, "resolve", _, *file]:
                content = self.repositories[f"{owner}/{model}"].get("/".join(file))
                if content is None:
                    return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": self.oid}, {"error": "Entry not found"}
                etag = hashlib.sha256(content).hexdigest()
                return 200, {"ETag": f'"{etag}"', "X-Repo-Commit": self.oid, "X-Linked-Size": str(len(content))}, content
        return 404, {}, {"error": f"this hub has no {method} {path}"}

    def _commit(self, name, lines):
        self.commits += 1
        for line in lines:
            of = line["value"]
            if line["key"] == "header" or of["path"] in self.lost:
                continue
            content = base64.b64decode(of["content"]) if line["key"] == "file" else self.stored[of["oid"]]
            self.repositories[name][of["path"]] = content[:-1] + b"!" if of["path"] in self.changed else content

    def _entry(self, path, content):
        entry = {
            "type": "file",
            "path": path,
            "size": len(content),
            "oid": hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest(),
        }
        if len(content) > APART:
            entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 100}
        return entry


@contextmanager
def running():
    """A hub that answers on a port of this machine: `hub.url`."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def _any(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, headers, content = hub.answer(self.command, re.sub("%2F", "/", urlsplit(self.path).path), body)
            sent = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in ({"Content-Type": "application/json"} | headers).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(sent)

        do_GET = do_HEAD = do_POST = do_PUT = _any

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
