"""Finds repositories of the Hugging Face Hub in the local cache, and downloads them through `huggingface_hub`.

    hf:OWNER/NAME@REVISION --refs of the cache--> commit --list of its files--> all there? --yes--> folder
                                                                                          \\--no--> download

A branch, such as main, stays at the commit that was downloaded until `fourfold get` asks the hub again. Token, cache,
address and offline mode are those of huggingface_hub (HF_TOKEN, HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE).
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Self

from fourfold.errors import ConfigError
from fourfold.hub.layout import README, data_files, model_files, split_files
from fourfold.install import install_command
from fourfold.text import clean, public_url

MALFORMED: Final = (ValueError, TypeError, KeyError, AttributeError)
"""Exceptions of huggingface_hub for answers of other servers, such as a proxy's login page, which it does not check."""


def hub_package() -> Any:
    """Return the package `huggingface_hub`; raise ConfigError if it is not installed."""
    try:
        import huggingface_hub.constants
        import huggingface_hub.errors
    except ModuleNotFoundError:
        raise ConfigError(f"the hub needs the package huggingface_hub; {install_command('fourfold[hub]')}") from None
    return huggingface_hub


def network_errors() -> tuple[type[Exception], ...]:
    """Return OSError, and the errors of the HTTP client that this version of huggingface_hub uses, which are none."""
    return (OSError, *(sys.modules[name].HTTPError for name in ("httpx2", "httpx") if name in sys.modules))


PREFIX: Final = "hf:"
Kind = Literal["model", "dataset"]
Select = Callable[[Sequence[str], str], Sequence[str]]
"""Chooses files of a repository by their names and the text of README.md."""

log: Final = logging.getLogger(__name__)
_SOURCE: Final = re.compile(r"hf:([\w.-]+(?:/[\w.-]+)?)(?:@([\w.-][\w./-]*))?")
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_HASH: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_TIMEOUT_SECONDS: Final = 30.0
_LOGIN: Final = "log in with `hf auth login`, or set HF_TOKEN"


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """A repository of the hub at a revision."""

    kind: Kind
    name: str  # OWNER/NAME
    revision: str = "main"  # branch, tag or commit

    @classmethod
    def parse(cls, source: str, kind: Kind) -> Self:
        """Read `hf:OWNER/NAME` or `hf:OWNER/NAME@REVISION`. Raises ConfigError: the text is neither."""
        match = _SOURCE.fullmatch(source)
        if match is None or ".." in source:
            raise ConfigError(f"{source!r:.200} is no {kind} of the hub; write hf:OWNER/NAME or hf:OWNER/NAME@REVISION")
        return cls(kind=kind, name=match.group(1), revision=match.group(2) or "main")

    @property
    def title(self) -> str:
        """The repository as in a recipe."""
        return f"{PREFIX}{self.name}" + (f"@{self.revision}" if self.revision != "main" else "")

    @property
    def _cache(self) -> Path:
        return Path(hub_package().constants.HF_HUB_CACHE) / f"{self.kind}s--{self.name.replace('/', '--')}"

    @property
    def _ref(self) -> Path:
        return self._cache / "refs" / self.revision

    def cached_commit(self) -> str:
        """Return the commit of the revision that is in the cache; empty if none is."""
        if _COMMIT.fullmatch(self.revision):
            return self.revision
        try:
            text = self._ref.read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            return ""
        return text if _COMMIT.fullmatch(text) else ""

    def snapshot(self, commit: str) -> Path:
        """Return the folder of a commit in the cache."""
        return self._cache / "snapshots" / commit

    def names(self, commit: str) -> list[str] | None:
        """Return the names of all files of a commit, if they are known."""
        try:
            names = json.loads(self._listing(commit).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return [str(name) for name in names] if isinstance(names, list) else None

    def remember(self, commit: str, names: Sequence[str]) -> None:
        """Store the names of all files of a commit, and that the revision is this commit."""
        try:
            _replace(self._listing(commit), json.dumps(list(names)))
            if not _COMMIT.fullmatch(self.revision):
                _replace(self._ref, commit)
        except OSError as error:  # such as a cache of other users, which has the files already
            log.warning("could not store the commit of %s, so the next start asks the hub again: %s", self.title, error)

    def _listing(self, commit: str) -> Path:
        return self._cache / "fourfold" / f"{commit}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Files of a repository on this machine."""

    folder: Path
    names: tuple[str, ...]  # relative to the folder
    commit: str  # 40 hexadecimal digits

    @property
    def paths(self) -> list[Path]:
        """The files, in order."""
        return [self.folder / name for name in self.names]


def model_folder(source: str) -> Path:
    """Return the folder of a model `hf:OWNER/NAME`, downloaded at its first use.

    Raises:
        ConfigError: the hub has no such model, refuses it, or cannot be reached, and the cache has not all of it.
    """
    return find(Repository.parse(source, "model"), _select_model).folder


def dataset_files(source: str, *, config: str, split: str) -> list[Path]:
    """Return the files of a split of a data set `hf:OWNER/NAME`. Errors as in `model_folder`, and an unknown split."""
    return find(Repository.parse(source, "dataset"), select_split(source, config, split)).paths


def select_split(where: str, config: str, split: str) -> Select:
    """Return the choice of the files of a split."""
    return lambda names, readme: split_files(names, readme, config=config, split=split, where=where)


def select_all(kind: Kind) -> Select:
    """Return the choice of all files of a model, or of all files with rows."""
    return _select_model if kind == "model" else lambda names, readme: data_files(names)


def _select_model(names: Sequence[str], readme: str) -> Sequence[str]:
    return model_files(names)


def pin(source: str, kind: Kind) -> str:
    """Return the source with the commit of its revision, so that it names the same files for ever."""
    repository = Repository.parse(source, kind)
    commit = repository.cached_commit() or ask(repository)[0]
    return f"{PREFIX}{repository.name}@{commit}"


def find(repository: Repository, select: Select) -> Files:
    """Return files of a repository from the cache, or download them. Errors as in `model_folder`."""
    commit = repository.cached_commit()
    folder = repository.snapshot(commit or "none")
    names = repository.names(commit)
    if names is not None:
        found = _select_cached(folder, names, select)
        if found is not None and all((folder / name).is_file() for name in found):
            return Files(folder=folder, names=tuple(found), commit=commit)
    try:
        return download(repository, select)
    except _Unreachable:
        # Another program may have filled the cache; then the names of the files on the hub are not known.
        if names is not None or not folder.is_dir():
            raise
        local = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]
        found = _select_cached(folder, local, select)
        if not found:
            raise
        log.warning("took %s from the cache without asking the hub whether it is whole: %s", repository.title, folder)
        return Files(folder=folder, names=tuple(found), commit=commit)


