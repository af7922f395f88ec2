"""The Hugging Face Hub, through its own client: a published folder fetched, a checkpoint's folder pushed in one commit.

HF_ENDPOINT and HF_TOKEN are the client's, as everywhere.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, snapshot_download
from huggingface_hub.hf_api import RepoFile


def fetched(name: str, patterns: Iterable[str]) -> Path:
    """The files of a model `name` on the Hub that `patterns` name, in the client's cache; OSError, with its reason, where they cannot be
    had."""
    try:
        return Path(snapshot_download(name, allow_patterns=[*patterns]))
    except Exception as error:  # whatever the network has
        raise OSError(f"{name}: no folder here, and not to be had from the Hub: {type(error).__name__}: {error}") from error


def pushed(folder: Path, name: str, *, private: bool = False) -> str:
    """Push a checkpoint's folder to the model `name` on the Hub, which is made if it is not there; returns the commit's address.

    All files are one commit: others see every file or none. What the Hub holds after it is compared, digest by digest, with the folder.
    OSError says that nothing was committed, or what differs.
    """
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    api = HfApi()
    try:
        api.create_repo(name, private=private, exist_ok=True)
        added = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=path) for name, path in files.items()]
        commit = api.create_commit(name, added, commit_message=f"{folder.name}, by needlework push")
    except Exception as error:  # whatever the network has
        raise OSError(f"{name}: nothing was committed: {type(error).__name__}: {error}") from error
    try:
        tree = api.list_repo_tree(name, recursive=True, revision=commit.oid)
        held = {entry.path: entry for entry in tree if isinstance(entry, RepoFile)}
    except Exception as error:
        raise OSError(f"{name}: committed as {commit.oid}, but not confirmed: {type(error).__name__}: {error}") from error
    if wrong := [path for path, local in files.items() if path not in held or not _same(local, held[path])]:
        raise OSError(f"{name}: commit {commit.oid} does not hold the folder's {', '.join(wrong)}")
    return commit.commit_url


def _same(path: Path, entry: RepoFile) -> bool:
    """Whether the Hub's file is this one: by its sha256 where it is stored apart from git, else by git's own digest of a blob."""
    if entry.lfs is not None:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == entry.lfs.sha256
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest() == entry.blob_id
