"""One deployment's certificates, for attack tests."""

from __future__ import annotations

import shutil
from pathlib import Path

from fourfold.config import SecurityConfig
from fourfold.security import certs
from fourfold.security.access import Security
from fourfold.security.principal import Principal

MEMBERS = ("coordinator-0", "trainer-0", "reward-0", "reward-1", "rollout-0", "viewer-0")


class Pki:
    """A folder with an authority, and copies of it as other machines have them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.token = certs.make(folder, [], [certs.parse_member(name) for name in MEMBERS])

    def load(self, name: str, *, tokens: bool = False) -> Security:
        """The material of one member; `tokens` for a public port."""
        return self.load_as(Principal(name.partition("-")[0], name), tokens=tokens)

    def load_as(self, who: Principal, *, folder: Path | None = None, tokens: bool = False) -> Security:
        """What a process reads that says it is `who`."""
        used = folder or self.folder
        config = SecurityConfig(directory=str(used), tokens_file=str(used / "tokens.txt") if tokens else "")
        security = Security.load(config, who)
        assert security is not None
        return security

    def copy(self, folder: Path, *names: str) -> Path:
        """Another machine's folder with the CA's certificate and some members' files."""
        folder.mkdir()
        for name in ("ca", *names):
            shutil.copy(self.folder / f"{name}.pem", folder)
        return folder

    def agent(self) -> Security:
        """What an agent outside has."""
        return Security.for_agent(self.folder / "ca.pem")
