"""States of clients on disk: a file for each client and round, never overwritten."""

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from filelock import FileLock, Timeout

import fedprompt._refusals as check
from fedprompt._files import link, remove_parts, sync_file
from fedprompt._trees import from_blob, to_blob

NAME = re.compile(r"client-[0-9]+-[0-9]+-[0-9a-f]{16}\.safetensors")
"""Names of the files: client, round, and the digest of the content."""


class StateFile:
    """State in a file, which stays as long as a round of this process has it."""

    __slots__ = ("__weakref__", "folder", "name", "synced")

    def __init__(self, folder: "StateFolder", name: str) -> None:
        self.folder, self.name = folder, name
        self.synced = False

    def __del__(self) -> None:
        self.folder.unused.append(self.name)

    @property
    def path(self) -> Path:
        """Path of the file."""
        return self.folder.path / self.name

    def link_into(self, directory: Path) -> None:
        """Give the file a second name in a directory, after its content is on the disk."""
        if not self.synced:
            sync_file(self.path)
        self.synced = True
        link(self.path, directory / self.name)

    def read(self, device: Any = None) -> Any:
        """Read the state."""
        try:
            blob = self.path.read_bytes()
        except FileNotFoundError as error:
            raise check.wrong("now.clients", "have the files of its states", error) from error
        fits = self.name.endswith(_ending(blob))
        check.require(fits, "now.clients", "have its files as they were written", self.path)
        return from_blob(blob, device)


class StateFolder:
    """Folder of states. Its files stay as long as a round of this process has them."""

    _known: ClassVar[WeakValueDictionary[tuple[int, Path], "StateFolder"]] = WeakValueDictionary()

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: WeakValueDictionary[str, StateFile] = WeakValueDictionary()
        self.unused: list[str] = []
        self.lock = FileLock(path / ".lock", thread_local=False)

    @classmethod
    def at(cls, path: Path) -> "StateFolder":
        """Return the folder at a path: in a process, one for all runs and rounds."""
        place = os.getpid(), path.resolve()
        return cls._known.setdefault(place, cls(place[1]))

    def begin(self) -> None:
        """Keep other processes out, and remove what a killed run left."""
        made = self.path.is_dir() or not self.path.exists()
        check.require(made, "states", "be the path of a folder", f"the file {self.path}")
        taken = (self.path / "state.json").exists()
        check.require(not taken, "states", "not be the folder of a checkpoint", self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            if not self.lock.is_locked:
                self.lock.acquire(timeout=0)
        except Timeout as error:
            rule = "be a folder that no other process uses"
            raise check.wrong("states", rule, self.path) from error
        remove_parts(self.path, NAME.pattern)
        self.unused += [name for name in os.listdir(self.path) if NAME.fullmatch(name)]
        self.tidy()

    def tidy(self) -> None:
        """Remove the files that no round has."""
        while self.unused:
            if (name := self.unused.pop()) not in self.files:
                (self.path / name).unlink(missing_ok=True)

    def file(self, name: str) -> StateFile:
        """Return a file of this folder."""
        if (file := self.files.get(name)) is None:
            self.files[name] = file = StateFile(self, name)
        return file

    def write(self, client: str, server_round: int, state: Any) -> StateFile:
        """Write a state into a file that has no other name, and so is in no checkpoint."""
        blob = to_blob(state, "state")
        name = f"client-{client}-{max(server_round, 0)}{_ending(blob)}"
        if name not in self.files:
            path = self.path / name
            path.unlink(missing_ok=True)
            try:
                path.write_bytes(blob)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
        return self.file(name)

    def linked(self, file: StateFile) -> StateFile:
        """Return a file of another folder in this one."""
        if file.name not in self.files:
            link(file.path, self.path / file.name)
        own = self.file(file.name)
        own.synced |= file.synced
        return own


class StatesOnDisk(MutableMapping[str, Any]):
    """States by client id, each read from its file when it is asked for."""

    def __init__(self, folder: StateFolder, server_round: int = 0, device: Any = None) -> None:
        self.folder, self.server_round, self.device = folder, server_round, device
        self.files: dict[str, StateFile | None] = {}  # None for an empty state

    def __getitem__(self, client: str) -> Any:
        file = self.files[client]
        return {} if file is None else file.read(self.device)

    def __setitem__(self, client: str, state: Any) -> None:
        write = self.folder.write
        self.files[client] = write(client, self.server_round, state) if state else None

    def __delitem__(self, client: str) -> None:
        del self.files[client]

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)

    def __contains__(self, client: object) -> bool:  # without reading
        return client in self.files

    def __repr__(self) -> str:
        return f"<states of {len(self)} clients in {self.folder.path}>"

    def __reduce__(self) -> Any:  # another process has no claim on the files
        return dict, (dict(self),)

    @property
    def filled(self) -> Iterable[str]:
        """Ids of the clients whose state is not empty."""
        return (client for client, file in self.files.items() if file)

    def listed(self, files: dict[str, Any]) -> list[list[str | None]]:
        """List the names of the files by client, and add them to a dict of files by name."""
        files |= {file.name: file for file in self.files.values() if file}
        return [[client, file.name if file else None] for client, file in self.files.items()]

    @classmethod
    def of_list(cls, folder: StateFolder, device: Any, listed: Any) -> "StatesOnDisk":
        """Take the files of a list of names in a checkpoint, which must be there."""
        there, states = set(os.listdir(folder.path)), cls(folder, device=device)
        for client, name in listed:
            if not (isinstance(client, str) and (name is None or NAME.fullmatch(name))):
                raise ValueError(f"no file of a state: {name!r}")
            states.files[client] = file = name and folder.file(name)
            if file:
                file.synced = True
                if name not in there:
                    file.path.stat()  # raises
        return states


def carried(states: Mapping[str, Any], server_round: int) -> MutableMapping[str, Any]:
    """Return a copy for the states of a later round."""
    if not isinstance(states, StatesOnDisk):
        return dict(states)
    made = StatesOnDisk(states.folder, server_round, states.device)
    made.files = dict(states.files)
    return made


def tidy(states: Mapping[str, Any]) -> None:
    """Remove the files of earlier rounds that nobody kept."""
    if isinstance(states, StatesOnDisk):
        states.folder.tidy()


def states_of(
    clients: Mapping[str, Any], ids: Iterable[str], place: Path | None, server_round: int
) -> MutableMapping[str, Any]:
    """Return the states of some clients, in memory or in the files of a folder."""
    if place is None:
        return {client: clients[client] for client in ids}
    folder = StateFolder.at(place)
    folder.begin()
    made = StatesOnDisk(folder, server_round, getattr(clients, "device", None))
    for client in ids:
        file = clients.files[client] if isinstance(clients, StatesOnDisk) else None
        if file is None:
            made[client] = clients[client]
        else:
            made.files[client] = folder.linked(file)
    return made


def _ending(blob: bytes) -> str:
    return f"-{hashlib.sha256(blob).hexdigest()[:16]}.safetensors"
