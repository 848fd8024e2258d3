"""Certificates of one deployment, for attack tests."""

from __future__ import annotations

import shutil
from pathlib import Path

from fourfold.config import SecurityConfig
from fourfold.security.access import Security
from fourfold.security.principal import Principal
from fourfold_tools import certs

MEMBERS = ("coordinator-0", "trainer-0", "reward-0", "reward-1", "rollout-0", "viewer-0")


class Pki:
    """A folder with a CA, and copies of it for other machines."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.token = certs.make(folder, [], [certs.parse_member(name) for name in MEMBERS])

    def load(self, name: str, *, tokens: bool = False) -> Security:
        """Load the files of one member; with `tokens`, also the token file of a public port."""
        return self.load_as(Principal(name.partition("-")[0], name), tokens=tokens)

    def load_as(self, who: Principal, *, folder: Path | None = None, tokens: bool = False) -> Security:
        """Load the files as a process that claims to be `who`."""
        used = folder or self.folder
        config = SecurityConfig(directory=str(used), tokens_file=str(used / "tokens.txt") if tokens else "")
        security = Security.load(config, who)
        assert security is not None
        return security

    def copy(self, folder: Path, *names: str) -> Path:
        """Copy the CA's certificate and some members' files to another machine's folder."""
        folder.mkdir()
        for name in ("ca", *names):
            shutil.copy(self.folder / f"{name}.pem", folder)
        return folder

    def agent(self) -> Security:
        """Load the CA's certificate, the only file of an agent."""
        return Security.for_agent(self.folder / "ca.pem")