def _select_cached(folder: Path, names: Sequence[str], select: Select) -> Sequence[str] | None:
    """Return the chosen names; None if README.md, which the choice reads, is not there."""
    try:
        readme = (folder / README).read_text(encoding="utf-8", errors="replace") if README in names else ""
    except OSError:
        return None
    return select(names, readme)


def download(repository: Repository, select: Select, folder: Path | None = None) -> Files:
    """Download files of the newest commit of a revision, into the cache or a folder. Errors as in `model_folder`."""
    hub = hub_package()
    commit, hashes = ask(repository)
    names = list(hashes)
    place: dict[str, Any] = {"repo_id": repository.name, "repo_type": repository.kind, "revision": commit}
    if folder is not None:
        place["local_dir"] = folder
    with _explained(repository):
        readme = ""
        if README in names:
            readme = Path(hub.hf_hub_download(filename=README, **place)).read_text(encoding="utf-8", errors="replace")
        chosen = list(select(names, readme))
        if not chosen:
            raise ConfigError(
                f"{repository.title}: no file of it can be used; it has {', '.join(names[:20]) or 'none'}"
            )
        sys.stderr.write(f"Downloading {repository.title}: {len(chosen)} files of commit {commit[:12]}\n")
        found = Path(hub.snapshot_download(allow_patterns=[glob.escape(name) for name in chosen], **place))
        for name in chosen:
            _check_hash(repository, found / name, hashes[name])
    if folder is None:
        repository.remember(commit, names)
    return Files(folder=found, names=tuple(chosen), commit=commit)


def _check_hash(repository: Repository, path: Path, expected: str) -> None:
    """Delete a file with another hash than the hub names, and raise ConfigError; huggingface_hub checks sizes alone."""
    if not _HASH.fullmatch(expected):
        return
    kind = "sha256" if len(expected) == 64 else "sha1"  # of a large file, or of an object of Git
    with path.open("rb") as file:
        start = hashlib.new(kind, b"" if kind == "sha256" else f"blob {path.stat().st_size}\0".encode())
        found = hashlib.file_digest(file, start.copy).hexdigest()
    if found != expected:
        blob = path.resolve()
        path.unlink()
        if blob.parent.name == "blobs":  # of the cache, in which the path is a link; another link stays the user's
            blob.unlink(missing_ok=True)
        raise ConfigError(
            f"{repository.title}: {path.name} was damaged on the way ({kind} {found[:12]}, and the hub names "
            f"{expected[:12]}) and is deleted; run the command again, or check HF_ENDPOINT and the proxy"
        )


