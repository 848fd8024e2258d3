"""Uploads a model folder to a repository of the Hugging Face Hub, through `huggingface_hub`.

Token, address and offline mode are those of `huggingface_hub` (HF_TOKEN or the file of `hf auth login`, HF_ENDPOINT,
HF_HUB_OFFLINE). All files become one commit, so that a reader of the repository never sees half of an upload.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fourfold.errors import ConfigError
from fourfold.hub.repository import MALFORMED, hub_package, network_errors
from fourfold.text import clean, public_url

CARD: Final = "README.md"
_NAME: Final = re.compile(r"[\w.-]+/[\w.-]+")
_TIMEOUT_SECONDS: Final = 30.0
_LOGIN: Final = "log in with `hf auth login`, or set HF_TOKEN to a token that may write"


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """The files of a model folder, and the repository that they go to."""

    folder: Path
    repository: str  # OWNER/NAME
    files: tuple[str, ...]  # relative to the folder
    size: int  # bytes of all files
    card: str  # text of README.md; empty: the folder has one
    private: bool = False  # a new repository is made private, and an existing one must be
    branch: str = "main"

    @property
    def address(self) -> str:
        """Where the files go, without a token that HF_ENDPOINT may hold."""
        return f"{public_url(str(hub_package().constants.ENDPOINT))}/{self.repository}"


def prepare(folder: Path, repository: str, *, card: str, private: bool = False, branch: str = "main") -> Upload:
    """Return the upload that `send` will make; send nothing.

    Args:
        card: text of the model card README.md, unless the folder has that file.

    Raises:
        ConfigError: the name is not OWNER/NAME, there is no token, or `huggingface_hub` is not installed.
    """
    if _NAME.fullmatch(repository) is None or ".." in repository:
        raise ConfigError(f"{repository!r:.200} is no repository of the hub; write OWNER/NAME")
    if not hub_package().get_token():
        raise ConfigError(f"no token for {public_url(str(hub_package().constants.ENDPOINT))}; {_LOGIN}")
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    files = [str(path.relative_to(folder)) for path in paths]
    shown = [name for name in files if not any(part.startswith(".") for part in Path(name).parts)]
    return Upload(
        folder=folder,
        repository=repository,
        files=tuple(shown),
        size=sum((folder / name).stat().st_size for name in shown),
        card="" if CARD in shown else card,
        private=private,
        branch=branch,
    )


def send(upload: Upload) -> str:
    """Make the repository and the branch if they are missing, add one commit, and return the commit's address.

    Weights of an earlier upload that the folder does not have are deleted: transformers would load them.

    Raises:
        ConfigError: the hub refuses, cannot be reached, or has a public repository and the upload is private.
    """
    hub = hub_package()
    api = hub.HfApi()
    with _explained(upload):
        api.create_repo(upload.repository, private=upload.private or None, exist_ok=True)
        info = api.repo_info(upload.repository, timeout=_TIMEOUT_SECONDS)
        if upload.private and not info.private:
            raise ConfigError(f"{upload.address} is public, so nothing was sent; make it private there, or rename")
        if upload.branch != "main":
            api.create_branch(upload.repository, branch=upload.branch, exist_ok=True)
            info = api.repo_info(upload.repository, revision=upload.branch, timeout=_TIMEOUT_SECONDS)
        stale = {str(file.rfilename) for file in info.siblings or ()} - set(upload.files)
        operations: list[Any] = [
            hub.CommitOperationDelete(path_in_repo=name)
            for name in sorted(stale)
            if name.endswith((".safetensors", ".safetensors.index.json"))
        ]
        operations += [hub.CommitOperationAdd(name, str(upload.folder / name)) for name in upload.files]
        if upload.card:
            operations.append(hub.CommitOperationAdd(CARD, upload.card.encode()))
        made = api.create_commit(
            upload.repository, operations, commit_message=f"Upload {upload.folder.name}", revision=upload.branch
        )
    return str(made.commit_url)


@contextmanager
def _explained(upload: Upload) -> Iterator[None]:
    """Turn errors of huggingface_hub into ConfigError, without addresses that may hold keys."""
    errors, where = hub_package().errors, upload.address
    try:
        yield
    except ConfigError:
        raise
    except errors.OfflineModeIsEnabled:
        raise ConfigError(f"{where}: HF_HUB_OFFLINE forbids an upload; unset it") from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        if status in (401, 403, 404):
            raise ConfigError(f"{where}: the hub refused (HTTP {status}); check the name, and {_LOGIN}") from None
        raise ConfigError(f"{where}: the hub answered HTTP {status} ({clean(str(error), 200)}); try again") from None
    except _failures() as error:
        cause = error.__cause__ or error  # an upload in a thread of huggingface_hub
        raise ConfigError(
            f"{where}: the upload failed ({clean(str(cause), 200)}); check the network, and run the same command again"
        ) from None


def _failures() -> tuple[type[Exception], ...]:
    """Return the exceptions of an upload besides the hub's own errors."""
    return (*network_errors(), *MALFORMED, RuntimeError)