class NotOnHub(ConfigError):
    """The hub has no such repository, or hides it."""


class _Unreachable(ConfigError):
    """The hub cannot be asked: there is no network, or the offline mode is on."""


def ask(repository: Repository) -> tuple[str, Mapping[str, str]]:
    """Return the commit of a revision, and the hash of each of its files by name; empty if the hub names none.

    A hash is a SHA-256 (64 digits), or that of an object of Git (40 digits).

    Raises:
        NotOnHub: the hub has no such repository.
        ConfigError: as in `model_folder`.
    """
    api, title = hub_package().HfApi(), repository.title
    wanted = {"repo_type": repository.kind, "revision": repository.revision, "files_metadata": True}
    try:
        with _explained(repository):
            info = api.repo_info(repository.name, timeout=_TIMEOUT_SECONDS, **wanted)
        commit, files = str(info.sha), sorted(info.siblings or (), key=lambda file: str(file.rfilename))
        hashes = {str(file.rfilename): str((file.lfs.sha256 if file.lfs else file.blob_id) or "") for file in files}
    except ConfigError:
        raise
    except MALFORMED as error:
        raise _Unreachable(
            f"{title}: {public_url(str(api.endpoint))} answered what no hub does ({type(error).__name__}); check "
            f"HF_ENDPOINT and the proxy, or give the path of a folder"
        ) from None
    if not _COMMIT.fullmatch(commit):
        raise ConfigError(f"{title}: the hub names no commit of it ({commit!r:.80}); give another revision")
    return commit, {name: hashes[name] for name in hashes if _is_inside(name)}


def _is_inside(name: str) -> bool:
    """Return whether a name is that of a file below the folder of its repository."""
    return name.isprintable() and not {"", ".", ".."} & set(name.split("/"))


@contextmanager
def _explained(repository: Repository) -> Iterator[None]:
    """Turn errors of huggingface_hub into ConfigError, without addresses that may hold keys."""
    hub, title, kind = hub_package(), repository.title, repository.kind
    errors, endpoint = hub.errors, public_url(str(hub.constants.ENDPOINT))
    try:
        yield
    except errors.GatedRepoError:
        raise ConfigError(f"{title}: its owner asks for consent; accept the terms on its page, and {_LOGIN}") from None
    except errors.RepositoryNotFoundError:
        raise NotOnHub(
            f"{title}: {endpoint} has no such {kind}, or it is private; correct the name, or {_LOGIN}"
        ) from None
    except errors.RevisionNotFoundError:
        raise ConfigError(
            f"{title}: it has no revision {repository.revision!r}; give a branch, a tag or a commit"
        ) from None
    except errors.OfflineModeIsEnabled:
        raise _Unreachable(
            f"{title} is not in the cache, and HF_HUB_OFFLINE forbids a download; run `fourfold get {title}` with the "
            f"network, or unset it"
        ) from None
    except errors.HFValidationError as error:
        raise ConfigError(f"{title}: {clean(str(error), 200)} Correct the name") from None
    except network_errors() as error:
        status = _http_status(error)
        if status in (401, 403):
            raise ConfigError(f"{title}: {endpoint} refused (HTTP {status}); {_LOGIN}") from None
        if status:
            raise _Unreachable(f"{title}: {endpoint} answered HTTP {status}; try again later") from None
        # The text of an error may have the address, and with it a password.
        reason = getattr(error, "strerror", None) or type(error.__cause__ or error).__name__
        raise _Unreachable(
            f"{title}: {endpoint} cannot be reached, or the disk refused the files ({reason}); check the network, or "
            f"give the path of a folder"
        ) from None


def _http_status(error: BaseException | None) -> int:
    """Return the status of an answer of the hub that an error, or one of its causes, is about; 0 without one."""
    while error is not None:
        if (response := getattr(error, "response", None)) is not None:
            return int(response.status_code)
        error = error.__cause__
    return 0


def _replace(path: Path, text: str) -> None:
    """Write a file that other processes may read at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
